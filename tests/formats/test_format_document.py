# SPDX-License-Identifier: Apache-2.0
"""docs/FORMAT-L3R.md is enough to read a file: a reader made of its tables and `struct`, nothing of ours."""

from __future__ import annotations

import hashlib
import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cecilia.formats.quant import FORMATS
from tests.formats.samples import METADATA, PLAN, TEMPLATE, TOKENIZER, weights, write_sample

PAGE = Path(__file__).resolve().parents[2] / "docs" / "FORMAT-L3R.md"


@cache
def tables(heading: str) -> list[list[dict[str, str]]]:
    """The tables under a `## heading` or `### heading` of the page, each row as column title -> cell."""
    body = PAGE.read_text(encoding="utf-8").split(f"# {heading}\n", 1)[1].split("\n#", 1)[0]
    found = []
    for block in body.split("\n\n"):
        lines = [line.strip() for line in block.splitlines() if line.startswith("|")]
        if lines:
            cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
            found.append([dict(zip(cells[0], row, strict=True)) for row in cells[2:]])
    return found


def read_record(raw: bytes, rows: list[dict[str, str]]) -> dict[str, Any]:
    """One record by its table; the offsets of the table must leave no gap, its zeros must be zero."""
    record: dict[str, Any] = {}
    at = 0
    for row in rows:
        assert int(row["Offset"]) == at, row
        kind, _, size = row["Type"].partition(" ")
        if kind in ("bytes", "zero"):
            value: Any = raw[at : at + int(size)]
            at += int(size)
            assert kind == "bytes" or not any(value), row
        else:
            code = {"u8": "B", "u16": "H", "u32": "I", "i32": "i", "u64": "Q"}[kind]
            (value,) = struct.unpack_from(f"<{code}", raw, at)
            at += struct.calcsize(f"<{code}")
        if kind != "zero":
            record[row["Field"]] = value
    assert at == len(raw)
    return record


