# SPDX-License-Identifier: Apache-2.0
"""What the ELF reader sees, against readelf; and what the audit says of bundles with one fault."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from cecilia._kernels import linear
from cecilia.errors import CeciliaError
from portable import elf
from portable.audit import audit
from portable.collect import add_libraries
from portable.target import Target, native

KERNEL = Path(linear.__file__)

needs_readelf = pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")


@needs_readelf
@pytest.mark.parametrize("path", [KERNEL, Path("/bin/sh").resolve()], ids=lambda path: path.name)
def test_it_reads_what_readelf_reads(path: Path) -> None:
    shown = subprocess.run(["readelf", "-dVW", path], capture_output=True, text=True, check=True).stdout
    found = elf.read(path)
    assert list(found.needed) == re.findall(r"\(NEEDED\).*\[(.+)\]", shown)
    names = {name for names in found.versions.values() for name in names}
    assert names == set(re.findall(r"Name: (\S+)\s+Flags", shown))
    assert found.machine == native().elf_machine


def test_a_file_cut_short_is_no_traceback(tmp_path: Path) -> None:
    data = KERNEL.read_bytes()
    for length in (4, 30, 70, 400):
        (tmp_path / "cut.so").write_bytes(data[:length])
        with pytest.raises(CeciliaError, match=r"^bad_elf: "):
            elf.read(tmp_path / "cut.so")


@pytest.mark.parametrize("at", [4, 5], ids=["32 bit", "big endian"])
def test_another_class_is_refused(tmp_path: Path, at: int) -> None:
    data = bytearray(KERNEL.read_bytes())
    data[at] ^= 3
    (tmp_path / "x.so").write_bytes(data)
    with pytest.raises(CeciliaError, match="no 64-bit little-endian ELF"):
        elf.read(tmp_path / "x.so")


@dataclass
class Small:
    """A bundle of one extension module and what it needs, taken from this machine."""

    folder: Path
    kernel: Path
    target: Target


@pytest.fixture
def small(tmp_path: Path) -> Small:
    kernel = tmp_path / "bundle/app" / KERNEL.name
    kernel.parent.mkdir(parents=True)
    shutil.copy(KERNEL, kernel)
    target = native()
    try:
        add_libraries(tmp_path / "bundle", Path("/"), target)
    except CeciliaError as error:
        pytest.skip(f"this machine keeps its libraries elsewhere than Debian: {error}")
    return Small(tmp_path / "bundle", kernel, target)


def test_a_closed_bundle_has_no_complaints(small: Small) -> None:
    found = audit(small.folder, small.target)
    assert found.complaints == []
    libraries = {path.name for path in (small.folder / "lib").iterdir()}
    assert {"libc.so.6", "libgomp.so.1", "libdl.so.2", small.target.loader} <= libraries
    assert found.binaries == len(libraries) + 1


def test_a_library_that_is_not_inside(small: Small) -> None:
    (small.folder / "lib/libgomp.so.1").unlink()
    (complaint,) = audit(small.folder, small.target).complaints
    assert complaint == f"app/{KERNEL.name} needs libgomp.so.1, which is not inside"


def test_a_binary_of_another_machine(small: Small) -> None:
    data = bytearray(small.kernel.read_bytes())
    data[18:20] = (243).to_bytes(2, "little")  # EM_RISCV
    small.kernel.write_bytes(data)
    (complaint,) = audit(small.folder, small.target).complaints
    assert complaint == f"app/{KERNEL.name} is for machine 243, not {small.target.elf_machine}"


def test_a_glibc_that_is_too_old(small: Small) -> None:
    libc = small.folder / "lib/libc.so.6"
    # The names of every version after 2.3 that it defines are made to be something else.
    newer = re.compile(rb"(?<=\0)G(?=LIBC_2\.(?:[4-9]|\d\d)(?:\.\d+)?\0)")
    libc.write_bytes(newer.sub(b"X", libc.read_bytes()))
    (complaint,) = audit(small.folder, small.target).complaints
    assert re.search(r"asks for glibc 2\.\d+, inside is 2\.3$", complaint)


def test_a_library_no_package_has(small: Small, tmp_path: Path) -> None:
    with pytest.raises(CeciliaError, match=r"no package has \S+, which a binary of the bundle needs"):
        add_libraries(small.folder.parent / "bundle", tmp_path / "empty", _unknown_loader(small.target))


def _unknown_loader(target: Target) -> Target:
    return Target(platform.machine(), target.debian, "ld-none.so.1", target.elf_machine)
