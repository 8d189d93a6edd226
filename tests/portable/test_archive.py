# SPDX-License-Identifier: Apache-2.0
"""Archives: the same folder gives the same bytes, and the single file unpacks, once, what was put in."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from portable import archive
from portable.launcher import facts_of
from portable.target import TARGETS, Target, native
from tests.portable.fake_bundle import arguments, make, said, start

EPOCH = 1_700_000_000


def single(bundle: Path, folder: Path, target: Target | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "cecilia.run"
    facts = facts_of(bundle.name, "9.9.9", native() if target is None else target)
    archive.write_single(archive.tar_bytes(bundle, EPOCH), path, facts)
    return path


def listing(folder: Path) -> dict[str, tuple[int, str]]:
    """Name -> mode, and target or digest."""
    return {
        path.relative_to(folder).as_posix(): (
            path.lstat().st_mode,
            os.readlink(path) if path.is_symlink() else hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_the_bytes_depend_on_the_content_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = make(tmp_path / "a")
    second = tmp_path / "b" / first.name
    for path in sorted(first.rglob("*"), reverse=True):  # another order of creation
        copy = second / path.relative_to(first)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            copy.symlink_to(os.readlink(path))
        elif path.is_dir():
            copy.mkdir(exist_ok=True)
        else:
            shutil.copy(path, copy)
            os.utime(copy, (1, 1))
    assert archive.tar_bytes(first, EPOCH) == archive.tar_bytes(second, EPOCH)
    assert archive.tar_bytes(first, EPOCH) != archive.tar_bytes(first, EPOCH + 1)


def test_members_belong_to_root_and_are_sorted(tmp_path: Path) -> None:
    bundle = make(tmp_path)
    with tarfile.open(fileobj=io.BytesIO(archive.tar_bytes(bundle, EPOCH))) as tar:
        members = tar.getmembers()
    names = [member.name for member in members]
    assert names[0] == bundle.name
    assert all(name.startswith(f"{bundle.name}/") for name in names[1:])
    assert {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in members} == {(0, 0, "", "", EPOCH)}
    modes = {member.name.partition("/")[2]: member.mode for member in members}
    assert modes["cecilia-server"] == modes["python/bin/python3.11"] == modes["lib"] == 0o755
    assert modes["lib/libc.so.6"] == 0o644


def test_the_tar_xz_unpacks_to_the_folder(tmp_path: Path) -> None:
    bundle = make(tmp_path)
    digest = archive.write_tar_xz(archive.tar_bytes(bundle, EPOCH), tmp_path / "x.tar.xz")
    assert hashlib.sha256((tmp_path / "x.tar.xz").read_bytes()).hexdigest() == digest
    with tarfile.open(tmp_path / "x.tar.xz", "r:xz") as tar:
        tar.extractall(tmp_path / "out", filter="tar")
    assert listing(tmp_path / "out" / bundle.name) == listing(bundle)


def test_the_single_file_extracts_the_folder(tmp_path: Path) -> None:
    bundle = make(tmp_path)
    done = start(single(bundle, tmp_path / "one"), "--extract", str(tmp_path / "out"))
    assert done.stdout == f"{tmp_path}/out/{bundle.name}\n"
    assert listing(tmp_path / "out" / bundle.name) == listing(bundle)


def test_the_single_file_serves_the_model_beside_it_and_unpacks_once(tmp_path: Path) -> None:
    file = single(make(tmp_path), tmp_path / "one")
    (tmp_path / "one/models").mkdir()
    (tmp_path / "one/models/m.l3r").touch()
    store = tmp_path / "store"
    done = start(file, "--port", "9000", CECILIA_STORE=str(store))
    assert said(done)["CECILIA_MODEL"] == f"{tmp_path}/one/models/m.l3r"
    assert arguments(done)[-4:] == ["-m", "server", "--port", "9000"]
    (folder,) = store.iterdir()
    (folder / "mark").touch()
    assert said(start(file, CECILIA_STORE=str(store)))["PYTHONHOME"] == f"{folder}/python"
    assert list(store.iterdir()) == [folder]
    assert (folder / "mark").exists()


def test_the_single_file_converts(tmp_path: Path) -> None:
    file = single(make(tmp_path), tmp_path / "one")
    done = start(file, "convert", "in.gguf", CECILIA_STORE=str(tmp_path / "store"))
    assert arguments(done)[-3:] == ["-m", "tools.convert", "in.gguf"]


def test_the_default_store_is_the_users_cache(tmp_path: Path) -> None:
    file = single(make(tmp_path), tmp_path / "one")
    start(file, "convert", HOME=str(tmp_path / "home"))
    assert [path.name for path in (tmp_path / "home/.cache").iterdir()] == ["cecilia"]


def test_a_flipped_byte_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    file = single(make(tmp_path), tmp_path / "one")
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    done = start(file, CECILIA_STORE=str(tmp_path / "store"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: damaged_file: {file} is not as it was built: fetch it again\n"
    assert list((tmp_path / "store").iterdir()) == []


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = single(make(tmp_path), tmp_path / "one")
    done = start(file, CECILIA_STORE=f"{file}/store")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot_unpack: {file}/store cannot be written")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("flags", [["--extract"], ["--extract", "a", "b"]])
def test_extract_takes_one_folder(tmp_path: Path, flags: list[str]) -> None:
    done = start(single(make(tmp_path), tmp_path / "one"), *flags)
    assert (done.returncode, done.stderr) == (2, "error: usage: --extract takes one folder\n")


def test_another_architecture_is_refused_before_anything_is_unpacked(tmp_path: Path) -> None:
    foreign = next(target for target in TARGETS.values() if not target.native)
    done = start(single(make(tmp_path), tmp_path / "one", foreign), CECILIA_STORE=str(tmp_path / "store"))
    assert done.returncode == 6
    assert done.stderr.startswith(f"error: wrong_architecture: this file is for {foreign.name}")
    assert not (tmp_path / "store").exists()
