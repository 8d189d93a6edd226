# SPDX-License-Identifier: Apache-2.0
"""What libgomp has read of its settings by the time a kernel can run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.make_tiny import make_tiny


@pytest.mark.parametrize(
    ("given", "policy", "spins"),
    [({}, "PASSIVE", None), ({"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "77"}, "ACTIVE", "77")],
)
def test_openmp_settings_stand_before_libgomp_reads_them(
    tmp_path: Path, given: dict[str, str], policy: str, spins: str | None
) -> None:
    """It is loaded with the model's kernels. OMP_DISPLAY_ENV makes it print what it took, once."""
    model = tmp_path / "tiny.l3r"
    make_tiny(model, quant="q4_32", seed=1)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-m", "server", "--check", "--port", "0", "--model", str(model)]
    environment = {**kept, "OMP_DISPLAY_ENV": "verbose", **given}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = dict(re.findall(r"(\w+) = '(\S+)'", done.stderr))
    assert found["OMP_WAIT_POLICY"] == policy
    assert found["OMP_PROC_BIND"] == "FALSE"
    assert found["GOMP_SPINCOUNT"] in ({spins} if spins else {"300", "10000"})
