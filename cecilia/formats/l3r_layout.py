# SPDX-License-Identifier: Apache-2.0
"""What the reader and the writer of `.l3r` files share: constants, records, and where every byte goes.

docs/FORMAT-L3R.md is the specification. A list of tensors has exactly one legal arrangement, computed by
`place`; the reader refuses any other, so overlaps, gaps and misalignment need no checks of their own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cecilia.errors import ModelFileError
from cecilia.formats.quant import FORMATS, tensor_bytes

MAGIC = b"\x89L3R\r\n\x1a\n"
VERSION = 1
LEAF_DIGEST = "sha256"
LEAF_BYTES = 1 << 20
SLICE_ALIGN = 1 << 16
TENSOR_ALIGN = 64
SECTION_ALIGN = 64

HEADER_BYTES = 4096
FIELDS = struct.Struct("<8sIIQQQIIII16s")  # magic .. leaf digest name
SECTION = struct.Struct("<IIQQ8x32s")  # kind, flags, offset, bytes, sha256
SECTION_TABLE = 128  # header offset of the first section record
HEADER_DIGEST = 2016  # header offset of the sha256 over everything before it
ENTRY = struct.Struct("<IHBBIIiIQQI20x")  # name, format, shape, layer, align, place
ENTRY_RESERVED = 44  # from here to the end of the entry all bytes are zero

SECTION_KINDS = ("metadata", "tokenizer", "chat_template", "directory", "leaves")
"""Section kinds 1..5, in the order of their records and of their bytes in the file."""
SECTION_LIMITS = {
    "metadata": 1 << 20,
    "tokenizer": 1 << 26,
    "chat_template": 1 << 16,
    "directory": 1 << 24,
    "leaves": 1 << 24,
}
"""The most bytes a section may hold: a bound on what opening a hostile file can allocate."""

MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 255
MAX_DIM = (1 << 31) - 1
MAX_LAYER = (1 << 16) - 1


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written. rank 1: rows = 1, cols = n, format f32. layer -1: belongs to no layer.

    align: a power of two from 64 to 65536 that the tensor's offset is rounded up to (an expert's first tensor
    takes 16384, so that the expert can be dropped and prefetched on its own).
    """

    name: str
    format: str
    rank: int
    rows: int
    cols: int
    layer: int
    align: int = TENSOR_ALIGN


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a model file. `offset` counts from the start of the file; `nbytes` excludes alignment."""

    name: str
    format: str
    rank: int
    rows: int
    cols: int
    layer: int
    offset: int
    nbytes: int
    align: int = TENSOR_ALIGN


@dataclass(frozen=True)
class Slice:
    """A contiguous stretch of data that belongs to one layer, padding included."""

    layer: int
    offset: int
    nbytes: int

    @property
    def leaves(self) -> int:
        """How many data leaves the slice is cut into; the last one may be short."""
        return -(-self.nbytes // LEAF_BYTES)


@dataclass(frozen=True)
class Section:
    """One record of the header's section table. offset 0: the section is absent."""

    name: str
    offset: int
    nbytes: int
    sha256: bytes


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Put the file's path in front of the message of a ModelFileError raised inside."""
    try:
        yield
    except ModelFileError as error:
        raise ModelFileError(error.code, f"{path}: {error.message}") from None


def align_up(n: int, multiple: int) -> int:
    """The first multiple of `multiple` that is not below `n`."""
    return -(-n // multiple) * multiple


def check_tensor(t: PlannedTensor) -> int:
    """Bytes of `t`; ModelFileError `bad_directory` when any of its fields is outside the format's bounds."""

    def bad(what: str) -> ModelFileError:
        return ModelFileError("bad_directory", f"tensor {t.name!r}: {what}")

    if not 1 <= len(t.name.encode("utf-8", "replace")) <= MAX_NAME_BYTES or not t.name.isprintable():
        raise bad(f"a name is 1 to {MAX_NAME_BYTES} bytes of printable UTF-8")
    if t.format not in FORMATS:
        raise bad(f"unknown format {t.format!r}")
    if not (1 <= t.rows <= MAX_DIM and 1 <= t.cols <= MAX_DIM):
        raise bad(f"{t.rows} x {t.cols}: a dimension is from 1 to {MAX_DIM}")
    if not -1 <= t.layer <= MAX_LAYER:
        raise bad(f"layer {t.layer} is outside -1..{MAX_LAYER}")
    if not TENSOR_ALIGN <= t.align <= SLICE_ALIGN or t.align & (t.align - 1):
        raise bad(f"alignment {t.align} is no power of two in {TENSOR_ALIGN}..{SLICE_ALIGN}")
    try:
        return tensor_bytes(t.format, t.rank, t.rows, t.cols)
    except ModelFileError as error:
        raise bad(error.message) from None


def place(planned: Sequence[PlannedTensor], data_offset: int) -> tuple[list[TensorEntry], list[Slice]]:
    """Give every tensor its offset, in order, and cut the data into slices.

    A slice is a run of tensors of one layer; it starts and ends on a multiple of 64 KiB, and a layer other
    than -1 has only one. ModelFileError `bad_directory` for a list that cannot be placed.
    """
    if not 1 <= len(planned) <= MAX_TENSORS:
        raise ModelFileError("bad_directory", f"{len(planned)} tensors, expected 1 to {MAX_TENSORS}")
    entries: list[TensorEntry] = []
    slices: list[Slice] = []
    seen: set[str] = set()
    layers: set[int] = set()
    start = cursor = data_offset
    for i, t in enumerate(planned):
        nbytes = check_tensor(t)
        if t.name in seen:
            raise ModelFileError("bad_directory", f"tensor {t.name!r} is listed twice")
        seen.add(t.name)
        if i and t.layer != planned[i - 1].layer:
            cursor = align_up(cursor, SLICE_ALIGN)
            slices.append(Slice(planned[i - 1].layer, start, cursor - start))
            start = cursor
        if i == 0 or t.layer != planned[i - 1].layer:
            if t.layer in layers and t.layer != -1:
                raise ModelFileError("bad_directory", f"tensor {t.name!r}: layer {t.layer} is not contiguous")
            layers.add(t.layer)
        offset = align_up(cursor, t.align)
        entries.append(
            TensorEntry(t.name, t.format, t.rank, t.rows, t.cols, t.layer, offset, nbytes, t.align)
        )
        cursor = offset + nbytes
    slices.append(Slice(planned[-1].layer, start, align_up(cursor, SLICE_ALIGN) - start))
    return entries, slices
