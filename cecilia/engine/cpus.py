# SPDX-License-Identifier: Apache-2.0
"""How many threads to compute with: the usable CPUs of the fastest kind."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from cecilia._kernels.threads import MOST

SYSFS = Path("/sys/devices/system/cpu")


def default_threads(cpus: Iterable[int] | None = None, root: Path = SYSFS) -> int:
    """The number of `cpus` (default: those this process may run on) that share the highest capacity;
    never more than the kernels take.

    Linux gives `cpu_capacity` on boards with big and little cores, and no such file where all are alike. A
    little core with an equal share of the work would make all others wait for it.
    """
    usable = sorted(os.sched_getaffinity(0) if cpus is None else cpus)
    capacities = [_capacity(root / f"cpu{cpu}" / "cpu_capacity") for cpu in usable]
    return min(capacities.count(max(capacities)), MOST)


def _capacity(path: Path) -> int:
    """Relative speed of a CPU, 1 to 1024; 0 when the system does not say."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
