# SPDX-License-Identifier: Apache-2.0
"""What a 64-bit little-endian ELF file needs, read from its dynamic section (System V gABI, chapter 5)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cecilia.errors import CeciliaError

MAGIC = b"\x7fELF"
_CLASS64_LITTLE = b"\x02\x01"
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 14, 15, 29
_DT_VERNEED, _DT_VERNEEDNUM = 0x6FFFFFFE, 0x6FFFFFFF


@dataclass(frozen=True, slots=True)
class Elf:
    """One file: `machine` is e_machine, `versions` the symbol versions it asks of each library."""

    machine: int
    soname: str | None
    needed: tuple[str, ...]
    search: tuple[str, ...]
    versions: dict[str, tuple[str, ...]]


def is_elf(path: Path) -> bool:
    """Whether a regular file starts like one."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def read(path: Path) -> Elf:
    """Parse a file; CeciliaError `bad_elf` for one that is cut short or of another class."""
    data = path.read_bytes()
    try:
        if data[:6] != MAGIC + _CLASS64_LITTLE:
            raise CeciliaError("bad_elf", f"{path} is no 64-bit little-endian ELF file")
        return _Reader(data).elf()
    except (struct.error, IndexError, ValueError) as error:
        raise CeciliaError("bad_elf", f"{path} is damaged: {error}") from None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._machine = struct.unpack_from("<H", data, 18)[0]
        self._segments = list(self._program_headers())
        self._tags = list(self._dynamic())
        strings = self._value(_DT_STRTAB)
        self._strings = None if strings is None else self._file_offset(strings)

    def elf(self) -> Elf:
        names = [self._string(value) for tag, value in self._tags if tag == _DT_NEEDED]
        soname = self._value(_DT_SONAME)
        paths = [self._string(value) for tag, value in self._tags if tag in (_DT_RPATH, _DT_RUNPATH)]
        return Elf(
            machine=self._machine,
            soname=None if soname is None else self._string(soname),
            needed=tuple(names),
            search=tuple(part for path in paths for part in path.split(":")),
            versions={library: tuple(found) for library, found in self._versions()},
        )

    def _program_headers(self) -> Iterator[tuple[int, int, int, int]]:
        """(type, offset, address, size in the file)"""
        (start,) = struct.unpack_from("<Q", self._data, 32)
        size, count = struct.unpack_from("<HH", self._data, 54)
        for index in range(count):
            kind, _, offset, address, _, length = struct.unpack_from(
                "<IIQQQQ", self._data, start + index * size
            )
            yield kind, offset, address, length

    def _dynamic(self) -> Iterator[tuple[int, int]]:
        for kind, offset, _, length in self._segments:
            if kind == _PT_DYNAMIC:
                for at in range(offset, offset + length, 16):
                    tag, value = struct.unpack_from("<QQ", self._data, at)
                    if tag == 0:
                        return
                    yield tag, value

    def _value(self, wanted: int) -> int | None:
        return next((value for tag, value in self._tags if tag == wanted), None)

    def _file_offset(self, address: int) -> int:
        for kind, offset, start, length in self._segments:
            if kind == _PT_LOAD and start <= address < start + length:
                return offset + address - start
        raise ValueError(f"address {address:#x} is in no segment")

    def _string(self, offset: int) -> str:
        if self._strings is None:
            raise ValueError("no string table")
        start = self._strings + offset
        return self._data[start : self._data.index(b"\0", start)].decode()

    def _versions(self) -> Iterator[tuple[str, list[str]]]:
        """(library, symbol versions asked of it): a chain of Verneed, each with a chain of Vernaux."""
        address, count = self._value(_DT_VERNEED), self._value(_DT_VERNEEDNUM) or 0
        if address is None:
            return
        at = self._file_offset(address)
        for _ in range(count):
            _, entries, file, aux, following = struct.unpack_from("<HHIII", self._data, at)
            names, entry = [], at + aux
            for _ in range(entries):
                _, _, _, name, next_entry = struct.unpack_from("<IHHII", self._data, entry)
                names.append(self._string(name))
                entry += next_entry
            yield self._string(file), names
            at += following
