# SPDX-License-Identifier: Apache-2.0
"""Folders that look like /sys/devices/system/cpu of machines nobody here has.

MIDR_EL1 values and capacities are those of the cores' manuals and of the mainline device trees
(rk3588-base.dtsi: capacity-dmips-mhz 530 and 1024, rk3576.dtsi: 485 and 1024), scaled by frequency as the
kernel does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

A53, A55, A72, A76 = 0x410FD034, 0x412FD050, 0x410FD083, 0x414FD0B0


@dataclass(frozen=True)
class Core:
    """One CPU of a machine; None where its kernel has no such file."""

    midr: int | None = None
    capacity: int | None = None
    siblings: str | None = None
    online: bool = True


def write(folder: Path, cores: Sequence[Core]) -> Path:
    """Make the folder; an offline CPU has neither registers nor topology, as on a real one."""
    online = [number for number, core in enumerate(cores) if core.online]
    _put(folder / "online", ",".join(map(str, online)))
    for number, core in enumerate(cores):
        own = folder / f"cpu{number}"
        own.mkdir()
        if core.capacity is not None:
            _put(own / "cpu_capacity", str(core.capacity))
        if core.online and core.midr is not None:
            _put(own / "regs/identification/midr_el1", f"{core.midr:#018x}")
        if core.online:
            _put(own / "topology/thread_siblings_list", core.siblings or str(number))
    return folder


def policy(folder: Path, numbers: str, governor: str, lowest: int, highest: int, top: int) -> None:
    """Add a cpufreq policy; frequencies in kHz."""
    own = folder / f"cpufreq/policy{numbers.split()[0]}"
    values = {
        "affected_cpus": numbers,
        "scaling_governor": governor,
        "cpuinfo_min_freq": str(lowest),
        "cpuinfo_max_freq": str(highest),
        "scaling_max_freq": str(top),
    }
    for name, value in values.items():
        _put(own / name, value)


RK3588 = [Core(A55, 406)] * 4 + [Core(A76, 1004)] * 2 + [Core(A76, 1024)] * 2
RK3576 = [Core(A53, 442)] * 4 + [Core(A72, 1024)] * 4
PI5 = [Core(A76, 1024)] * 4
# Eight cores of two hardware threads, numbered as Linux does: the second threads come last.
X86_SMT = [Core(siblings=f"{number % 8},{number % 8 + 8}") for number in range(16)]


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="ascii")
