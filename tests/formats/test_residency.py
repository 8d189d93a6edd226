# SPDX-License-Identifier: Apache-2.0
"""Weights moved into huge pages are the file's bytes, and whose are moved follows the documented rule."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from cecilia._kernels.buffer import move_to_huge_pages
from cecilia.arch.dense import EMBED
from cecilia.errors import DeviceError, MemoryLimitError
from cecilia.formats import residency
from cecilia.formats.l3r import open_model
from tools.make_tiny import make_tiny


def switch(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "enabled"
    path.write_text(text)
    return path


BIG = {"width": 256, "ff": 2048, "layers": 6}  # several MiB: some whole 2 MiB pages wherever it is mapped


def test_moved_weights_keep_their_bytes_and_addresses(tmp_path: Path) -> None:
    path = tmp_path / "tiny.l3r"
    make_tiny(path, **BIG)
    raw = path.read_bytes()
    seen: list[float] = []
    with open_model(path) as file:
        before = {name: np.frombuffer(file.data(name), np.uint8) for name in file.tensors}
        residency.HugePages(file).finish(seen.append)
        for name, entry in file.tensors.items():
            bytes_of_file = np.frombuffer(raw, np.uint8)[entry.offset : entry.offset + entry.nbytes]
            np.testing.assert_array_equal(before[name], bytes_of_file)
            assert before[name].ctypes.data == np.frombuffer(file.data(name), np.uint8).ctypes.data
        file.verify()
    assert seen[-1] == 1.0
    assert seen == sorted(seen)


def test_moved_memory_is_anonymous_read_only_and_asked_to_be_huge(tmp_path: Path) -> None:
    path = tmp_path / "tiny.l3r"
    make_tiny(path, **BIG)
    with open_model(path) as file:
        residency.HugePages(file).finish(lambda _: None)
        start = np.frombuffer(file.span(0, 1), np.uint8).ctypes.data
        inside = [m for m in mappings() if start <= m.start < start + file.nbytes and not m.path]
        assert inside
        for mapping in inside:
            assert mapping.start % (2 << 20) == 0
            assert mapping.mode == "r--p"
            assert "hg" in mapping.flags  # MADV_HUGEPAGE, see proc(5)


def test_tensors_that_are_looked_up_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.l3r"
    make_tiny(path, **BIG, vocab=16384)  # embedding and head of 4 MiB each, first and last
    for name, neighbour in ((EMBED, "lm_head.weight"), ("lm_head.weight", EMBED)):
        with open_model(path) as file:
            residency.HugePages(file, {name}).finish(lambda _: None)
            moved = [m for m in mappings() if not m.path]
            for tensor, expected in ((name, False), (neighbour, True)):
                start = np.frombuffer(file.data(tensor), np.uint8).ctypes.data
                end = start + file.tensors[tensor].nbytes
                assert any(m.start < end and start < m.end for m in moved) is expected
            file.verify()


def test_a_file_smaller_than_a_huge_page_stays_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "tiny.l3r"
    make_tiny(path)
    with open_model(path) as file:
        huge = residency.HugePages(file)
        assert huge.left == 0
        huge.finish(lambda _: None)


def test_weights_are_moved_slice_by_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "SLICE", 2 << 20)
    path = tmp_path / "tiny.l3r"
    make_tiny(path, **BIG)
    with open_model(path) as file:
        huge = residency.HugePages(file)
        slices = huge.left // (2 << 20)
        assert slices >= 2
        for left in reversed(range(slices)):
            huge.advance()
            assert huge.left == left * (2 << 20)


def test_a_failed_move_leaves_the_rest_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.l3r"
    make_tiny(path, **BIG)
    monkeypatch.setattr(residency, "move_to_huge_pages", refuse)
    with open_model(path) as file:
        huge = residency.HugePages(file)
        with pytest.raises(MemoryLimitError) as caught:
            huge.advance()
        assert caught.value.code == "insufficient_memory"
        assert huge.left == 0
        file.verify()


def refuse(_mapped: memoryview) -> None:
    raise OSError(errno.ENOMEM, "mremap")


@dataclass
class Mapping:
    start: int
    end: int
    mode: str
    path: str
    flags: list[str]


def mappings() -> list[Mapping]:
    """This process's, from /proc/self/smaps."""
    found: list[Mapping] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if line.startswith("VmFlags:"):
            found[-1].flags = words[1:]
        elif "-" in words[0] and not words[0].endswith(":"):
            path = words[5] if len(words) > 5 else ""
            start, end = (int(word, 16) for word in words[0].split("-"))
            found.append(Mapping(start, end, words[1], path, []))
    return found


def test_touching_reports_up_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "tiny.l3r"
    make_tiny(path)
    seen: list[float] = []
    with open_model(path) as file:
        residency.touch(file, seen.append)
    assert seen[-1] == 1.0


@pytest.mark.parametrize("setting", ["[always] madvise never", "always [madvise] never"])
@pytest.mark.parametrize(
    ("mode", "nbytes", "expected"),
    [
        ("auto", 50, "hugepage"),
        ("auto", 51, "mmap"),
        ("mmap", 1, "mmap"),
        ("hugepage", 99, "hugepage"),
    ],
)
def test_weights_are_moved_when_half_of_the_memory_holds_them(
    tmp_path: Path, setting: str, mode: str, nbytes: int, expected: str
) -> None:
    assert residency.choose(mode, nbytes, 100, switch(tmp_path, setting)) == expected


def test_without_huge_pages_only_a_wish_by_name_fails(tmp_path: Path) -> None:
    for off in (switch(tmp_path, "always madvise [never]"), tmp_path / "absent"):
        assert residency.choose("auto", 1, 100, off) == "mmap"
        with pytest.raises(DeviceError) as caught:
            residency.choose("hugepage", 1, 100, off)
        assert caught.value.code == "huge_pages_unavailable"


def test_only_whole_huge_pages_are_moved() -> None:
    for wrong in (np.zeros(4096, np.uint8), np.zeros(0, np.uint8)):
        with pytest.raises(ValueError, match="not whole 2 MiB pages"):
            move_to_huge_pages(wrong)
