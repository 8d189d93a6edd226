# SPDX-License-Identifier: Apache-2.0
"""Open a `.l3r` model file: everything but the tensor data is checked here, once, before anything uses it.

The file is untrusted. No field is used before it is bounded, nothing is allocated by a size the file merely
claims, and every refusal is a ModelFileError of one line with the path and a stable code:

    file_unreadable        missing, not a regular file, not permitted, an I/O error
    unsupported_container  not an .l3r file
    unsupported_version    a newer version, or a feature of one
    file_truncated         shorter than its header says
    header_corrupt         the header's digest or fields are wrong
    section_corrupt        a section's digest, padding or encoding is wrong
    bad_metadata           the metadata is no JSON of the required shape
    bad_directory          the tensor directory is not the one legal arrangement
    data_corrupt           a data leaf's digest is wrong (under `verify`)
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cecilia.errors import ModelFileError, UsageError
from cecilia.formats import l3r_layout as layout
from cecilia.formats.l3r_layout import PlannedTensor, Section, Slice, TensorEntry
from cecilia.formats.l3r_metadata import decode_metadata
from cecilia.formats.quant import FORMAT_BY_ID

__all__ = ["ModelFile", "Section", "Slice", "TensorEntry", "open_model"]

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


@dataclass(frozen=True)
class _Header:
    data_offset: int
    file_bytes: int
    tensor_count: int
    leaf_count: int
    sections: dict[str, Section]
    digest: bytes


# ---- header -----------------------------------------------------------------------------------------------


def _check_identity(raw: bytes, size: int) -> None:
    """Magic, version and header size, before anything else is believed. `raw`: the file's first bytes."""
    magic = raw[: len(layout.MAGIC)]
    if not layout.MAGIC.startswith(magic):
        if magic[1:4] == layout.MAGIC[1:4]:
            raise ModelFileError("header_corrupt", f"first bytes {magic.hex()} damaged (text-mode transfer?)")
        raise ModelFileError("unsupported_container", f"not an .l3r file, first bytes {magic.hex()}")
    version = int.from_bytes(raw[8:12], "little")
    if len(raw) >= 12 and version != layout.VERSION:
        raise ModelFileError("unsupported_version", f"version {version}, supported is {layout.VERSION}")
    if len(raw) < layout.HEADER_BYTES:
        raise ModelFileError("file_truncated", f"{size} bytes, the header alone takes {layout.HEADER_BYTES}")


def _parse_header(raw: bytes, size: int) -> _Header:
    _check_identity(raw, size)
    end = layout.HEADER_DIGEST
    digest = hashlib.sha256(raw[:end]).digest()
    if digest != raw[end : end + 32]:
        raise ModelFileError("header_corrupt", "the header does not match its digest")
    fields = layout.FIELDS.unpack_from(raw)
    _, _, header_bytes, file_bytes, data_offset, data_bytes, flags, tensors, leaf_bytes, leaves, name = fields
    if flags or name != layout.LEAF_DIGEST.encode().ljust(16, b"\0"):
        raise ModelFileError("unsupported_version", f"feature flags {flags:#x} with leaf digest {name!r}")
    if header_bytes != layout.HEADER_BYTES or leaf_bytes != layout.LEAF_BYTES:
        raise ModelFileError("header_corrupt", f"header of {header_bytes} bytes with leaves of {leaf_bytes}")
    used = layout.SECTION_TABLE + len(layout.SECTION_KINDS) * layout.SECTION.size
    if any(raw[layout.FIELDS.size : layout.SECTION_TABLE] + raw[used:end] + raw[end + 32 :]):
        raise ModelFileError("unsupported_version", "reserved header bytes are not zero")
    if size < file_bytes:
        raise ModelFileError("file_truncated", f"{size} bytes, the header says {file_bytes}")
    if size > file_bytes or file_bytes != data_offset + data_bytes:
        raise ModelFileError(
            "header_corrupt",
            f"{size} bytes, the header says {file_bytes} with data {data_offset}+{data_bytes}",
        )
    return _Header(data_offset, file_bytes, tensors, leaves, _parse_sections(raw, data_offset), digest)


