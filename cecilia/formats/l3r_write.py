# SPDX-License-Identifier: Apache-2.0
"""Write a `.l3r` model file: streaming, deterministic, and all or nothing.

The bytes go to a hidden file beside the target; `finish` makes them durable and gives them their name. Until
then the target is untouched, and an exception, Ctrl-C included, leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cecilia.errors import ModelFileError, UsageError
from cecilia.formats import l3r_layout as layout
from cecilia.formats.l3r_layout import PlannedTensor, Slice, TensorEntry
from cecilia.formats.l3r_metadata import encode_metadata
from cecilia.formats.quant import FORMATS

__all__ = ["ModelWriter", "PlannedTensor"]


class _LeafHasher:
    """Digests of the data leaves, from bytes that arrive in file order in pieces of any size."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        self._sizes = (
            min(layout.LEAF_BYTES, s.nbytes - at)
            for s in slices
            for at in range(0, s.nbytes, layout.LEAF_BYTES)
        )
        self._room = next(self._sizes)
        self._hash = hashlib.sha256()
        self.digests = bytearray()

    def update(self, data: memoryview) -> None:
        while len(data) >= self._room:
            self._hash.update(data[: self._room])
            data = data[self._room :]
            self.digests += self._hash.digest()
            self._hash = hashlib.sha256()
            self._room = next(self._sizes, 1)
        self._hash.update(data)
        self._room -= len(data)


def _directory(entries: Sequence[TensorEntry]) -> bytes:
    """The directory section: one record a tensor, then all names without separators."""
    records, names = bytearray(), bytearray()
    for e in entries:
        name = e.name.encode()
        head = (len(names), len(name), FORMATS[e.format].id, e.rank, e.rows, e.cols, e.layer)
        records += layout.ENTRY.pack(*head, e.align, e.offset, e.nbytes, 0)
        names += name
    return bytes(records + names)


def _encode_template(source: str) -> bytes:
    try:
        return source.encode()
    except UnicodeEncodeError as error:
        raise ModelFileError("bad_section", f"chat_template is no valid text: {error.reason}") from None


