# SPDX-License-Identifier: Apache-2.0
"""Which CPUs of which machine compute, and what is told about their clocks."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cecilia.engine import clocks, cpus
from cecilia.errors import DeviceError
from tests.board import sysfs
from tests.board.sysfs import A55, A76, PI5, RK3576, RK3588, X86_SMT, Core

NO_MIDR = [Core(None, core.capacity) for core in RK3588]
NO_CAPACITY = [Core(core.midr, None) for core in RK3588]
# A device tree without capacities: the kernel then says 1024 everywhere.
FLAT = [Core(core.midr, 1024) for core in RK3588]
ONE_BIG_OFFLINE = [*RK3588[:5], Core(A76, 1004, online=False), *RK3588[6:]]
SIBLING_OFFLINE = [Core(online=False), *X86_SMT[1:]]
MACHINES = {
    "RK3588": (RK3588, None, [4, 5, 6, 7]),
    "RK3588, no MIDR": (NO_MIDR, None, [4, 5, 6, 7]),
    "RK3588, no capacities": (NO_CAPACITY, None, [4, 5, 6, 7]),
    "RK3588, flat capacities": (FLAT, None, [4, 5, 6, 7]),
    "RK3588, one big core offline": (ONE_BIG_OFFLINE, None, [4, 6, 7]),
    "RK3588, container on little and one big": (RK3588, {0, 1, 2, 6}, [6]),
    "RK3588, container on little alone": (RK3588, {1, 2}, [1, 2]),
    "RK3576": (RK3576, None, [4, 5, 6, 7]),
    "RK3568": ([Core(A55, 1024)] * 4, None, [0, 1, 2, 3]),
    "Pi 5": (PI5, None, [0, 1, 2, 3]),
    "three kinds": ([Core(None, 250)] * 4 + [Core(None, 760)] * 3 + [Core(None, 1024)], None, [7]),
    "two fast kinds": (
        [Core(None, 250)] * 4 + [Core(None, 800)] * 3 + [Core(None, 1024)],
        None,
        [4, 5, 6, 7],
    ),
    "x86 SMT": (X86_SMT, None, [0, 1, 2, 3, 4, 5, 6, 7]),
    "x86 SMT, container on second threads": (X86_SMT, {8, 9, 1}, [1, 8]),
    "x86 SMT, a first thread offline": (SIBLING_OFFLINE, None, [1, 2, 3, 4, 5, 6, 7, 8]),
    "a kernel that says nothing": ([Core()] * 3, None, [0, 1, 2]),
}


@pytest.mark.parametrize("name", MACHINES)
def test_the_cpus_that_compute(tmp_path: Path, name: str) -> None:
    cores, allowed, expected = MACHINES[name]
    root = sysfs.write(tmp_path / "cpu", cores)
    usable = cpus.usable_cpus(range(len(cores)) if allowed is None else allowed, root)
    assert [cpu.number for cpu in cpus.computing(usable)] == expected
    assert cpus.default_threads(usable) == len(expected)


def test_no_sysfs_at_all(tmp_path: Path) -> None:
    usable = cpus.usable_cpus({3, 5}, tmp_path / "none")
    assert [cpu.number for cpu in cpus.computing(usable)] == [3, 5]


def test_this_machine() -> None:
    usable = cpus.usable_cpus()
    assert {cpu.number for cpu in usable} == os.sched_getaffinity(os.getpid())
    assert 1 <= cpus.default_threads(usable, cpus.cpu_quota()) <= len(usable)


def test_never_more_threads_than_the_kernels_take(tmp_path: Path) -> None:
    root = sysfs.write(tmp_path / "cpu", [Core()] * 96)
    assert cpus.default_threads(cpus.usable_cpus(range(96), root)) == 64


@pytest.fixture
def confined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """The calls that would have changed where a thread may run."""
    calls: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, mask: calls.append((thread, list(mask))))
    return calls


@pytest.mark.parametrize(
    ("cores", "threads", "mask", "expected"),
    [
        (RK3588, 4, [4, 5, 6, 7], [(0, [4, 5, 6, 7])]),
        (RK3588, 2, [4, 5, 6, 7], [(0, [4, 5, 6, 7])]),
        (RK3588, 6, [0, 1, 2, 3, 4, 5, 6, 7], []),
        (PI5, 4, [0, 1, 2, 3], []),
        (X86_SMT, 8, list(range(16)), []),
    ],
)
def test_the_engine_thread_is_kept_on_fast_cores(
    tmp_path: Path,
    confined: list[tuple[int, list[int]]],
    cores: list[Core],
    threads: int,
    mask: list[int],
    expected: list[tuple[int, list[int]]],
) -> None:
    usable = cpus.usable_cpus(range(len(cores)), sysfs.write(tmp_path / "cpu", cores))
    assert cpus.confine(threads, usable) == mask
    assert confined == expected


def test_a_refused_affinity_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: int, _mask: list[int]) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    usable = cpus.usable_cpus(range(8), sysfs.write(tmp_path / "cpu", RK3588))
    with pytest.raises(DeviceError, match="CPUs 4-7: Operation not permitted") as caught:
        cpus.confine(4, usable)
    assert caught.value.code == "affinity_refused"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, None),
        ({"": "max 100000", "a/b": "max 100000"}, None),
        ({"a/b": "250000 100000"}, 2),
        ({"a/b": "50000 100000"}, 1),
        ({"a": "100000 100000", "a/b": "max 100000"}, 1),
        ({"a": "300000 100000", "a/b": "400000 100000"}, 3),
    ],
)
def test_the_quota_of_a_container(tmp_path: Path, limits: dict[str, str], expected: int | None) -> None:
    """`--cpus` of a container engine becomes cpu.max, here or in a group above."""
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    (tmp_path / "fs/a/b").mkdir(parents=True)
    for group, text in limits.items():
        (tmp_path / "fs" / group / "cpu.max").write_text(f"{text}\n")
    assert cpus.cpu_quota(own, tmp_path / "fs") == expected
    usable = cpus.usable_cpus(range(4), sysfs.write(tmp_path / "cpu", PI5))
    assert cpus.default_threads(usable, expected) == (expected or 4)


def test_a_system_without_unified_groups_has_no_quota(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("4:memory:/x\n1:cpu:/\n")
    assert cpus.cpu_quota(tmp_path / "own", tmp_path) is None


def test_what_check_tells(tmp_path: Path) -> None:
    root = sysfs.write(tmp_path / "cpu", RK3588)
    sysfs.policy(root, "0 1 2 3", "schedutil", 408_000, 1_800_000, 1_800_000)
    sysfs.policy(root, "4 5", "performance", 408_000, 2_352_000, 2_352_000)
    sysfs.policy(root, "6 7", "performance", 408_000, 2_352_000, 1_608_000)
    usable = cpus.usable_cpus(range(8), root)
    assert cpus.describe(usable) == "CPU 4-7 Cortex-A76 compute, CPU 0-3 Cortex-A55 do not"
    assert cpus.describe(usable, 2).endswith("; 2 by the quota of the control group")
    assert clocks.core_clocks(usable, root).split("; ") == [
        "CPU 0-3 governor schedutil, 408 to 1800 MHz",
        "CPU 4-5 governor performance, 408 to 2352 MHz",
        "CPU 6-7 governor performance, 408 to 2352 MHz, held at 1608 MHz",
    ]
    alone = [cpu for cpu in usable if cpu.number == 5]
    assert clocks.core_clocks(alone, root) == "CPU 5 governor performance, 408 to 2352 MHz"
    assert clocks.core_clocks(usable, tmp_path) == ""


def test_the_clock_of_the_memory(tmp_path: Path) -> None:
    assert clocks.memory_clock(tmp_path) == ""
    folder = tmp_path / "dmc"
    folder.mkdir()
    (folder / "governor").write_text("dmc_ondemand\n")
    (folder / "cur_freq").write_text("528000000\n")
    (folder / "available_frequencies").write_text("528000000 1068000000 1560000000 2112000000\n")
    assert clocks.memory_clock(tmp_path) == "governor dmc_ondemand, 528 of 2112 MHz"


@pytest.mark.parametrize("text", ["", "0", "0-3", "0,2-3,7", "4-7"])
def test_lists_of_cpus(text: str) -> None:
    assert cpus.format_list(cpus.parse_list(text)) == text


def test_kinds_by_name(tmp_path: Path) -> None:
    """MIDR_EL1 of an Ampere eMAG (implementer 0x50) has a part number of its own maker."""
    root = sysfs.write(tmp_path / "cpu", [Core(A76), Core(0x503F0002), Core()])
    assert [cpu.kind for cpu in cpus.usable_cpus(range(3), root)] == ["Cortex-A76", "MIDR 0x503f0002", ""]
