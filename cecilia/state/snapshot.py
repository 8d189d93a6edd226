# SPDX-License-Identifier: Apache-2.0
"""A sequence on disk: written so that a crash leaves the old file or the new one, read with every doubt.

    magic "CECSNAP\\n", version u32, header bytes u32, sha256 of the header, header (JSON), then the sections,
    each at a multiple of 4096 bytes, in the header's order. All integers are little-endian.

The header holds the key (what must be the same for the state to mean anything), the tokens' number, the sizes
of a page and of a fixed state, a note of the caller's, and of every section kind, place, bytes and sha256.
Sections: "tokens" i32, "pages" as they lie in memory, "state" at a position for each checkpoint, and blobs of
the caller's. What pages and states hold is opaque; a position beyond the tokens may hold anything.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cecilia._kernels.buffer import Fixed
from cecilia.errors import RequestError
from cecilia.state.pages import POSITIONS, Checkpoint, PagePool, PageTable
from cecilia.state.sequence import Sequence

if TYPE_CHECKING:  # not among the dependencies; type checkers know it
    from typing_extensions import Buffer

MAGIC = b"CECSNAP\n"
VERSION = 1
SUFFIX = ".snapshot"
UNFINISHED = ".writing"
_ALIGN = 4096
_HEAD = struct.Struct("<8sII32s")
_MAX_HEADER = 16 << 20  # bytes
_MAX_TOKENS = 1 << 24
_READ = 1 << 20  # bytes at a time


class Disk:
    """The calls that change a disk, so that each can be made to fail."""

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def write(self, fd: int, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        while view.nbytes:
            view = view[os.write(fd, view) :]

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def fsync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is written. `sequence` is the snapshot's own (a branch), so it stays as it is meanwhile."""

    key: Mapping[str, str]
    sequence: Sequence
    note: Mapping[str, Any]
    blobs: Mapping[str, bytes] = field(default_factory=dict)

    def write(self, path: Path, disk: Disk | None = None) -> int:
        """Write to `path`, replacing what is there in one step; returns the bytes. From any thread.

        Raises RequestError `snapshot_failed`; then what was at `path` still is.
        """
        disk = disk or Disk()
        aside = path.with_name(path.name + UNFINISHED)
        try:
            fd = disk.create(aside)
            try:
                nbytes = self._fill(fd, disk)
                disk.fsync(fd)
            finally:
                os.close(fd)
            disk.replace(aside, path)
            disk.fsync_directory(path.parent)
        except OSError as error:
            with suppress(FileNotFoundError):
                aside.unlink()
            reason = errno.errorcode.get(error.errno or 0, "error")
            raise RequestError("snapshot_failed", f"the snapshot cannot be written: {reason}") from error
        return nbytes

    def _fill(self, fd: int, disk: Disk) -> int:
        sections = list(self._sections())
        sequence, done = self.sequence, 0
        header = json.dumps(
            {
                "key": dict(self.key),
                "tokens": len(sequence),
                "salt": sequence.salt,
                "page_bytes": sequence.pages.pool.page_bytes,
                "pages": _pages(sequence),
                "note": dict(self.note),
                "sections": [
                    {"kind": kind, "at": at, "bytes": _total(parts), "sha256": _digest(parts)}
                    for kind, at, parts in sections
                ],
            }
        ).encode()
        head: list[Buffer] = [_HEAD.pack(MAGIC, VERSION, len(header), _sha(header)), header]
        for parts in (head, *(parts for _, _, parts in sections)):
            for part in (*parts, bytes(-_total(parts) % _ALIGN)):
                disk.write(fd, part)
            done += _up(_total(parts))
        return done

    def _sections(self) -> Iterator[tuple[str, int, list[Buffer]]]:
        """(kind, position or 0, parts)."""
        sequence = self.sequence
        yield "tokens", 0, [array("i", sequence.tokens).tobytes()]
        yield "pages", 0, [sequence.pages.view(i) for i in range(_pages(sequence))]
        for at in sorted(sequence.checkpoints):
            yield "state", at, [sequence.checkpoints[at].data]
        for name, blob in self.blobs.items():
            yield f"blob:{name}", 0, [blob]


def sweep(directory: Path) -> list[Path]:
    """Remove what interrupted writes left in `directory`; returns what went."""
    orphans = sorted(directory.glob(f"*{SUFFIX}{UNFINISHED}"))
    for orphan in orphans:
        orphan.unlink()
    return orphans


