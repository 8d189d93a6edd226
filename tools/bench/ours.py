# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.bench.ours [FILE.l3r]`: prefill and decode speed of this engine.

Times cover computing alone: the model is loaded and warm. Prefill n is n tokens into an empty session; decode
n at depth d is n single tokens after d others, as a generation does it. Ids are pseudo-random: speed does not
depend on them.
"""

from __future__ import annotations

from cecilia.config import set_openmp_environment

set_openmp_environment()

import argparse  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, Protocol  # noqa: E402

import numpy as np  # noqa: E402

from cecilia._kernels import isa  # noqa: E402
from cecilia.engine.load import load_runner  # noqa: E402
from cecilia.engine.recipes import DEFAULT_PROFILE  # noqa: E402
from cecilia.errors import CeciliaError  # noqa: E402
from tools.bench import system  # noqa: E402

MODEL = Path(__file__).resolve().parents[2] / "models" / "smollm2-135m-instruct.l3r"
PREFILL = (128, 512, 2048)
DEPTHS = (128, 1024, 2048, 4096)
DECODED = 32
WARM_UP = 16


class Feeder(Protocol):
    """What is timed: `cecilia.engine.runner.Runner`."""

    vocab: int

    def reset(self) -> None:
        """Forget the session."""

    def feed(self, tokens: Sequence[int]) -> Any:
        """Append tokens; logits after the last."""


def tokens(runner: Feeder, n: int) -> list[int]:
    """`n` ids, the same ones each time."""
    ids: list[int] = np.random.default_rng(n).integers(0, runner.vocab, n).tolist()
    return ids


def time_prefill(runner: Feeder, n: int) -> float:
    """Seconds that `n` tokens into an empty session take."""
    ids = tokens(runner, n)
    runner.reset()
    start = time.perf_counter()
    runner.feed(ids)
    return time.perf_counter() - start


def time_decode(runner: Feeder, depth: int, n: int) -> float:
    """Seconds that `n` tokens take one by one behind `depth` others, each the likeliest after the last."""
    runner.reset()
    logits = runner.feed(tokens(runner, depth))
    start = time.perf_counter()
    for _ in range(n):
        logits = runner.feed([int(logits.argmax())])
    return time.perf_counter() - start


def measure(
    runner: Feeder, prefill: Sequence[int], depths: Sequence[int], repeats: int
) -> dict[str, list[float]]:
    """Tokens/s of each repeat, by name: `prefill 128` ..., `decode 128` ..., after a warm-up."""
    time_decode(runner, WARM_UP, WARM_UP)
    found = {f"prefill {n}": [n / time_prefill(runner, n) for _ in range(repeats)] for n in prefill}
    for depth in depths:
        found[f"decode {depth}"] = [DECODED / time_decode(runner, depth, DECODED) for _ in range(repeats)]
    return found


def run(
    model: Path, *, profile: str, threads: int, repeats: int, prefill: Sequence[int], depths: Sequence[int]
) -> dict[str, Any]:
    """Load, measure, and return everything about it as plain values."""
    context = max([*prefill, WARM_UP * 2, *(depth + DECODED for depth in depths)])
    start = time.perf_counter()
    runner = load_runner(model, profile=profile, context=context, threads=threads)
    load_seconds = time.perf_counter() - start
    try:
        start = time.perf_counter()
        time_prefill(runner, 1)
        first_seconds = time.perf_counter() - start
        runner.settle()
        speed = measure(runner, prefill, depths, repeats)
        memory = system.memory_kib()
    finally:
        runner.close()
    return {
        "engine": "cecilia",
        "isa": isa.name(),
        "profile": profile,
        "threads": threads,
        "load_seconds": load_seconds,
        "first_token_seconds": first_seconds,
        "speed": speed,
        "memory_kib": memory,
    }


def numbers(text: str) -> list[int]:
    """A comma-separated list of positive numbers; empty text is an empty list."""
    found = [int(part) for part in text.split(",") if part]
    if any(n < 1 for n in found):
        raise ValueError(text)
    return found


def times(text: str) -> int:
    """How often to do something: a number of at least 1."""
    found = int(text)
    if found < 1:
        raise ValueError(text)
    return found


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m tools.bench.ours", description="Speed of this engine.")
    found.add_argument("model", type=Path, nargs="?", default=MODEL, metavar="FILE.l3r")
    found.add_argument("--threads", type=int, default=2)
    found.add_argument("--profile", default=DEFAULT_PROFILE)
    found.add_argument("--repeats", type=times, default=5)
    found.add_argument("--prefill", type=numbers, default=list(PREFILL), metavar="N,N")
    found.add_argument("--depths", type=numbers, default=list(DEPTHS), metavar="N,N")
    found.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; exit codes are those of cecilia.errors."""
    args = parser().parse_args(argv)
    try:
        found = run(
            args.model,
            profile=args.profile,
            threads=args.threads,
            repeats=args.repeats,
            prefill=args.prefill,
            depths=args.depths,
        )
    except CeciliaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if args.json:
        print(json.dumps(found))
        return 0
    print(f"{found['isa']}, {args.profile}, {args.threads} threads; {system.machine()}")
    print(f"load {found['load_seconds']:.2f} s, first token {found['first_token_seconds'] * 1e3:.0f} ms")
    for name, speeds in found["speed"].items():
        spread = " / ".join(f"{f(speeds):.1f}" for f in (min, statistics.median, max))
        print(f"{name:<14}{spread} tok/s (min / median / max)")
    print("memory " + ", ".join(f"{name} {kib / 1024:.0f} MiB" for name, kib in found["memory_kib"].items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
