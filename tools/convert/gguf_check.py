# SPDX-License-Identifier: Apache-2.0
"""Refuse a damaged or hostile GGUF header before anything sizes an allocation from it.

The `gguf` package reads a trusted file: on a damaged one it raises whatever numpy happens to raise, and its
cost follows the counts the file claims. This walk reads the same header once, each length checked against the
bytes that are really there and against the limits below, and keeps nothing.

Layout (little-endian): magic "GGUF", version u32, tensor count u64, key count u64; per key: name, type u32,
value; per tensor: name, dimension count u32, dimensions u64, type u32, offset u64; data from the next
multiple of `general.alignment`. Source: the GGUF specification of the ggml project.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from cecilia.errors import ModelFileError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Far above any real checkpoint (vocabularies of 262,144 with as many merges), far below what hurts.
MAX_KEYS = 4096
MAX_TENSORS = 65536
MAX_ARRAY_ELEMENTS = 4 << 20
MAX_STRING = 1 << 20
MAX_NAME = 256
MAX_ALIGNMENT = 1 << 16
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 1 << 40

_STRING, _ARRAY, _BOOL, _UINT32 = 8, 9, 7, 4
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def damaged(message: str) -> ModelFileError:
    """The error for a file that contradicts itself."""
    return ModelFileError("damaged_model", message)


class _Cursor:
    """A read position that cannot leave the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.size = len(data)
        self.at = 0

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.at:
            raise ModelFileError(
                "truncated_model", f"the file ends at byte {self.size}, inside {what} at byte {self.at}"
            )
        self.at += count
        return self._data[self.at - count : self.at]

    def skip(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            self.take(count, what)
        self.at += count

    def u32(self, what: str) -> int:
        return int(struct.unpack("<I", self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack("<Q", self.take(8, what))[0])

    def text(self, what: str, limit: int) -> str:
        length = self.u64(what)
        if length > limit:
            raise damaged(f"{what} claims a length of {length} bytes; the limit is {limit}")
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise damaged(f"{what} is not valid UTF-8") from None


def check_gguf(path: Path, type_sizes: Mapping[int, tuple[int, int]]) -> None:
    """Raise ModelFileError unless `path` is a whole, self-consistent GGUF file.

    `type_sizes` maps a tensor type id to (elements, bytes) of its block.
    """
    with path.open("rb") as file, _mapped(file) as data:
        cursor = _Cursor(data)
        _check_magic(cursor)
        tensors = _count(cursor, "tensor count", MAX_TENSORS)
        keys = _count(cursor, "key count", MAX_KEYS)
        alignment = _walk_keys(cursor, keys)
        spans = [_walk_tensor(cursor, index, type_sizes) for index in range(tensors)]
        if len({name for name, _, _ in spans}) != tensors:
            raise damaged("two tensors share one name")
        _check_spans(cursor, spans, alignment)


@contextmanager
def _mapped(file: BinaryIO) -> Iterator[mmap.mmap]:
    try:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelFileError("truncated_model", "the file is empty") from None
    with data:
        yield data


def _check_magic(cursor: _Cursor) -> None:
    magic = cursor.take(4, "the magic")
    if magic != MAGIC:
        raise ModelFileError(
            "unsupported_container", f"the file begins with {magic!r}; GGUF begins with {MAGIC!r}"
        )
    version = cursor.u32("the version")
    if version & 0xFFFF == 0:
        raise ModelFileError(
            "unsupported_container", "a big-endian GGUF; only little-endian ones are supported"
        )
    if version not in VERSIONS:
        raise ModelFileError("unsupported_container", f"GGUF version {version}; supported: 2 and 3")


def _count(cursor: _Cursor, what: str, limit: int) -> int:
    value = cursor.u64(f"the {what}")
    if value > limit:
        raise damaged(f"the {what} is {value}; the limit is {limit}")
    return value


def _walk_keys(cursor: _Cursor, count: int) -> int:
    """Walk every key and value; return the alignment of the data."""
    seen: set[str] = set()
    elements = 0
    alignment = 32
    for index in range(count):
        key = cursor.text(f"the name of key {index}", MAX_NAME)
        if key in seen:
            raise damaged(f"the key {key!r} appears twice")
        seen.add(key)
        kind = cursor.u32(f"the type of {key!r}")
        if key == "general.alignment":
            alignment = _alignment(cursor, kind)
        elif kind == _ARRAY:
            elements += _walk_array(cursor, key, MAX_ARRAY_ELEMENTS - elements)
        else:
            _walk_value(cursor, kind, key)
    return alignment


def _alignment(cursor: _Cursor, kind: int) -> int:
    if kind != _UINT32:
        raise damaged(f"general.alignment has type {kind}; it must be a u32")
    value = cursor.u32("general.alignment")
    if not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise damaged(f"general.alignment is {value}; it must be a power of two up to {MAX_ALIGNMENT}")
    return value


def _walk_value(cursor: _Cursor, kind: int, key: str) -> None:
    if kind == _STRING:
        cursor.text(f"the value of {key!r}", MAX_STRING)
    elif kind == _BOOL:
        if cursor.take(1, f"the value of {key!r}") not in (b"\0", b"\1"):
            raise damaged(f"the value of {key!r} is neither false nor true")
    elif kind in _SCALAR_BYTES:
        cursor.skip(_SCALAR_BYTES[kind], f"the value of {key!r}")
    else:
        raise damaged(f"the key {key!r} has the unknown value type {kind}")


def _walk_array(cursor: _Cursor, key: str, allowed: int) -> int:
    kind = cursor.u32(f"the element type of {key!r}")
    count = cursor.u64(f"the length of {key!r}")
    if count > allowed:
        raise damaged(
            f"the array {key!r} claims {count} elements; arrays may hold {MAX_ARRAY_ELEMENTS} in all"
        )
    if kind == _STRING:
        what = f"an element of {key!r}"
        for _ in range(count):
            cursor.text(what, MAX_STRING)
    elif kind in _SCALAR_BYTES:
        cursor.skip(count * _SCALAR_BYTES[kind], f"the array {key!r}")
    else:
        raise damaged(f"the array {key!r} has elements of the unsupported type {kind}")
    return count


def _walk_tensor(
    cursor: _Cursor, index: int, type_sizes: Mapping[int, tuple[int, int]]
) -> tuple[str, int, int]:
    """Walk one directory entry; return (name, offset, bytes)."""
    name = cursor.text(f"the name of tensor {index}", MAX_NAME)
    rank = cursor.u32(f"the rank of {name!r}")
    if not 1 <= rank <= MAX_DIMENSIONS:
        raise damaged(f"the tensor {name!r} has {rank} dimensions; 1 to {MAX_DIMENSIONS} are possible")
    dims = [cursor.u64(f"the dimensions of {name!r}") for _ in range(rank)]
    elements = 1
    for dim in dims:
        elements *= dim
    if not 1 <= elements <= MAX_ELEMENTS:
        raise damaged(f"the tensor {name!r} claims the shape {dims}")
    kind = cursor.u32(f"the type of {name!r}")
    offset = cursor.u64(f"the offset of {name!r}")
    if kind not in type_sizes:
        raise ModelFileError("unsupported_tensor_type", f"the tensor {name!r} has the unknown type {kind}")
    block, block_bytes = type_sizes[kind]
    if dims[0] % block:
        raise damaged(f"the tensor {name!r} has rows of {dims[0]}, no multiple of its block of {block}")
    return name, offset, elements // block * block_bytes


def _check_spans(cursor: _Cursor, spans: list[tuple[str, int, int]], alignment: int) -> None:
    """Every tensor aligned, inside the file, and apart from the others."""
    start = -(-cursor.at // alignment) * alignment
    previous, end = "", 0
    for name, offset, count in sorted(spans, key=lambda span: span[1]):
        if offset % alignment:
            raise damaged(f"the tensor {name!r} starts at {offset}, no multiple of the alignment {alignment}")
        if offset < end:
            raise damaged(f"the tensors {previous!r} and {name!r} overlap")
        previous, end = name, offset + count
        if start + end > cursor.size:
            raise ModelFileError(
                "truncated_model",
                f"the tensor {name!r} ends at byte {start + end}, the file at byte {cursor.size}",
            )