def sha256(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()


def up(n: int, multiple: int) -> int:
    return n + -n % multiple


class MiniReader:
    """Reads and checks a whole file as the page tells it to."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.header = read_record(raw[:4096], tables("Header")[0])
        assert self.header["magic"] == bytes.fromhex("894C33520D0A1A0A")
        assert (self.header["version"], self.header["header_bytes"], self.header["flags"]) == (1, 4096, 0)
        assert self.header["leaf_digest"].rstrip(b"\0") == b"sha256"
        assert self.header["header_digest"] == sha256(raw[:2016])
        assert self.header["file_bytes"] == len(raw) == self.header["data_offset"] + self.header["data_bytes"]
        self.sections = self._sections()
        self.entries = self._directory()
        self._placement_and_leaves()

    def _sections(self) -> dict[str, bytes]:
        layout, kinds = tables("Section record")
        names = {int(row["Kind"]): row["Section"] for row in kinds}
        sections, end = {}, 4096
        for i in range(5):
            record = read_record(self.header["sections"][64 * i : 64 * i + 64], layout)
            assert (record["kind"], record["flags"]) == (i + 1, 0)
            if record["offset"]:
                assert record["offset"] == up(end, 64)
                assert not any(self.raw[end : record["offset"]])
                end = record["offset"] + record["nbytes"]
                sections[names[i + 1]] = self.raw[record["offset"] : end]
                assert sha256(sections[names[i + 1]]) == record["sha256"]
        assert self.header["data_offset"] == up(end, 65536)
        assert not any(self.raw[end : self.header["data_offset"]])
        return sections

    def _directory(self) -> list[dict[str, Any]]:
        (layout,) = tables("Directory")
        raw, count = self.sections["directory"], self.header["tensor_count"]
        entries = [read_record(raw[64 * i : 64 * i + 64], layout) for i in range(count)]
        for e in entries:
            at = 64 * count + e["name_offset"]
            e["name"] = raw[at : at + e["name_bytes"]].decode()
        return entries

    def _placement_and_leaves(self) -> None:
        cursor, starts = self.header["data_offset"], [self.header["data_offset"]]
        for before, e in zip([None, *self.entries], self.entries, strict=False):
            if before and before["layer"] != e["layer"]:
                cursor = up(cursor, 65536)
                starts.append(cursor)
            assert e["offset"] == up(cursor, e["align"])
            cursor = e["offset"] + e["nbytes"]
        ends = [*starts[1:], up(cursor, 65536)]
        assert ends[-1] == len(self.raw)
        size = self.header["leaf_bytes"]
        digests = [
            sha256(self.raw[at : min(at + size, end)])
            for start, end in zip(starts, ends, strict=True)
            for at in range(start, end, size)
        ]
        assert len(digests) == self.header["leaf_count"]
        assert b"".join(digests) == self.sections["leaves"]

    def value(self, e: dict[str, Any], row: int, k: int) -> float:
        """Element [row, k] of a matrix, or [0, k] of a vector, by the formulas of the page."""
        formats = {int(f["Id"]): f["Format"] for f in tables("Formats")[0]}
        name, cols = formats[e["format"]], e["cols"]
        if e["rank"] == 1:
            assert (name, e["nbytes"]) == ("f32", 4 * cols)
            return struct.unpack_from("<f", self.raw, e["offset"] + 4 * k)[0]
        (layout,) = ({r["Format"]: r for r in t} for t in tables("Tiles"))
        assert layout[name]["Values"].endswith(" K bytes")
        values = int(layout[name]["Values"].split()[0]) * cols
        scale = 32 * (cols // 32)
        scales = sum(layout[name][s] != "-" for s in "dm")
        tile_bytes = up(values + scales * scale, 64)
        assert e["nbytes"] == -(-e["rows"] // 16) * tile_bytes
        t, r = divmod(row, 16)
        tile = e["offset"] + t * tile_bytes
        if name == "f32":
            return struct.unpack_from("<f", self.raw, tile + (k * 16 + r) * 4)[0]
        if name == "bf16":
            return struct.unpack("<f", b"\0\0" + self.raw[tile + (k * 16 + r) * 2 :][:2])[0]
        b, i = divmod(k, 32)
        at = [tile + values + n * scale + (b * 16 + r) * 2 for n in range(scales)]
        d, *rest = (struct.unpack_from("<e", self.raw, place)[0] for place in at)
        if name == "q8_32":
            g, j = divmod(i, 4)
            return d * struct.unpack_from("<b", self.raw, tile + ((b * 8 + g) * 16 + r) * 4 + j)[0]
        g, j = divmod(i % 16, 4)
        q = self.raw[tile + ((b * 4 + g) * 16 + r) * 4 + j] >> (4 if i >= 16 else 0) & 15
        return d * (q - 8) if name == "q4_32" else d * q + rest[0]


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> MiniReader:
    return MiniReader(write_sample(tmp_path_factory.mktemp("doc") / "sample.l3r").read_bytes())


def test_the_table_of_formats_is_the_code_s() -> None:
    found = [
        (int(f["Id"]), f["Format"], int(f["Block"]), float(f["Bits per weight"]))
        for f in tables("Formats")[0]
    ]
    assert found == [(f.id, f.name, f.block, f.bits_per_weight) for f in FORMATS.values()]


def test_texts(mini: MiniReader) -> None:
    assert json.loads(mini.sections["metadata"]) == METADATA
    assert mini.sections["tokenizer"] == TOKENIZER
    assert mini.sections["chat_template"].decode() == TEMPLATE


def test_absent_sections(tmp_path: Path) -> None:
    raw = write_sample(tmp_path / "m.l3r", tokenizer=None, chat_template=None).read_bytes()
    assert set(MiniReader(raw).sections) == {"metadata", "directory", "leaves"}


def test_directory(mini: MiniReader) -> None:
    found = [(e["name"], e["rank"], e["rows"], e["cols"], e["layer"], e["align"]) for e in mini.entries]
    assert found == [(t.name, t.rank, t.rows, t.cols, t.layer, t.align) for t in PLAN]


def test_every_value_of_every_format(mini: MiniReader) -> None:
    for e, (name, b) in zip(mini.entries, weights().items(), strict=True):
        assert e["name"] == name
        rows = range(e["rows"]) if e["rows"] < 100 else (0, 15, 16, 299, 300)
        for row in rows:
            for k in range(0, e["cols"], 1 if e["cols"] < 100 else 7):
                q = b.q[row, k].item()
                if b.format == "bf16":
                    (q,) = struct.unpack("<f", struct.pack("<I", q << 16))
                if b.format == "q4_32":
                    q -= 8
                d = 1 if b.d is None else b.d[row, k // 32].item()
                m = 0 if b.m is None else b.m[row, k // 32].item()
                assert mini.value(e, row, k) == d * q + m, (name, row, k)