class SnapshotFile:
    """An open snapshot, its header checked against itself and the file's size; a context manager.

    Raises RequestError `snapshot_not_found`, `snapshot_damaged`, `snapshot_unsupported`.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise RequestError("snapshot_not_found", f"there is no snapshot {path.name}") from None
        except OSError as error:
            raise _unreadable(error) from error
        try:
            self._header, data = self._read_header()
            self._places = self._layout(data)
        except (KeyError, TypeError, ValueError) as error:
            os.close(self._fd)
            raise _damaged(f"its header is not one of this version: {error!r}") from error
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> SnapshotFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def note(self) -> dict[str, Any]:
        """The caller's note."""
        note: dict[str, Any] = self._header["note"]
        return note

    @property
    def tokens(self) -> int:
        """How many tokens it holds."""
        return int(self._header["tokens"])

    def require(self, key: Mapping[str, str], window: int) -> None:
        """Refuse what is not this model's. Raises RequestError `snapshot_mismatch` naming the difference."""
        found = self._header["key"]
        for name in sorted({*key, *found}):
            if key.get(name) != found.get(name):
                raise RequestError(
                    "snapshot_mismatch",
                    f"the snapshot's {name} is {found.get(name)}, this server's {key.get(name)}",
                )
        if self.tokens > window:
            raise RequestError(
                "snapshot_mismatch", f"the snapshot holds {self.tokens} tokens, the window {window}"
            )

    def verify(self) -> None:
        """Compare every section with its digest. From any thread. Raises RequestError `snapshot_damaged`."""
        buffer = memoryview(bytearray(_READ))
        for section, place in self._places:
            digest = hashlib.sha256()
            for first in range(0, section["bytes"], _READ):
                part = buffer[: min(_READ, section["bytes"] - first)]
                self._read(part, place + first)
                digest.update(part)
            if digest.hexdigest() != section["sha256"]:
                raise _damaged(f"section {section['kind']} does not match its digest")

    def blob(self, name: str) -> bytes | None:
        """A blob of the caller's."""
        for section, place in self._places:
            if section["kind"] == f"blob:{name}":
                data = bytearray(section["bytes"])
                self._read(memoryview(data), place)
                return bytes(data)
        return None

    def sequence(self, pool: PagePool, state_bytes: int) -> Sequence:
        """The sequence, in memory of its own; to be asked of a file that was verified.

        Raises MemoryLimitError, and RequestError `snapshot_damaged` for sizes that are not this model's.
        """
        if self._header["page_bytes"] != pool.page_bytes:
            raise _damaged(f"pages of {self._header['page_bytes']} bytes, this model's are {pool.page_bytes}")
        pages = PageTable(pool)
        sequence = Sequence(pages, recurrent=state_bytes > 0, salt=str(self._header["salt"]))
        for section, place in self._places:
            kind = section["kind"]
            if kind == "tokens":
                ids = array("i", bytes(section["bytes"]))
                self._read(memoryview(ids).cast("B"), place)
                sequence.tokens = ids.tolist()
            elif kind == "pages":
                pages.reserve(POSITIONS * self._header["pages"])
                for i in range(len(pages)):
                    self._read(pages.view(i), place + i * pool.page_bytes)
            elif kind == "state":
                if section["bytes"] != state_bytes:
                    raise _damaged(f"a state of {section['bytes']} bytes, this model's has {state_bytes}")
                fixed = Fixed(state_bytes)
                self._read(memoryview(fixed), place)
                sequence.checkpoints[section["at"]] = Checkpoint(pool, fixed)
        return sequence

    def _read_header(self) -> tuple[dict[str, Any], int]:
        """The header and where the sections begin."""
        head = self._some(_HEAD.size, 0)
        if len(head) < _HEAD.size or not head.startswith(MAGIC):
            raise _damaged("it does not begin like one")
        _, version, nbytes, digest = _HEAD.unpack(head)
        if version != VERSION:
            raise RequestError("snapshot_unsupported", f"snapshot version {version}, this server's {VERSION}")
        if nbytes > _MAX_HEADER:
            raise _damaged(f"a header of {nbytes} bytes")
        text = self._some(nbytes, _HEAD.size)
        if len(text) != nbytes or _sha(text) != digest:
            raise _damaged("the header does not match its digest")
        header: dict[str, Any] = json.loads(text)
        return header, _up(_HEAD.size + nbytes)

    def _layout(self, place: int) -> list[tuple[dict[str, Any], int]]:
        """The sections with their places; they must fill the file to its end and fit the header's numbers."""
        header, places = self._header, []
        for section in header["sections"]:
            places.append((section, place))
            place = _up(place + section["bytes"])
        size = os.fstat(self._fd).st_size
        if size != place:
            raise _damaged(f"{size} bytes, expected {place}")
        sizes = {section["kind"]: section["bytes"] for section, _ in places}
        tokens, pages = header["tokens"], header["pages"]
        wanted = (4 * tokens, pages * header["page_bytes"])
        found = (sizes.get("tokens"), sizes.get("pages"))
        if not 0 < tokens <= _MAX_TOKENS or pages != -(-tokens // POSITIONS) or found != wanted:
            raise _damaged(f"sections of {found} bytes for {tokens} tokens on {pages} pages")
        if any(not 0 < s["at"] <= tokens for s, _ in places if s["kind"] == "state"):
            raise _damaged("a state beyond the tokens")
        return places

    def _some(self, nbytes: int, place: int) -> bytes:
        """Up to `nbytes` bytes."""
        try:
            return os.pread(self._fd, nbytes, place)
        except OSError as error:
            raise _unreadable(error) from error

    def _read(self, into: memoryview, place: int) -> None:
        while into.nbytes:
            try:
                count = os.preadv(self._fd, [into], place)
            except OSError as error:
                raise _unreadable(error) from error
            if count == 0:
                raise _damaged("it ends too early")
            into, place = into[count:], place + count


def _up(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGN


def _pages(sequence: Sequence) -> int:
    """How many pages hold tokens."""
    return -(-len(sequence) // POSITIONS)


def _total(parts: list[Buffer]) -> int:
    return sum(memoryview(part).nbytes for part in parts)


def _sha(data: Buffer) -> bytes:
    return hashlib.sha256(data).digest()


def _digest(parts: list[Buffer]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _damaged(what: str) -> RequestError:
    return RequestError("snapshot_damaged", f"the snapshot is damaged: {what}")


def _unreadable(error: OSError) -> RequestError:
    return _damaged(f"it cannot be read: {error.strerror}")