class ModelWriter:
    """Writes one model file; tensors are given in the planned order, one at a time.

    tokenizer: the bytes of a tokenizer.json, or None; chat_template: Jinja source of at most 64 KiB, or None.
    ModelFileError: `bad_metadata`, `bad_directory` or `bad_section` for a plan that makes no valid file,
    `file_unwritable` when the system refuses. UsageError `bad_write` for data that does not follow the plan,
    or when a `with` block ends without `finish`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        metadata: Mapping[str, Any],
        tokenizer: bytes | None,
        chat_template: str | None,
        tensors: Sequence[PlannedTensor],
    ) -> None:
        self.path = Path(path)
        self._part = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.partial")
        self._fd = -1
        self._finished = False
        with layout.naming(self.path):
            self._plan_file(metadata, tokenizer, chat_template, tensors)
        self._next = 0
        self._cursor = self._data_offset
        self._hasher = _LeafHasher(self._slices)
        self._guard(self._create)

    def _plan_file(
        self,
        metadata: Mapping[str, Any],
        tokenizer: bytes | None,
        chat_template: str | None,
        tensors: Sequence[PlannedTensor],
    ) -> None:
        """Fix the size and place of everything: only digests and tensor data are still unknown after this."""
        relative, slices = layout.place(tensors, 0)
        contents: dict[str, bytes | None] = {
            "metadata": encode_metadata(metadata),
            "tokenizer": tokenizer,
            "chat_template": None if chat_template is None else _encode_template(chat_template),
            "directory": _directory(relative),  # right in size; its offsets come below
            "leaves": bytes(32 * sum(s.leaves for s in slices)),
        }
        self._offsets: dict[str, int] = {}
        end = layout.HEADER_BYTES
        for name in layout.SECTION_KINDS:
            content = contents[name]
            if content is None:
                continue
            if len(content) > layout.SECTION_LIMITS[name]:
                limit = layout.SECTION_LIMITS[name]
                raise ModelFileError("bad_section", f"{name} is {len(content)} bytes, at most {limit}")
            self._offsets[name] = layout.align_up(end, layout.SECTION_ALIGN)
            end = self._offsets[name] + len(content)
        self._data_offset = layout.align_up(end, layout.SLICE_ALIGN)
        self._entries, self._slices = layout.place(tensors, self._data_offset)
        contents["directory"] = _directory(self._entries)
        self._contents = contents
        self._file_bytes = self._slices[-1].offset + self._slices[-1].nbytes

    # ---- system calls, with one home for their errors ----

    def _guard(self, step: Callable[..., None], *args: Any) -> None:
        try:
            step(*args)
        except OSError as error:
            self.abort()
            raise ModelFileError("file_unwritable", f"{self.path}: {error.strerror or error}") from None

    def _create(self) -> None:
        self._fd = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def _write_at(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(self._fd, view, offset)
            view, offset = view[done:], offset + done

    def _publish(self) -> None:
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        os.replace(self._part, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    # ---- the data ----

    def _append(self, data: memoryview) -> None:
        self._guard(self._write_at, self._cursor, data)
        self._hasher.update(data)
        self._cursor += len(data)

    def _pad_to(self, offset: int) -> None:
        self._append(memoryview(bytes(offset - self._cursor)))

    def write(self, name: str, data: Any) -> None:
        """Append tensor `name`, the next of the plan; `data` is a contiguous buffer of its exact size."""
        self.write_parts(name, (data,))

    def write_parts(self, name: str, parts: Iterable[Any]) -> None:
        """As `write`, from contiguous buffers that together make up the tensor, taken one at a time."""
        if self._fd < 0:
            raise UsageError("bad_write", f"{self.path}: the writer is closed")
        if self._next == len(self._entries):
            raise UsageError("bad_write", f"{self.path}: {name!r} follows the last planned tensor")
        entry = self._entries[self._next]
        if name != entry.name:
            raise UsageError("bad_write", f"{self.path}: expected {entry.name!r}, found {name!r}")
        self._pad_to(entry.offset)
        for part in parts:
            view = memoryview(part)
            if not view.c_contiguous or self._cursor + view.nbytes > entry.offset + entry.nbytes:
                raise self._misfit(entry, view.nbytes)
            self._append(view.cast("B"))
        if self._cursor != entry.offset + entry.nbytes:
            raise self._misfit(entry, 0)
        self._next += 1

    def _misfit(self, entry: TensorEntry, nbytes: int) -> UsageError:
        """The error for data of the wrong size or shape; the file is given up, as part of it may be there."""
        self.abort()
        found = self._cursor - entry.offset + nbytes
        return UsageError(
            "bad_write",
            f"{self.path}: {entry.name!r} takes {entry.nbytes} contiguous bytes, found {found}",
        )

    def finish(self) -> None:
        """Write header and sections, make the file durable and give it its name."""
        if self._fd < 0 or self._next < len(self._entries):
            missing = self._entries[self._next].name if self._next < len(self._entries) else "nothing"
            self.abort()
            raise UsageError("bad_write", f"{self.path}: cannot finish, {missing!r} is still to be written")
        self._pad_to(self._file_bytes)
        self._contents["leaves"] = bytes(self._hasher.digests)
        head = bytearray(self._data_offset)  # header, sections and the zeros between them
        for name, offset in self._offsets.items():
            content = self._contents[name] or b""
            head[offset : offset + len(content)] = content
        head[: layout.HEADER_BYTES] = self._header()
        self._guard(self._write_at, 0, bytes(head))
        self._guard(self._publish)
        self._finished = True

    def _header(self) -> bytes:
        header = bytearray(layout.HEADER_BYTES)
        layout.FIELDS.pack_into(
            header,
            0,
            layout.MAGIC,
            layout.VERSION,
            layout.HEADER_BYTES,
            self._file_bytes,
            self._data_offset,
            self._file_bytes - self._data_offset,
            0,
            len(self._entries),
            layout.LEAF_BYTES,
            sum(s.leaves for s in self._slices),
            layout.LEAF_DIGEST.encode(),
        )
        for i, name in enumerate(layout.SECTION_KINDS):
            content = self._contents[name]
            at = layout.SECTION_TABLE + i * layout.SECTION.size
            if content is None:
                layout.SECTION.pack_into(header, at, i + 1, 0, 0, 0, bytes(32))
            else:
                sha = hashlib.sha256(content).digest()
                layout.SECTION.pack_into(header, at, i + 1, 0, self._offsets[name], len(content), sha)
        end = layout.HEADER_DIGEST
        header[end : end + 32] = hashlib.sha256(header[:end]).digest()
        return bytes(header)

    # ---- the end ----

    def abort(self) -> None:
        """Remove what was written so far. Harmless after `finish`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._part.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
        if kind is None and not self._finished:
            raise UsageError("bad_write", f"{self.path}: left unfinished, nothing was written")
