# SPDX-License-Identifier: Apache-2.0
"""A snapshot on disk is the old one or the new one, whatever fails; a damaged one is refused by name."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from typing_extensions import Buffer

from cecilia._kernels.buffer import Fixed
from cecilia.errors import MemoryLimitError, RequestError
from cecilia.state.pages import Checkpoint, PagePool, PageTable
from cecilia.state.sequence import Sequence
from cecilia.state.snapshot import Disk, Snapshot, SnapshotFile, sweep

KEY = {"model": "m1", "profile": "int8-v1"}
STATE = 192  # bytes
STEPS = ("create", "write", "fsync", "replace", "fsync_directory")


class Crash(BaseException):
    """The process is gone: nothing of it runs any more."""


class Faulty(Disk):
    """Makes the n-th call fail, or the process end there."""

    def __init__(self, n: int, fault: BaseException) -> None:
        self.left = n
        self.fault = fault
        self.calls: list[str] = []

    def _count(self, name: str) -> None:
        self.calls.append(name)
        self.left -= 1
        if self.left == 0:
            raise self.fault

    def create(self, path: Path) -> int:
        self._count("create")
        return super().create(path)

    def write(self, fd: int, data: Buffer) -> None:
        if self.left == 1:
            super().write(fd, memoryview(data)[: memoryview(data).nbytes // 2])
        self._count("write")
        super().write(fd, data)

    def fsync(self, fd: int) -> None:
        self._count("fsync")
        super().fsync(fd)

    def replace(self, source: Path, target: Path) -> None:
        self._count("replace")
        super().replace(source, target)

    def fsync_directory(self, path: Path) -> None:
        self._count("fsync_directory")
        super().fsync_directory(path)


def pool(pages: int = 16) -> PagePool:
    return PagePool(256, 256 * pages)


def sequence(tokens: int = 150, fill: int = 1) -> Sequence:
    """Tokens `fill`, `fill` + 1 ..., pages full of `fill`, a checkpoint at 64 and at the end."""
    held = pool()
    made = Sequence(PageTable(held), recurrent=True, salt="pepper")
    made.pages.reserve(tokens)
    made.tokens = list(range(fill, fill + tokens))
    for i in range(len(made.pages)):
        made.pages.view(i)[:] = bytes([fill + i]) * 256
    state = Fixed(STATE)
    for at in (64, tokens):
        memoryview(state)[:] = bytes([at % 256]) * STATE
        made.checkpoints[at] = Checkpoint(held, state)
    return made


def snapshot(fill: int = 1) -> Snapshot:
    return Snapshot(KEY, sequence(fill=fill), {"fill": fill}, {"logits": b"abc"})


def read(path: Path) -> int:
    """The fill of a snapshot whose every part is as `snapshot` made it."""
    with SnapshotFile(path) as file:
        file.verify()
        file.require(KEY, 150)
        fill = int(file.note["fill"])
        found, expected = file.sequence(pool(), STATE), sequence(fill=fill)
        assert (found.tokens, found.salt) == (expected.tokens, "pepper")
        pages = [[bytes(each.pages.view(i)) for i in range(len(each.pages))] for each in (found, expected)]
        assert pages[0] == pages[1]
        states = [{at: bytes(s.data) for at, s in each.checkpoints.items()} for each in (found, expected)]
        assert states[0] == states[1]
        assert (file.blob("logits"), file.blob("other")) == (b"abc", None)
    return fill


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.snapshot"
    nbytes = snapshot().write(path)
    assert path.stat().st_size == nbytes
    assert path.stat().st_mode & 0o777 == 0o600
    assert read(path) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["a.snapshot"]


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken"), Crash()])
def test_every_step_that_fails_leaves_the_old_or_the_new_one(tmp_path: Path, fault: BaseException) -> None:
    path = tmp_path / "a.snapshot"
    snapshot(1).write(path)
    counting = Faulty(0, fault)
    snapshot(1).write(path, counting)
    assert set(counting.calls) == set(STEPS)
    for n, step in enumerate(counting.calls, 1):
        snapshot(1).write(path)
        with pytest.raises((RequestError, Crash)) as failure:
            snapshot(2).write(path, Faulty(n, fault))
        assert read(path) == (2 if step == "fsync_directory" else 1), step
        left = {each.name for each in tmp_path.iterdir()} - {"a.snapshot"}
        if isinstance(failure.value, RequestError):
            assert failure.value.code == "snapshot_failed"
            assert not left
        assert {each.name for each in sweep(tmp_path)} == left
        assert {each.name for each in tmp_path.iterdir()} == {"a.snapshot"}


def refused(path: Path, code: str) -> None:
    with pytest.raises(RequestError) as refusal, SnapshotFile(path) as file:
        file.verify()
    assert refusal.value.code == code


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.snapshot"
    snapshot().write(path)
    with SnapshotFile(path) as file:
        covered = {at for section, place in file._places for at in range(place, place + section["bytes"])}
    good = path.read_bytes()
    head = struct.unpack_from("<I", good, 12)[0] + 48
    for at in [*range(0, head, 7), *sorted(covered)[::31]]:
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        refused(path, "snapshot_unsupported" if 8 <= at < 12 else "snapshot_damaged")


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.snapshot"
    snapshot().write(path)
    good = path.read_bytes()
    for size in (0, 4, 47, 48, 100, 4096, 5000, len(good) - 1, len(good) - 4096):
        path.write_bytes(good[:size])
        refused(path, "snapshot_damaged")
    path.write_bytes(good + b"x")
    refused(path, "snapshot_damaged")


def test_what_is_not_there_is_said_so(tmp_path: Path) -> None:
    refused(tmp_path / "none.snapshot", "snapshot_not_found")
    refused(tmp_path, "snapshot_damaged")


def rewritten(path: Path, change: Callable[[dict[str, object]], None]) -> None:
    """Change the header as somebody would who can compute digests."""
    data = path.read_bytes()
    size = struct.unpack_from("<I", data, 12)[0]
    header = json.loads(data[48 : 48 + size])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-(48 + len(text)) % 4096 if len(text) + 48 > 4096 else 4096 - 48 - len(text))
    body = data[48 + size + (-(48 + size) % 4096) :]
    path.write_bytes(struct.pack("<8sII32s", b"CECSNAP\n", 1, len(text), sha256(text).digest()) + text + body)


@pytest.mark.parametrize(
    "change",
    [
        {"sections": None},
        {"sections": [{"kind": "tokens"}]},
        {"page_bytes": "many"},
        {"tokens": 151},
        {"tokens": 0},
        {"tokens": -1},
        {"pages": 4},
        {"page_bytes": 128},
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "a.snapshot"
    snapshot().write(path)
    rewritten(path, lambda header: header.update(change))
    refused(path, "snapshot_damaged")


def test_another_model_recipe_or_window_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.snapshot"
    snapshot().write(path)
    with SnapshotFile(path) as file:
        for key, window, named in (
            (KEY | {"model": "m2"}, 150, "model is m1, this server's m2"),
            (KEY | {"isa": "scalar"}, 150, "isa is None"),
            ({"model": "m1"}, 150, "profile is int8-v1, this server's None"),
            (KEY, 149, "150 tokens, the window 149"),
        ):
            with pytest.raises(RequestError, match=named) as refusal:
                file.require(key, window)
            assert refusal.value.code == "snapshot_mismatch"


def test_sizes_of_another_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.snapshot"
    snapshot().write(path)
    with SnapshotFile(path) as file:
        for wrong, state_bytes in ((PagePool(512, 1 << 20), STATE), (pool(), STATE + 64)):
            with pytest.raises(RequestError, match="this model's") as refusal:
                file.sequence(wrong, state_bytes)
            assert refusal.value.code == "snapshot_damaged"
            del refusal  # its traceback holds what was built
            assert wrong.used_bytes == 0


def test_without_room_nothing_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.snapshot"
    snapshot().write(path)
    small = pool(3)
    with SnapshotFile(path) as file, pytest.raises(MemoryLimitError):
        file.sequence(small, STATE)
    assert small.used_bytes == 0


def test_an_unreadable_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "loop.snapshot"
    os.symlink(path, path)
    refused(path, "snapshot_damaged")
