# SPDX-License-Identifier: Apache-2.0
"""Process-wide settings that must stand in the environment before the kernels are loaded."""

from __future__ import annotations

import os
import platform


def openmp_defaults(machine: str) -> dict[str, str]:
    """Environment variables for the thread libraries on a `machine` (as `uname -m` names it)."""
    # libgomp reads these once, when it is loaded. Documented meaning (GNU libgomp manual, "Environment
    # Variables"): OMP_WAIT_POLICY=passive makes waiting threads sleep, active makes them spin;
    # GOMP_SPINCOUNT is the number of spins before sleeping and overrides the policy's default (300,000 when
    # neither is set, 30 billion when active, 0 when passive). About 15 microseconds of spinning bridge most
    # gaps between two parallel regions of a decoding step. Longer spinning gains a few per cent on idle
    # cores, and beside a busy process it burns the time slices that the computing threads then lack
    # (docs/BENCH.md). A spin is a pause instruction, some 140 cycles on x86-64; on Arm it is taken for about
    # 4, which was not measured.
    # OMP_PROC_BIND=false lets the kernel scheduler move threads; binding is done by name, not by accident.
    # numpy's OpenBLAS and the tokenizers library have pools of their own, which we never use: neither is
    # started.
    return {
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "300" if machine == "x86_64" else "10000",
        "OMP_PROC_BIND": "false",
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def set_openmp_environment() -> None:
    """Put the defaults into `os.environ`; a value the user has set is kept.

    Must run before numpy or a kernel module is imported. libgomp reads its variables in a constructor, with
    getenv, and CPython's `os.environ` writes through to the C environment.
    """
    for name, value in openmp_defaults(platform.machine()).items():
        os.environ.setdefault(name, value)
