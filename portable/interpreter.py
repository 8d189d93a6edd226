# SPDX-License-Identifier: Apache-2.0
"""An unpacked interpreter of this machine's architecture, run where it lies: it compiles what targets need.

The bundle's byte code and extensions are made by the interpreter the bundle carries, in its native build, so
neither depends on which Python started the builder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from portable.run import run
from portable.target import PYTHON, Target


class Interpreter:
    """The Python in `root` (packages unpacked by `debian.unpack`), of the native `target`."""

    def __init__(self, root: Path, target: Target) -> None:
        libraries = [root / folder / target.triplet for folder in ("lib", "usr/lib")]
        self._command: list[str | Path] = [
            root / "lib" / target.triplet / target.loader,
            "--library-path",
            ":".join(map(str, libraries)),
            root / f"usr/bin/python{PYTHON}",
        ]
        self._environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LC_ALL": "C.UTF-8",
            "PYTHONHOME": str(root / "usr"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",  # the order of a set must not reach a file
        }

    def run(
        self, *words: str | Path, cwd: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> str:
        """What it prints; CeciliaError when it fails."""
        return run([*self._command, *words], cwd=cwd, env={**self._environment, **(environment or {})})
