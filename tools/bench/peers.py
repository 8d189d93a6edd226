# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.bench.peers`: this engine beside llama.cpp and ik_llama.cpp on the same weights, in turns.

Each round is a bandwidth probe, then each engine in a fresh process, warmed up. Rounds whose probe is under
70 % of the median probe are dropped: a neighbour had the memory then. Medians of the rest are compared; the
ratio is to the faster peer. Rounds may be spread over several runs, which share the file of `--add-to`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from cecilia.engine.recipes import DEFAULT_PROFILE
from cecilia.errors import CeciliaError, UsageError
from tools.bench import engines, ours, report, rounds, system
from tools.bench.engines import Engine, Pair
from tools.bench.random_models import SHAPES, random_pair
from tools.bench.report import spread
from tools.bench.rounds import Round, kept

SMOLLM2 = Pair(ours.MODEL, ours.MODEL.parent / "SmolLM2-135M-Instruct.Q4_1.gguf")
PREFILL, DEPTHS = (128, 512, 2048), (128, 1024, 4096)
PEERS = ("llama.cpp", "ik_llama.cpp")


def table(turns: Sequence[Round], threads: int) -> list[str]:
    """Markdown rows: test, threads, each engine's speeds, our median by the faster peer's."""
    mine, *others = turns[0].speeds
    lines = []
    for test in turns[0].speeds[mine]:
        values = {name: [r.speeds[name][test] for r in turns] for name in (mine, *others)}
        fastest = max(statistics.median(values[name]) for name in others)
        cells = " | ".join(spread(values[name]) for name in (mine, *others))
        lines.append(f"| {test} | {threads} | {cells} | {statistics.median(values[mine]) / fastest:.2f} |")
    return lines


def contenders(args: argparse.Namespace) -> list[Engine]:
    """This engine and the peers that were asked for."""
    made = {
        "llama.cpp": engines.llama_cpp(args.llama_cpp_build),
        "ik_llama.cpp": engines.ik_llama_cpp(args.ik_llama_cpp_build),
    }
    return [engines.Ours(args.profile), *(made[name] for name in args.peers)]


def take_turns(pair: Pair, threads: int, args: argparse.Namespace, field_of: Sequence[Engine]) -> list[Round]:
    """All rounds of one model and number of threads, after those of earlier runs.

    Raises UsageError `other_rounds`.
    """
    probe = system.BandwidthProbe()
    key = f"{pair.gguf.stem}, {threads} threads"
    turns: list[Round] = []
    for number in range(args.rounds):
        turn = Round(probe.gigabytes_per_second())
        for engine in field_of:
            turn.speeds[engine.name] = engine.speeds(pair, threads, args.prefill, args.depths)
        if not turns:
            turns = rounds.earlier(args.add_to, key, turn)
        turns.append(turn)
        if args.add_to:
            rounds.keep(args.add_to, key, turns)
        where = f"{key}, round {number + 1} of {args.rounds}"
        print(f"{where}: probe {turn.probe:.1f} GB/s", file=sys.stderr)
    return turns


def section(pair: Pair, args: argparse.Namespace, field_of: Sequence[Engine]) -> list[str]:
    """One model's facts and table."""
    lines = [f"**{pair.gguf.name}**", ""]
    lines += [f"- {engine.name}: {engine.facts(pair)}" for engine in field_of]
    names = [engine.name for engine in field_of]
    rows = [f"| test | threads | {' | '.join(names)} | ratio |", "|---|---|" + "---|" * (len(names) + 1)]
    for threads in args.threads:
        turns = take_turns(pair, threads, args, field_of)
        good = kept(turns)
        probes = spread([r.probe for r in good])
        lines.append(f"- {threads} threads: {len(good)} of {len(turns)} rounds kept, probe {probes} GB/s")
        rows += table(good, threads)
    return [*lines, "", *rows, ""]


def measure(args: argparse.Namespace, command: str) -> str:
    """Measure everything; one dated section of Markdown."""
    pairs = _pairs(args)
    raised = system.raise_priority()
    field_of = contenders(args)
    facts = [
        f"`{command}`",
        f"priority {'raised' if raised else 'normal'}",
        "tokens/s, min / median / max",
        "ratio: ours to the faster peer",
    ]
    body = [line for pair in pairs for line in section(pair, args, field_of)]
    return report.section(f"beside {' and '.join(args.peers)}", facts, body)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m tools.bench.peers", description="Side by side.")
    found.add_argument(
        "--pair",
        type=Path,
        nargs=2,
        action="append",
        metavar=("FILE.l3r", "FILE.gguf"),
        help="the same weights twice; may be repeated (default: SmolLM2, and the --random ones)",
    )
    found.add_argument(
        "--random",
        nargs="+",
        choices=SHAPES,
        default=[],
        help="models of these shapes with random weights, made on the first use",
    )
    found.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    for name in PEERS:
        option = f"--{name.replace('_', '-').replace('.', '-')}-build"
        found.add_argument(option, type=Path, metavar="DIR", help=f"a built {name}: DIR/bin/llama-bench")
    found.add_argument("--profile", default=DEFAULT_PROFILE)
    found.add_argument("--threads", type=ours.numbers, default=[1, 2], metavar="N,N")
    found.add_argument("--rounds", type=ours.times, default=5)
    found.add_argument(
        "--add-to",
        type=Path,
        metavar="FILE.json",
        help="count the rounds of earlier runs in, which are kept here with this one's",
    )
    found.add_argument("--prefill", type=ours.numbers, default=list(PREFILL), metavar="N,N")
    found.add_argument("--depths", type=ours.numbers, default=list(DEPTHS), metavar="N,N")
    report.add_log_option(found)
    return found


def _pairs(args: argparse.Namespace) -> list[Pair]:
    pairs = [Pair(*given) for given in args.pair] if args.pair else [SMOLLM2]
    for path in (path for pair in pairs for path in (pair.model, pair.gguf)):
        if not path.is_file():
            raise UsageError("no_model", f"{path} is not there: python -m tools.fetch")
    return [*pairs, *(random_pair(name) for name in args.random)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, append to docs/BENCH.md; exit codes are those of cecilia.errors."""
    args = parser().parse_args(argv)
    try:
        text = measure(args, report.command("tools.bench.peers", argv))
    except CeciliaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    report.publish(text, no_log=args.no_log)
    return 0


if __name__ == "__main__":
    sys.exit(main())
