# SPDX-License-Identifier: Apache-2.0
"""Weights copied into huge pages are the file's bytes, and who gets a copy follows the documented rule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cecilia._kernels.buffer import HugeBuffer
from cecilia.errors import DeviceError
from cecilia.formats import residency
from cecilia.formats.l3r import open_model
from tools.make_tiny import make_tiny


def switch(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "enabled"
    path.write_text(text)
    return path


def test_a_copy_holds_the_bytes_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.l3r"
    make_tiny(path)
    seen: list[float] = []
    with open_model(path) as file:
        copy = residency.HugeCopy(file, seen.append)
        raw = path.read_bytes()
        for name, entry in file.tensors.items():
            view = copy.data(name)
            assert view == raw[entry.offset : entry.offset + entry.nbytes]
            assert view.readonly
            assert np.frombuffer(view, np.uint8).ctypes.data % 64 == 0
        assert file.data(name) == view  # pages given back are read again
    assert copy.data(name) == view  # the copy outlives the file
    assert seen[-1] == 1.0
    assert seen == sorted(seen)


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
def test_a_copy_is_made_when_half_of_the_memory_holds_it(
    tmp_path: Path, setting: str, mode: str, nbytes: int, expected: str
) -> None:
    assert residency.choose(mode, nbytes, 100, switch(tmp_path, setting)) == expected


def test_without_huge_pages_only_a_wish_by_name_fails(tmp_path: Path) -> None:
    for off in (switch(tmp_path, "always madvise [never]"), tmp_path / "absent"):
        assert residency.choose("auto", 1, 100, off) == "mmap"
        with pytest.raises(DeviceError) as caught:
            residency.choose("hugepage", 1, 100, off)
        assert caught.value.code == "huge_pages_unavailable"


def test_huge_buffer_is_aligned_and_writable() -> None:
    buffer = HugeBuffer(3 << 20)
    array = np.frombuffer(buffer, np.uint8)
    assert array.size == 3 << 20
    assert array.ctypes.data % (2 << 20) == 0
    array[-1] = 7
    assert memoryview(buffer)[-1] == 7
    with pytest.raises(MemoryError):
        HugeBuffer(0)
