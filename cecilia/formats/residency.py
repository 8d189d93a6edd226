# SPDX-License-Identifier: Apache-2.0
"""Where a model's weights are while it runs: in the mapped file, or moved into memory of 2 MiB pages.

Mapped pages are shared with the page cache and can be dropped under pressure, but they are 4 KiB each;
decoding reads every weight for every token and is up to twice as fast from 2 MiB pages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import numpy as np

from cecilia._kernels.buffer import huge_pages_of, move_to_huge_pages
from cecilia.errors import DeviceError, MemoryLimitError
from cecilia.formats.l3r import ModelFile
from cecilia.formats.l3r_layout import TensorEntry

MODES = ("auto", "mmap", "hugepage")
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
STEP = 16 << 20  # bytes between two reports
SLICE = 64 << 20  # bytes moved at once: whole huge pages, few milliseconds, few mappings
OS_PAGE = 4096

Progress = Callable[[float], None]
"""Called with the fraction done, 0 to 1."""


class HugePages:
    """Moves the tensors of an open file into huge pages, a slice at a time, at the addresses they have.

    Views handed out before stay valid and keep their bytes; the file's own pages are given back as it goes.
    The tensors named in `looked_up`, of which a token reads one row, stay in the file, and so does what lies
    before the first and behind the last whole 2 MiB page of the others.
    """

    def __init__(self, file: ModelFile, looked_up: Collection[str] = ()) -> None:
        self._slices = [
            span[at : min(at + SLICE, end)]
            for span in _spans(file, looked_up)
            for first, end in (huge_pages_of(span),)
            for at in range(first, end, SLICE)
        ]
        self._slices.reverse()  # the next one is the last of the list
        self._total = self.left

    @property
    def left(self) -> int:
        """Bytes still to be moved."""
        return sum(part.nbytes for part in self._slices)

    def advance(self) -> None:
        """Move the next slice; nothing when all is moved. Raises MemoryLimitError `insufficient_memory`."""
        if not self._slices:
            return
        try:
            move_to_huge_pages(self._slices[-1])
        except (MemoryError, OSError) as error:
            self._slices.clear()  # what is moved stays moved, the rest stays in the file
            raise MemoryLimitError("insufficient_memory", f"weights stay in the file: {error}") from None
        self._slices.pop()

    def finish(self, report: Progress) -> None:
        """Move all that is left."""
        report(0.0)
        while self.left:
            self.advance()
            report(1 - self.left / self._total)


def _spans(file: ModelFile, without: Collection[str]) -> Iterator[memoryview]:
    """The mapped tensors but some: what lies before, between and behind these."""
    at = file.slices[0].offset
    for entry in sorted((file.tensors[name] for name in without), key=lambda entry: entry.offset):
        if entry.offset > at:
            yield file.span(at, entry.offset - at)
        at = entry.offset + entry.nbytes
    if file.nbytes > at:
        yield file.span(at, file.nbytes - at)


def huge_pages(switch: Path = SWITCH) -> bool:
    """Whether this kernel gives 2 MiB pages to those who ask."""
    return switch.is_file() and "[never]" not in switch.read_text()


def choose(mode: str, nbytes: int, available: int, switch: Path = SWITCH) -> str:
    """mmap or hugepage for weights of `nbytes`; auto moves when half of the `available` bytes suffices.

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
