# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.bench.neighbour`: decoding with two threads while another process burns one core.

Everything runs at normal priority. Each round times every engine undisturbed, with one thread and with two,
then with two beside a process that never sleeps. A good engine falls to the rate of one thread, not below.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cecilia.engine.recipes import DEFAULT_PROFILE
from cecilia.errors import CeciliaError
from tools.bench import engines, ours, report
from tools.bench.engines import Engine
from tools.bench.peers import SMOLLM2
from tools.bench.report import spread

DEPTH = 128
TEST = f"decode {DEPTH}"
CASES = ("1 thread", "2 threads", "2 threads, disturbed")
BUSY_LOOP = [sys.executable, "-c", "while True: pass"]

Rates = dict[str, list[float]]
"""Tokens/s of each round, by case."""


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """A process that never sleeps, for as long as the block runs."""
    process = subprocess.Popen(BUSY_LOOP)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def one_round(field_of: Sequence[Engine], rates: dict[str, Rates]) -> None:
    """Add one rate of each engine in each case."""

    def time_one(engine: Engine, case: str, threads: int) -> None:
        found = engine.speeds(SMOLLM2, threads, [], [DEPTH])[TEST]
        rates[engine.name].setdefault(case, []).append(found)

    for engine in field_of:
        time_one(engine, CASES[0], 1)
        time_one(engine, CASES[1], 2)
    for engine in field_of:
        with busy_neighbour():
            time_one(engine, CASES[2], 2)


def table(rates: dict[str, Rates]) -> list[str]:
    """Markdown: each engine's rates, and its disturbed median by its undisturbed one of a single thread."""
    rows = [f"| engine | {' | '.join(CASES)} | disturbed / 1 thread |", "|---" * (len(CASES) + 2) + "|"]
    for name, found in rates.items():
        alone, _, disturbed = (statistics.median(found[case]) for case in CASES)
        cells = " | ".join(spread(found[case]) for case in CASES)
        rows.append(f"| {name} | {cells} | {disturbed / alone:.2f} |")
    return rows


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m tools.bench.neighbour", description="Beside a busy process."
    )
    for name in ("llama-cpp", "ik-llama-cpp"):
        found.add_argument(f"--{name}-build", type=Path, metavar="DIR", help="DIR/bin/llama-bench is built")
    found.add_argument("--rounds", type=ours.times, default=5)
    report.add_log_option(found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, append to docs/BENCH.md; exit codes are those of cecilia.errors."""
    args = parser().parse_args(argv)
    field_of: list[Engine] = [
        engines.Ours(DEFAULT_PROFILE),
        engines.llama_cpp(args.llama_cpp_build),
        engines.ik_llama_cpp(args.ik_llama_cpp_build),
    ]
    rates: dict[str, Rates] = {engine.name: {} for engine in field_of}
    try:
        for number in range(args.rounds):
            one_round(field_of, rates)
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    except CeciliaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    facts = [
        f"`{report.command('tools.bench.neighbour', argv)}`",
        f"SmolLM2 Q4_1, {TEST}, {args.rounds} rounds, all at normal priority",
        "tokens/s, min / median / max",
    ]
    report.publish(report.section("beside a busy process", facts, table(rates)), no_log=args.no_log)
    return 0


if __name__ == "__main__":
    sys.exit(main())
