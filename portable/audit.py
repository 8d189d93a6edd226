# SPDX-License-Identifier: Apache-2.0
"""Holds every binary of a bundle to three rules: of the right machine, needing nothing that is not inside,
and asking for no newer glibc than the one inside."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from portable import elf
from portable.target import Target

LIBRARIES = "lib"
_GLIBC = re.compile(r"GLIBC_(\d+)\.(\d+)")

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found: `complaints` is empty for a good bundle."""

    binaries: int
    highest_glibc: Version
    asked_by: str
    complaints: list[str]


def audit(bundle: Path, target: Target) -> Audit:
    """Read every ELF file below `bundle`. A library counts as inside when the loader will find it there:
    in lib/, or in a folder the file itself names relative to its own ($ORIGIN)."""
    found = {path: elf.read(path) for path in binaries(bundle)}
    inside = {path.name for path in found if path.parent == bundle / LIBRARIES}
    complaints, highest, asked_by = [], (0, 0), "nothing"
    for path, parsed in found.items():
        name = path.relative_to(bundle).as_posix()
        if parsed.machine != target.elf_machine:
            complaints.append(f"{name} is for machine {parsed.machine}, not {target.elf_machine}")
        complaints += [
            f"{name} needs {library}, which is not inside"
            for library in parsed.needed
            if library not in inside and not beside(path, parsed, library, bundle)
        ]
        for version in glibc_versions(parsed):
            if version > highest:
                highest, asked_by = version, name
    provided = _provided(bundle / LIBRARIES / "libc.so.6")
    if highest > provided:
        complaints.append(f"{asked_by} asks for glibc {_shown(highest)}, inside is {_shown(provided)}")
    return Audit(len(found), highest, asked_by, complaints)


def binaries(bundle: Path) -> list[Path]:
    """Every ELF file below `bundle`."""
    return sorted(path for path in bundle.rglob("*") if elf.is_elf(path))


def glibc_versions(parsed: elf.Elf) -> Iterator[Version]:
    """The glibc symbol versions a file asks for."""
    for names in parsed.versions.values():
        for name in names:
            if match := _GLIBC.fullmatch(name.removesuffix(".0")):
                yield int(match[1]), int(match[2])


def beside(path: Path, parsed: elf.Elf, library: str, bundle: Path) -> bool:
    """Whether a file finds a library in a folder it names relative to its own, inside the bundle."""
    for folder in parsed.search:
        if folder.startswith("$ORIGIN"):
            found = Path(folder.replace("$ORIGIN", str(path.parent)), library).resolve()
            if found.is_file() and found.is_relative_to(bundle.resolve()):
                return True
    return False


def _provided(libc: Path) -> Version:
    """The newest version a libc.so.6 defines. Its dynamic strings hold each version's name once."""
    if not libc.is_file():
        return (0, 0)
    names = re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?=\0)", libc.read_bytes())
    return max((int(major), int(minor)) for major, minor in names)


def _shown(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
