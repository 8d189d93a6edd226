# SPDX-License-Identifier: Apache-2.0
"""What a figure depends on besides the program: the machine, its memory bandwidth, the memory taken."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import numpy as np

PROBE_BYTES = 512 << 20  # beyond any L3 cache
PROBE_PASSES = 3
NICE = -20


class BandwidthProbe:
    """Reads a large array on one thread; the best of a few passes is what the memory gives now."""

    def __init__(self, nbytes: int = PROBE_BYTES) -> None:
        self._data = np.ones(nbytes // 8, np.int64)

    def gigabytes_per_second(self) -> float:
        """GB/s of the fastest pass: a slow one met a neighbour, and the figures beside it meet it too."""
        best = float("inf")
        for _ in range(PROBE_PASSES):
            start = time.perf_counter()
            self._data.max()
            best = min(best, time.perf_counter() - start)
        return self._data.nbytes / best / 1e9


def raise_priority() -> bool:
    """Run this process and its children first, if allowed; returns whether it is so."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    except PermissionError:
        return False
    return True


def machine() -> str:
    """Processor, core count and kernel, in one line."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = value.strip()
            break
    return f"{model}, {os.cpu_count()} CPUs, Linux {platform.release()}"


def memory_kib(pid: int | str = "self") -> dict[str, int]:
    """VmHWM (the peak), RssAnon and RssFile (now) of a process in KiB; empty when it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return {}
    fields = (line.split() for line in text.splitlines())
    return {f[0][:-1]: int(f[1]) for f in fields if f and f[0] in ("VmHWM:", "RssAnon:", "RssFile:")}
