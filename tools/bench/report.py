# SPDX-License-Identifier: Apache-2.0
"""What every bench does with its result: a dated section of Markdown, printed and added to docs/BENCH.md."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools.bench import system

LOG = Path(__file__).resolve().parents[2] / "docs" / "BENCH.md"


def add_log_option(parser: argparse.ArgumentParser) -> None:
    """The option that `publish` is given."""
    parser.add_argument("--no-log", action="store_true", help="do not append to docs/BENCH.md")


def command(module: str, argv: Sequence[str] | None) -> str:
    """The command line as it can be repeated; of absolute paths, which say nothing elsewhere, the names."""
    given = sys.argv[1:] if argv is None else argv
    parts = (Path(part).name if part.startswith("/") else part for part in given if part != "--no-log")
    return " ".join([f"python -m {module}", *parts])


def section(title: str, facts: Sequence[str], body: Sequence[str]) -> str:
    """A heading with the time, one paragraph of facts and this machine's, then `body`, lines of Markdown."""
    now = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    return "\n".join([f"### {now} UTC, {title}", "", "; ".join([*facts, system.machine()]), "", *body, ""])


def publish(text: str, *, no_log: bool) -> None:
    """Print a section and, unless told not to, append it to the log."""
    print(text)
    if not no_log:
        with LOG.open("a", encoding="utf-8") as log:
            log.write("\n" + text)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Minimum / median / maximum."""
    return " / ".join(f"{f(values):.{digits}f}" for f in (min, statistics.median, max))
