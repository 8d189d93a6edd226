# SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile model files: always a ModelFileError of one line with its code, never much memory.

Offsets are those of docs/FORMAT-L3R.md. An attacker can compute digests, so edits of fields are resealed;
damage is not.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import re
import struct
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cecilia.errors import ModelFileError
from cecilia.formats.l3r import open_model
from cecilia.formats.l3r_write import PlannedTensor
from tests.formats.samples import METADATA, write_sample, writer

DIRECTORY, LEAVES = 3, 4  # indices of section records
LAST = 6  # index of the last tensor


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_sample(tmp_path_factory.mktemp("hostile") / "sample.l3r").read_bytes()


def section(raw: bytes | bytearray, index: int) -> tuple[int, int]:
    """Offset and length of a section."""
    return struct.unpack_from("<QQ", raw, 128 + 64 * index + 8)


def seal(raw: bytearray) -> bytes:
    """Make the digests of sections and header right again."""
    for i in range(5):
        offset, nbytes = section(raw, i)
        if offset and offset + nbytes <= len(raw):
            raw[128 + 64 * i + 32 : 128 + 64 * i + 64] = hashlib.sha256(
                raw[offset : offset + nbytes]
            ).digest()
    raw[2016:2048] = hashlib.sha256(raw[:2016]).digest()
    return bytes(raw)


def header(offset: int, layout: str, value: Any) -> Callable[[bytearray], None]:
    """An edit of a header field."""
    return lambda raw: struct.pack_into("<" + layout, raw, offset, value)


def record(index: int, offset: int, layout: str, value: Any) -> Callable[[bytearray], None]:
    """An edit of a section record."""
    return header(128 + 64 * index + offset, layout, value)


def entry(index: int, offset: int, layout: str, value: Any) -> Callable[[bytearray], None]:
    """An edit of a directory entry."""
    return lambda raw: struct.pack_into(
        "<" + layout, raw, section(raw, DIRECTORY)[0] + 64 * index + offset, value
    )


def name(index: int, value: bytes) -> Callable[[bytearray], None]:
    """Overwrite the first bytes of a tensor's name."""

    def edit(raw: bytearray) -> None:
        start = section(raw, DIRECTORY)[0]
        (at,) = struct.unpack_from("<I", raw, start + 64 * index)
        at += start + 64 * (LAST + 1)
        raw[at : at + len(value)] = value

    return edit


