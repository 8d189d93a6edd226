# SPDX-License-Identifier: Apache-2.0
"""The launcher on a small fake bundle: what it starts, what it sets, what it refuses and in which words."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from cecilia.config import openmp_defaults
from portable.target import TARGETS
from tests.portable.fake_bundle import arguments, make, said, start


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make(tmp_path)


def add_model(bundle: Path, name: str = "one.l3r") -> Path:
    path = bundle / "models" / name
    path.write_bytes(b"")
    return path


def refused(done: subprocess.CompletedProcess[str], code: str, status: int) -> str:
    """The one line of a refusal."""
    assert done.returncode == status
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {code}: ")
    return line


def test_the_server_runs_with_what_lies_in_the_folder(bundle: Path) -> None:
    add_model(bundle)
    done = start(bundle / "cecilia-server", "--port", "9000")
    given = arguments(done)
    assert given == [
        *("--inhibit-cache", "--library-path", f"{bundle}/lib", "--argv0", f"{bundle}/bin/python"),
        *(f"{bundle}/python/bin/python3.11", "-S", "-P", "-m", "server", "--port", "9000"),
    ]
    assert "program cecilia-server" in done.stdout
    environment = said(done)
    assert environment["PYTHONHOME"] == f"{bundle}/python"
    assert environment["PYTHONPATH"] == f"{bundle}/app:{bundle}/site"
    assert environment["LC_ALL"] == "C.UTF-8"


def test_thread_settings_stand_before_the_interpreter_starts(bundle: Path) -> None:
    add_model(bundle)
    assert said(start(bundle / "cecilia-server")).items() >= openmp_defaults(platform.machine()).items()


def test_a_thread_setting_of_the_users_stays(bundle: Path) -> None:
    add_model(bundle)
    assert said(start(bundle / "cecilia-server", OMP_WAIT_POLICY="active"))["OMP_WAIT_POLICY"] == "active"


def test_the_converter_and_the_interpreter(bundle: Path) -> None:
    converter = start(bundle / "cecilia-convert", "in.gguf", "--out", "with blank.l3r")
    assert arguments(converter)[-5:] == ["-m", "tools.convert", "in.gguf", "--out", "with blank.l3r"]
    assert "program cecilia-convert" in converter.stdout
    assert arguments(start(bundle / "bin/python", "-c", "pass"))[-4:] == ["-S", "-P", "-c", "pass"]


def test_it_is_found_through_a_link_and_in_a_folder_with_a_blank(tmp_path: Path) -> None:
    (tmp_path / "my boards").mkdir()
    bundle = make(tmp_path / "my boards")
    add_model(bundle)
    (tmp_path / "serve").symlink_to(bundle / "cecilia-server")
    done = start(tmp_path / "serve")
    assert f"{bundle}/lib" in arguments(done)
    assert said(start(tmp_path / "serve"))["OMP_PROC_BIND"] == "false"


def test_a_folder_with_a_colon_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    line = refused(start(make(tmp_path / "a:b") / "cecilia-server"), "bad_folder", 1)
    assert "a:b" in line


def test_the_one_model_is_found(bundle: Path) -> None:
    model = add_model(bundle)
    assert said(start(bundle / "cecilia-server"))["CECILIA_MODEL"] == str(model)


def test_no_model_says_where_it_was_looked_for(bundle: Path) -> None:
    assert f"{bundle}/models" in refused(start(bundle / "cecilia-server"), "model_not_found", 3)


def test_several_models_are_listed(bundle: Path) -> None:
    add_model(bundle, "a.l3r")
    add_model(bundle, "b.l3r")
    line = refused(start(bundle / "cecilia-server"), "several_models", 2)
    assert f"{bundle}/models/a.l3r, {bundle}/models/b.l3r" in line


@pytest.mark.parametrize("flags", [["--model", "x.l3r"], ["--model=x.l3r"]])
def test_a_model_that_is_named_is_not_searched_for(bundle: Path, flags: list[str]) -> None:
    done = start(bundle / "cecilia-server", *flags)
    assert "CECILIA_MODEL" not in said(done)
    assert arguments(done)[-len(flags) :] == flags


def test_a_model_in_the_environment_stays(bundle: Path) -> None:
    add_model(bundle)
    assert said(start(bundle / "cecilia-server", CECILIA_MODEL="/x.l3r"))["CECILIA_MODEL"] == "/x.l3r"


@pytest.mark.parametrize("flag", ["--help", "--version", "--print-config", "--check"])
def test_what_loads_no_model_needs_none(bundle: Path, flag: str) -> None:
    assert arguments(start(bundle / "cecilia-server", flag))[-1] == flag


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    foreign = next(target for target in TARGETS.values() if not target.native)
    bundle = make(tmp_path, foreign)
    line = refused(start(bundle / "cecilia-server"), "wrong_architecture", 6)
    assert line.endswith(f"this bundle is for {foreign.name}, and this machine is {platform.machine()}")


def test_a_runner_is_put_before_the_loader_and_may_be_an_emulator(tmp_path: Path) -> None:
    foreign = next(target for target in TARGETS.values() if not target.native)
    bundle = make(tmp_path, foreign)
    add_model(bundle)
    done = start(bundle / "cecilia-server", CECILIA_RUNNER="nice -n 1")
    assert arguments(done)[-2:] == ["-m", "server"]


@pytest.mark.parametrize("name", ["lib/libc.so.6", "site/numpy/__init__.pyc", "SHA256SUMS"])
def test_a_missing_file_is_named(bundle: Path, name: str) -> None:
    add_model(bundle)
    (bundle / name).unlink()
    line = refused(start(bundle / "cecilia-server"), "damaged_bundle", 1)
    assert line.endswith(f"lacks {name}: unpack the archive again")


def test_a_missing_link_to_the_loader_is_named(bundle: Path) -> None:
    add_model(bundle)
    (bundle / "lib/run/cecilia-server").unlink()
    assert "lacks lib/run/cecilia-server" in refused(start(bundle / "cecilia-server"), "damaged_bundle", 1)


def test_check_compares_every_digest_and_goes_on(bundle: Path) -> None:
    files = len((bundle / "SHA256SUMS").read_text(encoding="utf-8").splitlines())
    done = start(bundle / "cecilia-server", "--check")
    assert done.stdout.startswith(f"ok   bundle   {files} files of {bundle.name}, every digest is right\n")
    assert arguments(done)[-3:] == ["-m", "server", "--check"]


def test_check_refuses_a_flipped_byte(bundle: Path) -> None:
    victim = bundle / "site/numpy/__init__.pyc"
    data = bytearray(victim.read_bytes())
    data[3] ^= 1
    victim.write_bytes(data)
    line = refused(start(bundle / "cecilia-server", "--check"), "damaged_bundle", 1)
    assert "site/numpy/__init__.pyc of " in line
    (bundle / "lib/libc.so.6").write_text("another", encoding="utf-8")
    line = refused(start(bundle / "cecilia-server", "--check"), "damaged_bundle", 1)
    assert "lib/libc.so.6 and 1 more of " in line


def test_a_bundle_may_be_moved(bundle: Path, tmp_path: Path) -> None:
    shutil.move(bundle, tmp_path / "elsewhere")
    add_model(tmp_path / "elsewhere")
    assert f"{tmp_path}/elsewhere/lib" in arguments(start(tmp_path / "elsewhere/cecilia-server"))
