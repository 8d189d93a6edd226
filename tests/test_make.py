# SPDX-License-Identifier: Apache-2.0
"""The make targets, and the two small programs that prepare .venv."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.requirements import requirements

TARGETS = [
    "run",
    "build",
    "test",
    "test-aarch64",
    "lint",
    "quality",
    "bench",
    "bench-peers",
    "bench-neighbour",
    "bench-quantisations",
    "bench-recipes",
    "bench-memory",
    "bench-conversion",
    "bench-sessions",
    "bench-roofline",
    "bench-long",
    "bench-start",
    "bench-layout",
    "bundle",
    "test-bundle",
    "soak",
    "clean",
]


def make(root: Path, *arguments: str) -> str:
    """Return what a make of its own prints: not that of the make which may have started the tests."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    done = subprocess.run(
        ["make", *arguments], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_bare_make_lists_the_targets(root: Path) -> None:
    assert re.findall(r"^  ([a-z0-9-]+) +\S", make(root), re.M) == TARGETS


@pytest.mark.parametrize(
    ("arguments", "fetches"),
    [("", True), ("--port 9000", True), ("--model-id x", True), ("--model x", False), ("--model=x", False)],
)
def test_a_model_of_ones_own_needs_no_default_model(root: Path, arguments: str, fetches: bool) -> None:
    shown = make(root, "-n", "run", "MODEL=no/such.l3r", f"ARGS={arguments}")
    assert ("-m tools.fetch" in shown) == fetches
    assert shown.rstrip().endswith(f"-m server {arguments}".rstrip())


def test_requirements_of_groups() -> None:
    assert any(line.startswith("h11") for line in requirements(["run"]))
    both = requirements(["build", "dev"])
    assert len(both) == len(set(both))
    assert any(line.startswith("pytest>") for line in both)
    with pytest.raises(KeyError):
        requirements(["no-such-group"])


def test_a_missing_compiler_is_named_in_one_line(root: Path) -> None:
    command = [sys.executable, str(root / "tools" / "preflight.py")]
    done = subprocess.run(command, env={"PATH": "/nonexistent"}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"missing: .*\bgcc .*sudo apt install .*\bgcc\)\n", done.stderr)