def _parse_sections(raw: bytes, data_offset: int) -> dict[str, Section]:
    """The section table. A section starts at the first multiple of 64 after the one before it."""
    sections: dict[str, Section] = {}
    end = layout.HEADER_BYTES
    for i, name in enumerate(layout.SECTION_KINDS):
        at = layout.SECTION_TABLE + i * layout.SECTION.size
        record = raw[at : at + layout.SECTION.size]
        kind, flags, offset, nbytes, sha = layout.SECTION.unpack(record)
        if kind != i + 1:
            raise ModelFileError(
                "header_corrupt", f"section {i} is of kind {kind}, expected {i + 1} ({name})"
            )
        if flags or any(record[24:32]):
            raise ModelFileError(
                "unsupported_version", f"section {name}: flags {flags:#x} or reserved bytes set"
            )
        absent = name in ("tokenizer", "chat_template") and offset == 0
        expected = 0 if absent else layout.align_up(end, layout.SECTION_ALIGN)
        limit = 0 if absent else layout.SECTION_LIMITS[name]
        if offset != expected or nbytes > limit or (absent and any(sha)):
            raise ModelFileError(
                "header_corrupt",
                f"section {name} of {nbytes} bytes at {offset}, expected at most {limit} at {expected}",
            )
        if not absent:
            end = offset + nbytes
        sections[name] = Section(name, offset, nbytes, sha)
    if data_offset != layout.align_up(end, layout.SLICE_ALIGN):
        raise ModelFileError("header_corrupt", f"data at {data_offset}, sections end at {end}")
    return sections


# ---- sections ---------------------------------------------------------------------------------------------


