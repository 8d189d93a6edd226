# SPDX-License-Identifier: Apache-2.0
"""What the system says about the clocks of cores and memory. They are the owner's: told here, never changed.

Documentation/admin-guide/pm/cpufreq.rst and Documentation/ABI/testing/sysfs-class-devfreq of the kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cecilia.engine.cpus import SYSFS, Cpu, format_list, parse_list, read_text

DEVFREQ = Path("/sys/class/devfreq")
_MEMORY = "dmc"  # the memory controller of Rockchip's kernels


def core_clocks(cpus: Iterable[Cpu], root: Path = SYSFS) -> str:
    """Governor and frequencies of these CPUs, alike ones together; empty where none are scaled."""
    wanted = {cpu.number for cpu in cpus}
    groups: dict[str, set[int]] = {}
    for policy in sorted(root.glob("cpufreq/policy*")):
        numbers = parse_list(read_text(policy / "affected_cpus").replace(" ", ",")) & wanted
        if numbers:
            groups.setdefault(_policy(policy), set()).update(numbers)
    return "; ".join(f"CPU {format_list(numbers)} {facts}" for facts, numbers in groups.items())


def memory_clock(root: Path = DEVFREQ) -> str:
    """The same of the memory controller; empty where its clock is fixed or the kernel does not say."""
    folder = root / _MEMORY
    if not folder.is_dir():
        return ""
    governor, now = read_text(folder / "governor"), int(read_text(folder / "cur_freq") or "0")
    frequencies = [int(word) for word in read_text(folder / "available_frequencies").split()]
    return f"governor {governor}, {now // 1_000_000} of {max(frequencies, default=now) // 1_000_000} MHz"


def _policy(folder: Path) -> str:
    """`governor ondemand, 408 to 2304 MHz`, and whether the owner has set a lower top."""
    lowest, highest, top = (
        int(read_text(folder / name) or "0") // 1000
        for name in ("cpuinfo_min_freq", "cpuinfo_max_freq", "scaling_max_freq")
    )
    text = f"governor {read_text(folder / 'scaling_governor')}, {lowest} to {highest} MHz"
    return f"{text}, held at {top} MHz" if 0 < top < highest else text
