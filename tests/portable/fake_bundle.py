# SPDX-License-Identifier: Apache-2.0
"""A bundle in small: the real launcher and sums, with a loader that prints how it was called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from portable.bundle import set_modes, write_launcher, write_sums
from portable.target import Target, native

# Each argument and the interesting part of the environment, a line each.
_LOADER = """\
#!/bin/sh
echo "program ${0##*/}"
for argument; do echo "argument $argument"; done
env | grep -E '^(OMP_|GOMP_|OPENBLAS_|TOKENIZERS_|PYTHON|CECILIA_|LC_ALL)' | sort
"""


def make(folder: Path, target: Target | None = None) -> Path:
    """A complete small bundle below `folder`, for this machine unless another target is named."""
    target = native() if target is None else target
    bundle = folder / f"cecilia-9.9.9-{target.name}"
    for name in (
        "lib/libc.so.6",
        "app/server/__main__.py",
        "site/numpy/__init__.pyc",
        "python/bin/python3.11",
    ):
        (bundle / name).parent.mkdir(parents=True, exist_ok=True)
        (bundle / name).write_text(f"this is {name}\n", encoding="utf-8")
    (bundle / "models").mkdir()
    (bundle / "lib" / target.loader).write_text(_LOADER, encoding="utf-8")
    write_launcher(bundle, target)
    set_modes(bundle)
    write_sums(bundle)
    return bundle


def start(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program with no setting in the environment but these."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [str(program), *arguments], env={**kept, **environment}, capture_output=True, text=True, check=False
    )


def said(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What the fake loader printed of its environment."""
    assert done.returncode == 0, done.stderr
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line and " " not in line)


def arguments(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The arguments the fake loader got."""
    assert done.returncode == 0, done.stderr
    return [
        line.removeprefix("argument ") for line in done.stdout.splitlines() if line.startswith("argument ")
    ]
