# SPDX-License-Identifier: Apache-2.0
"""Which CPUs compute, read from sysfs: the usable ones of the fast kinds, one for each physical core.

A region ends when its last thread ends, so a little core with an equal share of the work would make all
others wait for it, and so would two hardware threads of one core. What is read is documented in the kernel's
Documentation/ABI/testing/sysfs-devices-system-cpu and Documentation/admin-guide/cgroup-v2.rst. Nothing on the
machine is changed but the CPUs the calling thread, and with it the team it starts, may run on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cecilia._kernels.threads import MOST
from cecilia.errors import DeviceError

SYSFS = Path("/sys/devices/system/cpu")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")

# Part numbers of MIDR_EL1, implementer Arm (0x41), as in arch/arm64/include/asm/cputype.h.
_ARM = 0x41
_IN_ORDER = {0xD03: "A53", 0xD04: "A35", 0xD05: "A55", 0xD46: "A510", 0xD80: "A520"}
_OUT_OF_ORDER = {
    0xD07: "A57",
    0xD08: "A72",
    0xD09: "A73",
    0xD0A: "A75",
    0xD0B: "A76",
    0xD0D: "A77",
    0xD41: "A78",
    0xD47: "A710",
    0xD4D: "A715",
    0xD81: "A720",
}
# Cores of one kind differ by their silicon: the A76 clusters of an RK3588 by up to 6 per cent in frequency.
# The next kind below has half the capacity or less on every such board.
_FAST_PERCENT = 75


@dataclass(frozen=True, slots=True)
class Cpu:
    """One online CPU this process may run on."""

    number: int
    kind: str  # e.g. "Cortex-A76"; empty where the system does not say, as on x86-64
    in_order: bool
    capacity: int  # relative speed, 1 to 1024; 0 where the system does not say
    core: frozenset[int]  # the hardware threads of its physical core, itself among them


def usable_cpus(allowed: Iterable[int] | None = None, root: Path = SYSFS) -> list[Cpu]:
    """The CPUs of `allowed` (default: those this process may run on) that are online, by number.

    Without `root`, or without what it should hold, every CPU counts as of one kind.
    """
    # The mask of the process, i.e. its first thread: the calling one may have been confined before.
    allowed = os.sched_getaffinity(os.getpid()) if allowed is None else allowed
    online = parse_list(read_text(root / "online"))
    return [_cpu(number, root) for number in sorted(allowed) if not online or number in online]


def computing(cpus: Sequence[Cpu]) -> list[Cpu]:
    """Those of `cpus` (not empty) to compute on: the fast kinds, the first hardware thread of each core."""
    fast = fast_kinds(cpus)
    numbers = {cpu.number for cpu in fast}
    return [cpu for cpu in fast if cpu.number == min(cpu.core & numbers)]


def fast_kinds(cpus: Sequence[Cpu]) -> list[Cpu]:
    """`cpus` without those much slower than the fastest: by core design, where known, and by capacity."""
    fast = [cpu for cpu in cpus if not cpu.in_order] or list(cpus)
    most = max(cpu.capacity for cpu in fast)
    return [cpu for cpu in fast if cpu.capacity * 100 >= most * _FAST_PERCENT]


def default_threads(cpus: Sequence[Cpu], quota: int | None = None) -> int:
    """How many threads to compute with; never more than a `quota` of CPU time or the kernels allow."""
    return min(len(computing(cpus)), MOST if quota is None else quota, MOST)


def confine(threads: int, cpus: Sequence[Cpu]) -> list[int]:
    """Keep the calling thread and those it will start on the fast CPUs; returns all it may then run on.

    Not where all are alike, and not for more threads than fast ones: then somebody asked for the slow ones
    too. They stay within the set, not each on a CPU of its own: beside another process the kernel moves them.
    Raises DeviceError `affinity_refused`.
    """
    fast = [cpu.number for cpu in fast_kinds(cpus)]
    if len(fast) == len(cpus) or threads > len(fast):
        return [cpu.number for cpu in cpus]
    try:
        os.sched_setaffinity(0, fast)
    except OSError as error:
        text = f"the system refuses to run threads on CPUs {format_list(fast)}: {error.strerror}"
        raise DeviceError("affinity_refused", text) from None
    return fast


def cpu_quota(own: Path = OWN_CGROUP, root: Path = CGROUPS) -> int | None:
    """Whole CPUs of the tightest `cpu.max` from this process's cgroup up, at least 1; None without a limit.

    More threads than that would be stopped together for the rest of every period.
    """
    paths = [line.removeprefix("0::") for line in read_text(own).splitlines() if line.startswith("0::")]
    if not paths:
        return None
    folder, limits = root / paths[0].strip("/"), []
    for above in (folder, *folder.parents):
        words = read_text(above / "cpu.max").split()
        if len(words) == 2 and words[0].isdecimal():
            limits.append(max(1, int(words[0]) // int(words[1])))
        if above == root:
            break
    return min(limits, default=None)


def describe(cpus: Sequence[Cpu], quota: int | None = None) -> str:
    """One line: which CPUs compute and what the others are."""
    chosen = computing(cpus)
    others = [cpu for cpu in cpus if cpu not in chosen]
    text = f"{_named(chosen)} compute"
    if others:
        text += f", {_named(others)} do not"
    return text if quota is None else f"{text}; {quota} by the quota of the control group"


def format_list(numbers: Iterable[int]) -> str:
    """Numbers in the kernel's list format: 0-3,6."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def parse_list(text: str) -> frozenset[int]:
    """The inverse of `format_list`; empty for an empty text."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def read_text(path: Path) -> str:
    """A file's text; empty where the system has no such file."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _named(cpus: Sequence[Cpu]) -> str:
    kinds = {cpu.kind: [other.number for other in cpus if other.kind == cpu.kind] for cpu in cpus}
    return ", ".join(f"CPU {format_list(numbers)} {kind}".rstrip() for kind, numbers in kinds.items())


def _cpu(number: int, root: Path) -> Cpu:
    folder = root / f"cpu{number}"
    midr = int(read_text(folder / "regs/identification/midr_el1") or "0", 16)
    part = midr >> 4 & 0xFFF if midr >> 24 & 0xFF == _ARM else 0
    name = _IN_ORDER.get(part) or _OUT_OF_ORDER.get(part)
    kind = f"Cortex-{name}" if name else f"MIDR {midr:#010x}" if midr else ""
    core = parse_list(read_text(folder / "topology/thread_siblings_list")) | {number}
    return Cpu(number, kind, part in _IN_ORDER, int(read_text(folder / "cpu_capacity") or "0"), core)
