# SPDX-License-Identifier: Apache-2.0
"""Archives are unpacked once, and an interruption is not taken for an end."""

from __future__ import annotations

from pathlib import Path

import pytest

from portable.unpacked import unpacked


def test_once_for_each_set_of_archives(tmp_path: Path) -> None:
    calls: list[str] = []

    def extract(archive: Path, into: Path) -> None:
        calls.append(archive.name)
        (into / archive.stem).touch()

    first = unpacked([Path("a.deb"), Path("b.deb")], tmp_path, extract)
    assert sorted(path.name for path in first.iterdir()) == ["a", "b"]
    assert unpacked([Path("a.deb"), Path("b.deb")], tmp_path, extract) == first
    assert unpacked([Path("a.deb")], tmp_path, extract) != first
    assert calls == ["a.deb", "b.deb", "a.deb"]


def test_an_interrupted_one_is_done_again(tmp_path: Path) -> None:
    def broken(_archive: Path, into: Path) -> None:
        (into / "half").touch()
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        unpacked([Path("a.deb")], tmp_path, broken)
    whole = unpacked([Path("a.deb")], tmp_path, lambda _, into: (into / "a").touch())
    assert [path.name for path in whole.iterdir()] == ["a"]