def _read(fd: int, offset: int, nbytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < nbytes:
        part = os.pread(fd, nbytes - len(parts), offset + len(parts))
        if not part:
            raise ModelFileError("file_truncated", f"ends at {offset + len(parts)} while being read")
        parts += part
    return bytes(parts)


def _read_sections(fd: int, header: _Header) -> dict[str, bytes]:
    """The verified bytes of every section that is present."""
    contents: dict[str, bytes] = {}
    end = layout.HEADER_BYTES
    for s in header.sections.values():
        if s.offset == 0:
            continue
        raw = _read(fd, end, s.offset + s.nbytes - end)
        gap, content = raw[: s.offset - end], raw[s.offset - end :]
        if hashlib.sha256(content).digest() != s.sha256:
            raise ModelFileError("section_corrupt", f"section {s.name} does not match its digest")
        if any(gap):
            raise ModelFileError("section_corrupt", f"padding before section {s.name} is not zero")
        contents[s.name] = content
        end = s.offset + s.nbytes
    if any(_read(fd, end, header.data_offset - end)):
        raise ModelFileError("section_corrupt", "padding before the data is not zero")
    return contents


def _decode_text(name: str, raw: bytes | None) -> str | None:
    try:
        return None if raw is None else raw.decode()
    except UnicodeDecodeError as error:
        raise ModelFileError("section_corrupt", f"section {name} is no UTF-8: {error.reason}") from None


def _tensor_name(index: int, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ModelFileError("bad_directory", f"name of tensor {index} is no UTF-8: {error.reason}") from None


def _parse_directory(raw: bytes, header: _Header) -> tuple[list[TensorEntry], list[Slice]]:
    """The directory, accepted only if it is exactly what `place` makes of its own list of tensors."""
    count = header.tensor_count
    names = raw[count * layout.ENTRY.size :]
    if count > layout.MAX_TENSORS or count * layout.ENTRY.size > len(raw):
        raise ModelFileError("bad_directory", f"{count} tensors in a directory of {len(raw)} bytes")
    planned: list[PlannedTensor] = []
    stored: list[tuple[int, int]] = []
    at = 0
    for i in range(count):
        record = raw[i * layout.ENTRY.size : (i + 1) * layout.ENTRY.size]
        fields = layout.ENTRY.unpack(record)
        name_at, name_bytes, fmt, rank, rows, cols, layer, align, offset, nbytes, flags = fields
        name = _tensor_name(i, names[at : at + name_bytes])
        if name_at != at or at + name_bytes > len(names):
            raise ModelFileError("bad_directory", f"tensor {i}: name of {name_bytes} bytes at {name_at}")
        if fmt not in FORMAT_BY_ID:
            raise ModelFileError("bad_directory", f"tensor {name!r}: unknown format {fmt}")
        if flags or any(record[layout.ENTRY_RESERVED :]):
            raise ModelFileError("unsupported_version", f"tensor {name!r}: flags {flags:#x} or reserved set")
        at += name_bytes
        planned.append(PlannedTensor(name, FORMAT_BY_ID[fmt].name, rank, rows, cols, layer, align))
        stored.append((offset, nbytes))
    if at != len(names):
        raise ModelFileError("bad_directory", f"names take {at} bytes, found {len(names)}")
    entries, slices = layout.place(planned, header.data_offset)
    for entry, found in zip(entries, stored, strict=True):
        if found != (entry.offset, entry.nbytes):
            raise ModelFileError(
                "bad_directory",
                f"tensor {entry.name!r}: {found[1]} bytes at {found[0]}, "
                f"expected {entry.nbytes} at {entry.offset}",
            )
    end, leaves = slices[-1].offset + slices[-1].nbytes, sum(s.leaves for s in slices)
    digests = header.sections["leaves"].nbytes
    if end != header.file_bytes or leaves != header.leaf_count or digests != 32 * leaves:
        raise ModelFileError(
            "bad_directory",
            f"tensors end at {end} and have {leaves} leaves, the file ends at {header.file_bytes} "
            f"and has {header.leaf_count} in {digests} bytes",
        )
    return entries, slices


# ---- the open file ----------------------------------------------------------------------------------------


class ModelFile:
    """A model file that passed every check at open. Tensor data stays in the file, mapped read-only.

    digest: hex SHA-256 of the header, which holds the digest of everything else: the identity of the model.
    A file that shrinks while it is mapped ends the process (SIGBUS); replace model files by renaming.
    """

    def __init__(self, path: Path, header: _Header, contents: dict[str, bytes], data: mmap.mmap) -> None:
        self.path = path
        self.digest = header.digest.hex()
        self.nbytes = header.file_bytes
        self.sections = header.sections
        self.metadata: dict[str, Any] = decode_metadata(contents["metadata"])
        self.tokenizer: bytes | None = contents.get("tokenizer")
        self.chat_template = _decode_text("chat_template", contents.get("chat_template"))
        entries, self.slices = _parse_directory(contents["directory"], header)
        self.tensors: dict[str, TensorEntry] = {e.name: e for e in entries}
        self._leaves = contents["leaves"]
        self._map = data
        self._view: memoryview | None = memoryview(data)

    def _mapped(self) -> memoryview:
        if self._view is None:
            raise UsageError("file_closed", f"{self.path}: the model file is closed")
        return self._view

    def data(self, name: str) -> memoryview:
        """The bytes of tensor `name`, read-only, without a copy; ModelFileError `missing_tensor`."""
        entry = self.tensors.get(name)
        if entry is None:
            raise ModelFileError("missing_tensor", f"{self.path}: no tensor {name!r}")
        return self._mapped()[entry.offset : entry.offset + entry.nbytes]

    def span(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of the file as they are mapped, read-only."""
        return self._mapped()[offset : offset + nbytes]

    def release(self, offset: int, nbytes: int) -> None:
        """Give back the memory of whole OS pages of the file; they are read again when touched."""
        self._mapped()
        self._map.madvise(mmap.MADV_DONTNEED, offset, nbytes)

    def verify(self, progress: Progress | None = None) -> None:
        """Compare every data leaf with its digest; ModelFileError `data_corrupt` names the first bad one."""
        view = self._mapped()
        base, total = self.slices[0].offset, self.nbytes - self.slices[0].offset
        leaf = 0
        for s in self.slices:
            for start in range(s.offset, s.offset + s.nbytes, layout.LEAF_BYTES):
                stop = min(start + layout.LEAF_BYTES, s.offset + s.nbytes)
                if hashlib.sha256(view[start:stop]).digest() != self._leaves[32 * leaf : 32 * leaf + 32]:
                    raise ModelFileError("data_corrupt", self._describe_leaf(leaf, start, stop))
                leaf += 1
                if progress is not None:
                    progress(stop - base, total)

    def _describe_leaf(self, leaf: int, start: int, stop: int) -> str:
        inside = [e.name for e in self.tensors.values() if e.offset < stop and e.offset + e.nbytes > start]
        more = f" and {len(inside) - 3} more" if len(inside) > 3 else ""
        names = ", ".join(inside[:3]) + more if inside else "padding"
        return f"{self.path}: leaf {leaf}, bytes {start}..{stop}, does not match its digest ({names})"

    def close(self) -> None:
        """Let go of the mapping; views handed out by `data` keep it alive until they are gone."""
        self._view = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_regular(path: Path) -> int:
    """A descriptor of a regular file; never blocks on a pipe or a device."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ModelFileError("file_unreadable", "not a regular file")
    return fd


def _open(path: Path) -> ModelFile:
    try:
        fd = _open_regular(path)
        try:
            size = os.fstat(fd).st_size
            header = _parse_header(_read(fd, 0, min(size, layout.HEADER_BYTES)), size)
            contents = _read_sections(fd, header)
            data = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL, a size mmap cannot take
        reason = error.strerror if isinstance(error, OSError) else None
        raise ModelFileError("file_unreadable", reason or str(error)) from None
    return ModelFile(path, header, contents, data)


def open_model(path: str | os.PathLike[str], *, verify: bool = False) -> ModelFile:
    """Open and check a model file; with `verify`, check every byte of its data too.

    ModelFileError with one of the codes in this module's docstring.
    """
    where = Path(path)
    with layout.naming(where):
        model = _open(where)
    if verify:
        model.verify()
    return model
