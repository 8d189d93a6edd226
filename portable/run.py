# SPDX-License-Identifier: Apache-2.0
"""Programs the builder starts."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from cecilia.errors import CeciliaError

_SHOWN_LINES = 5


def run(
    command: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    """What a command prints that must succeed; CeciliaError `command_missing`, `command_failed`."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise CeciliaError("command_missing", f"{words[0]} is not installed") from None
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        reason = " | ".join(said[-_SHOWN_LINES:]) or f"exit code {done.returncode}"
        raise CeciliaError("command_failed", f"{words[0]} {' '.join(words[1:4])} ...: {reason}")
    return done.stdout
