# SPDX-License-Identifier: Apache-2.0
"""The builder's command line; whole builds are tried by `make test-bundle`."""

from __future__ import annotations

from pathlib import Path

import pytest

from portable import debian
from portable.target import TARGETS
from tools import build_portable


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--arch", "riscv64"], "unknown_architecture: no bundle for 'riscv64', only for x86_64, aarch64"),
        (["--arch", "x86_64", "--with-rknnlite"], "no_rknnlite: rknn-toolkit-lite2 has no wheel for x86_64"),
    ],
)
def test_what_cannot_be_built_is_refused_at_once(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*flags, "--epoch", "0", "--output", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    assert build_portable.main(command) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert list(tmp_path.iterdir()) == []


def test_names_of_the_cross_tools() -> None:
    foreign = next(target for target in TARGETS.values() if not target.native)
    native = next(target for target in TARGETS.values() if target.native)
    assert foreign.tool("gcc") == f"{foreign.name}-linux-gnu-gcc"
    assert native.tool("gcc") == "gcc"
    assert "manylinux_2_28_aarch64" in TARGETS["aarch64"].wheel_platforms


def test_a_package_names_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = "Package: libgomp1\nSource: gcc-12 (12.2.0-13)\nVersion: 12.2.0-14\nArchitecture: arm64\n"
    monkeypatch.setattr(debian, "run", lambda _: fields)
    (tmp_path / "x.deb").write_bytes(b"")
    found = debian.describe(tmp_path / "x.deb")
    assert (found.name, found.version, found.architecture) == ("libgomp1", "12.2.0-14", "arm64")
    assert (found.source, found.source_version) == ("gcc-12", "12.2.0-13")
    # sha256 of nothing
    assert found.sha256 == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