def refuse(path: Path, code: str, *, verify: bool = False) -> str:
    """The message of the refusal, which must have `code`, name the file and take little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as caught:
            open_model(path, verify=verify)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.code == code, caught.value
    assert caught.value.message.startswith(f"{path}: ")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 1000
    assert peak < 1 << 21
    return caught.value.message


FIELDS = {
    "version 2": (header(8, "I", 2), "unsupported_version"),
    "version 0": (header(8, "I", 0), "unsupported_version"),
    "header size": (header(12, "I", 8192), "header_corrupt"),
    "file size above": (header(16, "Q", 1 << 63), "file_truncated"),
    "file size below": (header(16, "Q", 65536), "header_corrupt"),
    "data offset": (header(24, "Q", 1 << 16 << 4), "header_corrupt"),
    "data size": (header(32, "Q", (1 << 64) - 1), "header_corrupt"),
    "feature flag": (header(40, "I", 1), "unsupported_version"),
    "no tensors": (header(44, "I", 0), "bad_directory"),
    "one tensor less": (header(44, "I", LAST), "bad_directory"),
    "one tensor more": (header(44, "I", LAST + 2), "bad_directory"),
    "absurd tensors": (header(44, "I", 0xFFFFFFFF), "bad_directory"),
    "leaf size": (header(48, "I", 1 << 21), "header_corrupt"),
    "zero leaf size": (header(48, "I", 0), "header_corrupt"),
    "leaf count": (header(52, "I", 0xFFFFFFFF), "bad_directory"),
    "leaf digest": (header(56, "16s", b"sm3"), "unsupported_version"),
    "reserved": (header(72, "B", 1), "unsupported_version"),
    "sixth section": (header(448, "I", 6), "unsupported_version"),
    "encryption block": (header(640, "B", 1), "unsupported_version"),
    "signature block": (header(4095, "B", 1), "unsupported_version"),
    "section kind": (record(0, 0, "I", 2), "header_corrupt"),
    "section flag": (record(1, 4, "I", 1), "unsupported_version"),
    "section reserved": (record(1, 24, "Q", 1), "unsupported_version"),
    "section in the header": (record(0, 8, "Q", 0x40), "header_corrupt"),
    "section far away": (record(1, 8, "Q", 1 << 63), "header_corrupt"),
    "section overlaps": (record(3, 8, "Q", 4096), "header_corrupt"),
    "section too large": (record(2, 16, "Q", 65537), "header_corrupt"),
    "section absurd": (record(3, 16, "Q", (1 << 64) - 1), "header_corrupt"),
    "section into the data": (record(4, 16, "Q", 1 << 20), "header_corrupt"),
    "no metadata": (record(0, 8, "Q", 0), "header_corrupt"),
    "half absent": (record(1, 8, "Q", 0), "header_corrupt"),
    "name offset": (entry(1, 0, "I", 0), "bad_directory"),
    "name offset far": (entry(0, 0, "I", 0xFFFFFFFF), "bad_directory"),
    "name length": (entry(LAST, 4, "H", 65535), "bad_directory"),
    "name shorter": (entry(LAST, 4, "H", 3), "bad_directory"),
    "name empty": (entry(0, 4, "H", 0), "bad_directory"),
    "unknown format": (entry(0, 6, "B", 5), "bad_directory"),
    "rank 0": (entry(0, 7, "B", 0), "bad_directory"),
    "rank 255": (entry(0, 7, "B", 255), "bad_directory"),
    "matrix as vector": (entry(0, 7, "B", 1), "bad_directory"),
    "vector as matrix": (entry(LAST, 7, "B", 2), "bad_directory"),
    "no rows": (entry(0, 8, "I", 0), "bad_directory"),
    "more rows": (entry(0, 8, "I", 305), "bad_directory"),
    "absurd rows": (entry(0, 8, "I", 0x7FFFFFFF), "bad_directory"),
    "rows beyond": (entry(0, 8, "I", 0xFFFFFFFF), "bad_directory"),
    "no columns": (entry(0, 12, "I", 0), "bad_directory"),
    "absurd columns": (entry(0, 12, "I", 0x7FFFFFFF), "bad_directory"),
    "columns and block": (entry(2, 12, "I", 97), "bad_directory"),
    "layer below": (entry(0, 16, "i", -2), "bad_directory"),
    "layer above": (entry(LAST, 16, "i", 65536), "bad_directory"),
    "layer split": (entry(LAST, 16, "i", 0), "bad_directory"),
    "other layer": (entry(2, 16, "i", 5), "bad_directory"),
    "align 0": (entry(0, 20, "I", 0), "bad_directory"),
    "align 96": (entry(0, 20, "I", 96), "bad_directory"),
    "align huge": (entry(0, 20, "I", 1 << 31), "bad_directory"),
    "offset 0": (entry(0, 24, "Q", 0), "bad_directory"),
    "offset misaligned": (entry(2, 24, "Q", 65537), "bad_directory"),
    "offset far": (entry(LAST, 24, "Q", (1 << 64) - 64), "bad_directory"),
    "size 0": (entry(0, 32, "Q", 0), "bad_directory"),
    "size one more": (entry(2, 32, "Q", 4993), "bad_directory"),
    "size overflows": (entry(0, 32, "Q", (1 << 64) - 1), "bad_directory"),
    "tensor flag": (entry(0, 40, "I", 1), "unsupported_version"),
    "tensor reserved": (entry(0, 44, "B", 1), "unsupported_version"),
    "tensor last reserved": (entry(0, 63, "B", 1), "unsupported_version"),
    "name no UTF-8": (name(3, b"\xff\xfe"), "bad_directory"),
    "name cut character": (name(LAST, b"model.norm.weigh\xc3"), "bad_directory"),
    "name with a line end": (name(0, b"model\n"), "bad_directory"),
    "name with escape": (name(0, b"\x1b[2J"), "bad_directory"),
}


@pytest.mark.parametrize(("edit", "code"), FIELDS.values(), ids=FIELDS)
def test_a_hostile_field_is_refused(
    sample: bytes, tmp_path: Path, edit: Callable[[bytearray], None], code: str
) -> None:
    raw = bytearray(sample)
    edit(raw)
    assert raw != sample
    path = tmp_path / "m.l3r"
    path.write_bytes(seal(raw))
    refuse(path, code)


def test_sealing_an_untouched_file_changes_nothing(sample: bytes) -> None:
    assert seal(bytearray(sample)) == sample


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.l3r"
    plan = [PlannedTensor(n, "f32", 1, 1, 1, -1) for n in ("alpha", "gamma")]
    with writer(path, tensors=plan) as out:
        for tensor in plan:
            out.write(tensor.name, bytes(4))
        out.finish()
    path.write_bytes(seal(bytearray(path.read_bytes().replace(b"gamma", b"alpha"))))
    assert "twice" in refuse(path, "bad_directory")


# ---- files that are no model files ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"GGUF\3\0\0\0", b"\x7fELF" + bytes(5000), b"x", bytes(8), b"\x89PNG\r\n\x1a\n" + bytes(5000)],
)
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.l3r"
    path.write_bytes(content)
    assert content[:8].hex() in refuse(path, "unsupported_container")


@pytest.mark.parametrize(
    ("old", "new"), [(b"\r\n", b"\n"), (b"\n", b"\r\n"), (b"\x1a", b""), (b"\x89", b"\x09")]
)
def test_a_text_mode_transfer_is_seen(sample: bytes, tmp_path: Path, old: bytes, new: bytes) -> None:
    path = tmp_path / "m.l3r"
    path.write_bytes(sample[:4096].replace(old, new) + sample[4096:])
    assert "text-mode" in refuse(path, "header_corrupt")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path, tmp_path / "none", tmp_path / "pipe", tmp_path / "loop", tmp_path / "a\0b"):
        refuse(path, "file_unreadable")


@pytest.mark.parametrize(("call", "number"), [("open", errno.EACCES), ("pread", errno.EIO)])
def test_a_refusal_by_the_system_is_told(
    sample: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def refused_by_system(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "m.l3r"
    path.write_bytes(sample)
    monkeypatch.setattr(os, call, refused_by_system)
    assert os.strerror(number) in refuse(path, "file_unreadable")


# ---- truncation -------------------------------------------------------------------------------------------


def edges(raw: bytes) -> list[int]:
    """Where parts of the file begin or end: header fields, sections, data, the last slice, the file."""
    found = {0, 8, 12, 128, 2016, 2048, 4096, len(raw)}
    for i in range(5):
        offset, nbytes = section(raw, i)
        found |= {offset, offset + nbytes}
    (data,) = struct.unpack_from("<Q", raw, 24)
    return sorted(found | {data, data + 304 * 3600, len(raw) - 65536})


def test_a_file_cut_at_any_edge_is_refused(sample: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.l3r"
    path.write_bytes(sample)
    sizes = {edge + step for edge in edges(sample) for step in (-1, 0, 1)} & set(range(len(sample)))
    for size in sorted(sizes, reverse=True):
        os.truncate(path, size)
        refuse(path, "file_truncated")


def test_a_file_that_shrinks_while_it_is_read_is_refused(
    sample: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.l3r"
    path.write_bytes(sample)
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: real(fd, n, at) if at < 4096 else b"")
    refuse(path, "file_truncated")


def test_a_file_with_more_bytes_is_refused(sample: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.l3r"
    path.write_bytes(sample + b"\0")
    refuse(path, "header_corrupt")


# ---- flipped bytes ----------------------------------------------------------------------------------------


def flips(path: Path, places: Iterable[int]) -> Iterator[int]:
    """Flip one random bit of each byte at `places`, one after another; the file is whole again at the end."""
    rng = random.Random(11)
    with path.open("r+b", buffering=0) as file:
        for at in places:
            (old,) = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([old ^ (1 << rng.randrange(8))]), at)
            yield at
            os.pwrite(file.fileno(), bytes([old]), at)


def test_a_flipped_byte_before_the_data_is_refused_at_open(sample: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.l3r"
    path.write_bytes(sample)
    (data,) = struct.unpack_from("<Q", sample, 24)
    end = sum(section(sample, LEAVES))
    padding = random.Random(12).sample(range(end, data), 300)
    codes = {"header_corrupt", "section_corrupt", "unsupported_container", "unsupported_version"}
    for at in flips(path, [*range(end), *padding, data - 1]):
        with pytest.raises(ModelFileError) as caught:
            open_model(path)
        assert caught.value.code in codes, at
    open_model(path, verify=True).close()


def test_a_flipped_byte_of_data_is_refused_under_verify(sample: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.l3r"
    path.write_bytes(sample)
    with open_model(path) as model:
        tensors, base = list(model.tensors.values()), model.slices[0].offset
    places = [at for t in tensors for at in (t.offset, t.offset + t.nbytes - 1)]
    places += [base + 304 * 3600, len(sample) - 1, *random.Random(13).sample(range(base, len(sample)), 20)]
    for at in flips(path, places):
        open_model(path).close()
        with pytest.raises(ModelFileError) as caught:
            open_model(path, verify=True)
        assert caught.value.code == "data_corrupt"
        first, last = map(int, re.search(r"bytes (\d+)\.\.(\d+)", caught.value.message).groups())
        assert first <= at < last
        for t in tensors:
            assert (t.name in caught.value.message) == (t.offset < last and first < t.offset + t.nbytes)


def test_resealed_random_edits_never_escape(sample: bytes, tmp_path: Path) -> None:
    """Whatever an attacker who can compute digests writes, the file opens or is refused cleanly."""
    rng = random.Random(14)
    path = tmp_path / "m.l3r"
    path.write_bytes(sample)
    targets = [*range(8, 128), *range(128, 448)] + [
        at for i in (0, DIRECTORY) for at in range(section(sample, i)[0], sum(section(sample, i)))
    ]
    end = sum(section(sample, LEAVES))
    messages: list[str] = []
    with path.open("r+b", buffering=0) as file:
        for _ in range(1500):
            raw = bytearray(sample[:end])
            for at in rng.choices(targets, k=rng.choice((1, 1, 2, 8))):
                raw[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
            os.pwrite(file.fileno(), seal(raw), 0)
            try:
                open_model(path).close()
            except ModelFileError as error:
                messages.append(error.message)
    assert 1000 < len(messages) < 1500
    assert all(m.startswith(f"{path}: ") and "\n" not in m for m in messages)


# ---- content of the texts ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A model file with 200 KB of metadata, for `with_metadata` to write over."""
    path = tmp_path_factory.mktemp("roomy") / "m.l3r"
    return write_sample(path, metadata={**METADATA, "room": "x" * 200_000}).read_bytes()


