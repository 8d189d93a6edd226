# SPDX-License-Identifier: Apache-2.0
"""Refusing work that does not fit into memory, before it starts, with the arithmetic in the message."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cecilia.errors import MemoryLimitError

MEMINFO = Path("/proc/meminfo")
# Left to everything else on the machine: without it, the page cache thrashes before malloc fails.
RESERVE = 256 << 20


def available(meminfo: Path = MEMINFO) -> int:
    """Bytes that can be had without swapping: free ones and caches (MemAvailable)."""
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) << 10
    raise MemoryLimitError("memory_unknown", f"{meminfo} has no MemAvailable")


def fits(nbytes: int) -> bool:
    """Whether `nbytes` more can be had, with the reserve kept free."""
    return nbytes <= available() - RESERVE


def require(needs: Mapping[str, int]) -> None:
    """Check that the sum of the named byte counts fits. Raises MemoryLimitError `insufficient_memory`."""
    free = available()
    total = sum(needs.values())
    if total > free - RESERVE:
        terms = " + ".join(f"{what} {_mib(nbytes)}" for what, nbytes in needs.items())
        raise MemoryLimitError(
            "insufficient_memory",
            f"{terms} = {_mib(total)} needed, {_mib(free)} available less {_mib(RESERVE)} kept free",
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"
