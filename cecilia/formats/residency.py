# SPDX-License-Identifier: Apache-2.0
"""Where a model's weights are while it runs: in the mapped file, or copied into memory of 2 MiB pages.

Mapped pages are shared with the page cache and can be dropped under pressure, but they are 4 KiB each;
decoding reads every weight for every token and is up to twice as fast from 2 MiB pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from cecilia._kernels.buffer import HugeBuffer
from cecilia.errors import DeviceError, MemoryLimitError
from cecilia.formats.l3r import ModelFile
from cecilia.formats.l3r_layout import TensorEntry

MODES = ("auto", "mmap", "hugepage")
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
STEP = 16 << 20  # bytes between two reports
OS_PAGE = 4096

Progress = Callable[[float], None]
"""Called with the fraction done, 0 to 1."""


class Tensors(Protocol):
    """What the kernels bind to."""

    tensors: dict[str, TensorEntry]

    def data(self, name: str) -> memoryview:
        """The bytes of a tensor, 64-byte aligned."""


class HugeCopy:
    """The tensors of a file, copied. The file's own pages are given back as the copy proceeds."""

    def __init__(self, file: ModelFile, report: Progress) -> None:
        self.tensors = file.tensors
        self._base = file.slices[0].offset
        total = file.nbytes - self._base
        try:
            memory = HugeBuffer(total)
        except MemoryError as error:
            raise MemoryLimitError("insufficient_memory", f"no memory to copy the weights: {error}") from None
        self._view = memoryview(memory)
        for start in range(0, total, STEP):
            nbytes = min(STEP, total - start)
            self._view[start : start + nbytes] = file.span(self._base + start, nbytes)
            file.release(self._base + start, nbytes)
            report((start + nbytes) / total)

    def data(self, name: str) -> memoryview:
        """The bytes of tensor `name`, read-only."""
        entry = self.tensors[name]
        start = entry.offset - self._base
        return self._view[start : start + entry.nbytes].toreadonly()


def huge_pages(switch: Path = SWITCH) -> bool:
    """Whether this kernel gives 2 MiB pages to those who ask."""
    return switch.is_file() and "[never]" not in switch.read_text()


def choose(mode: str, nbytes: int, available: int, switch: Path = SWITCH) -> str:
    """mmap or hugepage for weights of `nbytes`; auto copies when half of the `available` bytes suffices.

    Raises DeviceError `huge_pages_unavailable` when they were asked for by name and there are none.
    """
    usable = huge_pages(switch)
    if mode == "hugepage" and not usable:
        raise DeviceError("huge_pages_unavailable", f"{switch} does not offer them; use --weights mmap")
    if mode == "auto":
        return "hugepage" if usable and 2 * nbytes <= available else "mmap"
    return mode


def touch(file: ModelFile, report: Progress) -> None:
    """Read one byte of each OS page of the mapped tensors, so that the first answer need not."""
    base = file.slices[0].offset
    total = file.nbytes - base
    for start in range(0, total, STEP):
        part = np.frombuffer(file.span(base + start, min(STEP, total - start)), np.uint8)
        part[::OS_PAGE].max()
        report((start + part.size) / total)


def tensor_bytes(tensors: Mapping[str, TensorEntry]) -> int:
    """Bytes of all tensors."""
    return sum(entry.nbytes for entry in tensors.values())