def with_metadata(roomy: bytes, path: Path, content: bytes) -> Path:
    """A sealed file whose metadata section is `content`, blanks after it."""
    raw = bytearray(roomy)
    offset, nbytes = section(raw, 0)
    raw[offset : offset + nbytes] = content.ljust(nbytes)
    path.write_bytes(seal(raw))
    return path


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{} {}",
        b"[" * 100_000,
        b'{"a":' * 30_000,
        b"\xff{}",
        b'{"a": NaN}',
        b"1" * 5000,
    ],
    ids=["empty", "open", "list", "null", "two", "deep list", "deep object", "no UTF-8", "NaN", "digits"],
)
def test_metadata_that_is_no_object_is_refused(roomy: bytes, tmp_path: Path, content: bytes) -> None:
    refuse(with_metadata(roomy, tmp_path / "m.l3r", content), "bad_metadata")


TEXT, SAMPLING = METADATA["text"], METADATA["sampling"]
WRONG = [
    *({key: value} for key in ("architecture", "name", "license", "weights") for value in (None, 1, {})),
    *({key: value} for key in ("hyper", "provenance", "text", "sampling") for value in (None, "x", [])),
    {"weights": "stolen"},
    *({"text": {**TEXT, key: v}} for key in ("bos_id", "pad_id") for v in (-1, True, "1", 1.0, 1 << 31)),
    *({"text": {**TEXT, "eos_ids": v}} for v in (None, 2, [True], [-1], ["2"], {"2": 2})),
    *({"text": {**TEXT, "add_bos": v}} for v in (None, 1, "true")),
    *({"text": {k: v for k, v in TEXT.items() if k != key}} for key in TEXT),
    {"text": {**TEXT, "bos_id": None}},
    *({"sampling": {**SAMPLING, "temperature": v}} for v in (-0.1, "1", True, None, 1e300)),
    *({"sampling": {**SAMPLING, "top_p": v}} for v in (-0.1, 1.1, "1", False)),
    *({"sampling": {**SAMPLING, "top_k": v}} for v in (-1, 1.5, "1", True)),
]


