# SPDX-License-Identifier: Apache-2.0
"""The vendor's package inside a bundle, on an empty machine, with a stand-in for the vendor's runtime.

Needs a bundle built with `--with-rknnlite` (`make test-bundle ARCH=aarch64 ARGS=--with-rknnlite`), and root.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from portable.machine import Machine
from portable.target import TARGETS
from portable.verify import empty_machine

AARCH64 = TARGETS["aarch64"]
BOARD = "board"  # the folder in which the emulator looks first for every absolute path
_PROGRAM = """\
import numpy as np
from rknnlite.api import RKNNLite
npu = RKNNLite()
assert npu.load_rknn("/model.rknn") == 0
assert npu.init_runtime(core_mask=RKNNLite.NPU_CORE_0) == 0
for factor in (1, 2):
    x = np.arange(8, dtype=np.float32)[None] * factor
    (y,) = npu.inference(inputs=[x])
    print("result", *y.ravel())
npu.release()
"""


@pytest.fixture
def bundle(root: Path) -> Path:
    found = sorted((root / "portable/dist").glob("cecilia-*-aarch64-rknnlite"))
    if not found:
        pytest.skip("no bundle with rknn-toolkit-lite2 was built")
    if os.geteuid() != 0:
        pytest.skip("only root may chroot")
    return found[-1]


@pytest.fixture
def machine(root: Path) -> Iterator[Machine]:
    with empty_machine(AARCH64, root / "build/portable") as machine:
        yield machine


def make_board(root: Path) -> None:
    """Plant what the package probes: the SoC's name, the NPU's device file and the runtime."""
    files = {
        "proc/device-tree/compatible": b"acme,board\0rockchip,rk3588\0",
        "dev/dri/renderD129": b"",
    }
    for name, content in files.items():
        (root / BOARD / name).parent.mkdir(parents=True)
        (root / BOARD / name).write_bytes(content)
    (root / "model.rknn").write_bytes(b"any file will do")
    library = root / BOARD / "usr/lib/librknnrt.so"
    library.parent.mkdir(parents=True)
    source = Path(__file__).with_name("stub_rknnrt.c")
    flags = ["-O1", "-shared", "-fPIC", "-Wall", "-Wno-unused-parameter"]
    subprocess.run([AARCH64.tool("gcc"), *flags, "-o", library, source], check=True)


def test_the_package_runs_on_a_stand_in_runtime(bundle: Path, machine: Machine) -> None:
    make_board(machine.root)
    runner = f"{machine.runner} -L /{BOARD}"
    done = machine.run(bundle, ["/opt/bundle/bin/python", "-c", _PROGRAM], {"CECILIA_RUNNER": runner})
    assert done.returncode == 0, done.stderr
    results = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("result ")]
    # 0 + 1 + ... + 7 = 28
    assert results == [["28.0", "56.0", "84.0", "112.0"], ["56.0", "112.0", "168.0", "224.0"]]
    assert "stub: 2 runs, 0 contexts left open" in done.stderr


def test_without_a_runtime_it_says_so_and_crashes_nothing(bundle: Path, machine: Machine) -> None:
    steps = ("from rknnlite.api import RKNNLite", "n = RKNNLite()", "n.load_rknn('/model.rknn')")
    program = "; ".join([*steps, "print(n.init_runtime())"])
    (machine.root / "model.rknn").write_bytes(b"x")
    done = machine.run(bundle, ["/opt/bundle/bin/python", "-c", program])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "-1"


def test_no_vendor_runtime_is_inside(bundle: Path) -> None:
    assert [path for path in bundle.rglob("*") if "rknnrt" in path.name] == []
