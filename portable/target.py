# SPDX-License-Identifier: Apache-2.0
"""The architectures a bundle can be made for."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from cecilia.errors import UsageError

PYTHON = "3.11"
"""The interpreter of every bundle: Debian 12's, and the newest most vendor wheels are made for."""

CPYTHON = "cp" + PYTHON.replace(".", "")
# The bundled glibc is newer than all of these. pip takes only the tags it is given, so each is named.
_OLDEST_MANYLINUX, _NEWEST_MANYLINUX = 17, 34


@dataclass(frozen=True, slots=True)
class Target:
    """One architecture by the names different tools give it."""

    name: str  # `uname -m`, and the suffix of wheels
    debian: str
    loader: str
    elf_machine: int  # e_machine, in <elf.h> EM_*

    @property
    def triplet(self) -> str:
        """Debian's multiarch name, also the prefix of the cross tools."""
        return f"{self.name}-linux-gnu"

    @property
    def native(self) -> bool:
        """Whether this machine is of the architecture."""
        return self.name == platform.machine()

    def tool(self, name: str) -> str:
        """The command of a compiler or binutils program for this architecture."""
        return name if self.native else f"{self.triplet}-{name}"

    @property
    def wheel_platforms(self) -> list[str]:
        """Platform tags of wheels that run on the bundled glibc."""
        versions = range(_OLDEST_MANYLINUX, _NEWEST_MANYLINUX + 1)
        return [f"manylinux_2_{minor}_{self.name}" for minor in versions] + [f"manylinux2014_{self.name}"]


TARGETS = {
    target.name: target
    for target in (
        Target("x86_64", debian="amd64", loader="ld-linux-x86-64.so.2", elf_machine=62),
        Target("aarch64", debian="arm64", loader="ld-linux-aarch64.so.1", elf_machine=183),
    )
}


def target(name: str) -> Target:
    """The target called `name`; UsageError `unknown_architecture`."""
    if name not in TARGETS:
        raise UsageError("unknown_architecture", f"no bundle for {name!r}, only for {', '.join(TARGETS)}")
    return TARGETS[name]


def native() -> Target:
    """The target this machine is; UsageError `unknown_architecture`."""
    return target(platform.machine())