@pytest.mark.parametrize("change", WRONG, ids=json.dumps)
def test_metadata_of_the_wrong_shape_is_refused(roomy: bytes, tmp_path: Path, change: dict[str, Any]) -> None:
    path = with_metadata(roomy, tmp_path / "m.l3r", json.dumps({**METADATA, **change}).encode())
    (key,) = change
    assert key in refuse(path, "bad_metadata")


@pytest.mark.parametrize("key", METADATA)
def test_metadata_without_a_required_key_is_refused(roomy: bytes, tmp_path: Path, key: str) -> None:
    content = json.dumps({k: v for k, v in METADATA.items() if k != key}).encode()
    assert key in refuse(with_metadata(roomy, tmp_path / "m.l3r", content), "bad_metadata")


def test_unknown_metadata_is_kept(roomy: bytes, tmp_path: Path) -> None:
    metadata = {**METADATA, "later": [1]}
    path = with_metadata(roomy, tmp_path / "m.l3r", json.dumps(metadata).encode())
    with open_model(path) as model:
        assert model.metadata == metadata


def test_a_template_that_is_no_text_is_refused(sample: bytes, tmp_path: Path) -> None:
    raw = bytearray(sample)
    raw[section(raw, 2)[0]] = 0xFF
    (tmp_path / "m.l3r").write_bytes(seal(raw))
    refuse(tmp_path / "m.l3r", "section_corrupt")
