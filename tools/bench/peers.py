# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.bench.peers`: this engine beside llama.cpp on the same weights, in turns.

Each round is a bandwidth probe, then each engine in a fresh process, warmed up. Rounds whose probe is under
70 % of the median probe are dropped: a neighbour had the memory then. Medians of the rest are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cecilia.engine.load import DEFAULT_PROFILE
from cecilia.errors import CeciliaError, UsageError
from tools.bench import ours, system
from tools.bench.peer_build import program

ROOT = Path(__file__).resolve().parents[2]
LOG = ROOT / "docs" / "BENCH.md"
LEAST_PROBE = 0.7
SAMPLE_SECONDS = 0.05

Speeds = dict[str, float]


@dataclass(frozen=True)
class Finished:
    """A process that ended well: its output, how long it ran, its peak memory in KiB."""

    stdout: str
    stderr: str
    seconds: float
    peak_kib: dict[str, int]


@dataclass
class Round:
    """One turn of all engines."""

    probe: float
    speeds: dict[str, Speeds] = field(default_factory=dict)


def watch(command: Sequence[str]) -> Finished:
    """Run a command and sample its memory. Raises CeciliaError `bench_failed`, with how it ended."""
    peak: dict[str, int] = {}
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT)
        while process.poll() is None:
            for name, kib in system.memory_kib(process.pid).items():
                peak[name] = max(kib, peak.get(name, 0))
            time.sleep(SAMPLE_SECONDS)
        seconds = time.perf_counter() - start
        out.seek(0)
        err.seek(0)
        texts = out.read(), err.read()
    if process.returncode:
        last = (texts[1].strip().splitlines() or [""])[-1]
        raise CeciliaError("bench_failed", f"{command[0]} ended with {process.returncode}: {last}")
    return Finished(*texts, seconds, peak)


def run_ours(
    args: argparse.Namespace, threads: int, *, prefill: Sequence[int], depths: Sequence[int]
) -> Finished:
    """One fresh process of this engine."""
    lists = [f"--{name}={','.join(map(str, v))}" for name, v in (("prefill", prefill), ("depths", depths))]
    command = [sys.executable, "-m", "tools.bench.ours", str(args.model), "--json", "--repeats=1", *lists]
    return watch([*command, f"--threads={threads}", f"--profile={args.profile}"])


def run_peer(args: argparse.Namespace, threads: int, *extra: str) -> Finished:
    """One fresh llama-bench; its libraries are the ones beside it."""
    bench = program(args.peer_build)
    start = ["env", f"LD_LIBRARY_PATH={bench.parent}", str(bench), "-m", str(args.gguf)]
    return watch([*start, "-t", str(threads), "-r", "1", "-o", "jsonl", *extra])


def peer_speeds(stdout: str) -> Speeds:
    """Tokens/s by the names of tools.bench.ours, from llama-bench's JSON lines."""
    found = {}
    for line in stdout.splitlines():
        row = json.loads(line)
        name = f"prefill {row['n_prompt']}" if row["n_prompt"] else f"decode {row['n_depth']}"
        found[name] = float(row["samples_ts"][0])
    return found


def one_round(args: argparse.Namespace, threads: int, probe: system.BandwidthProbe) -> Round:
    """Probe, ours, the peer's prefill, the peer's decode."""
    found = Round(probe.gigabytes_per_second())
    mine = json.loads(run_ours(args, threads, prefill=args.prefill, depths=args.depths).stdout)
    found.speeds["ours"] = {name: values[0] for name, values in mine["speed"].items()}
    lengths, depths = (",".join(map(str, values)) for values in (args.prefill, args.depths))
    peer = run_peer(args, threads, "-p", lengths, "-n", "0").stdout
    peer += run_peer(args, threads, "-p", "0", "-n", str(ours.DECODED), "-d", depths).stdout
    found.speeds["llama.cpp"] = peer_speeds(peer)
    return found


def kept(rounds: Sequence[Round]) -> list[Round]:
    """The rounds whose probe reached 70 % of the median one."""
    limit = LEAST_PROBE * statistics.median(r.probe for r in rounds)
    return [r for r in rounds if r.probe >= limit]


def table(rounds: Sequence[Round], threads: int) -> list[str]:
    """Markdown rows: test, threads, both medians with their spread, the ratio of the medians."""
    lines = []
    for name in rounds[0].speeds["ours"]:
        mine, peer = ([r.speeds[engine][name] for r in rounds] for engine in ("ours", "llama.cpp"))
        ratio = statistics.median(mine) / statistics.median(peer)
        lines.append(f"| {name} | {threads} | {_spread(mine)} | {_spread(peer)} | {ratio:.2f} |")
    return lines


def _spread(values: Sequence[float]) -> str:
    return " / ".join(f"{f(values):.1f}" for f in (min, statistics.median, max))


def facts(args: argparse.Namespace) -> list[str]:
    """What each engine really used, its load time and its memory: one process of each, one token."""
    mine = run_ours(args, 2, prefill=[1], depths=[])
    told: dict[str, Any] = json.loads(mine.stdout)
    peer = run_peer(args, 2, "-p", "1", "-n", "0", "--no-warmup", "-v")
    # Loading says which kind of memory each weight went to; AMX has one of its own.
    buffers = {line.split()[1] for line in peer.stderr.splitlines() if "model buffer size" in line}
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    has = [name for name in ("avx2", "avx512f", "avx512_vnni", "amx_int8") if name in flags]
    amx = "with" if "AMX" in " ".join(buffers) else "without"
    return [
        f"- ours: {told['isa']}, {told['profile']}; load {told['load_seconds']:.2f} s, "
        f"process {mine.seconds:.1f} s; {_memory(mine.peak_kib)}",
        f"- llama.cpp: native build on a CPU with {' '.join(has)}, {amx} AMX weights; "
        f"process {peer.seconds:.1f} s; {_memory(peer.peak_kib)}",
    ]


def _memory(peak: dict[str, int]) -> str:
    named = (("VmHWM", "peak"), ("RssAnon", "anonymous"), ("RssFile", "file"))
    return "memory " + ", ".join(f"{label} {peak.get(name, 0) / 1024:.0f} MiB" for name, label in named)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m tools.bench.peers", description="Side by side.")
    found.add_argument("--model", type=Path, default=ours.MODEL, metavar="FILE.l3r")
    found.add_argument("--gguf", type=Path, default=ours.MODEL.parent / "SmolLM2-135M-Instruct.Q4_1.gguf")
    found.add_argument(
        "--peer-build", type=Path, metavar="DIR", help="a built llama.cpp: DIR/bin/llama-bench"
    )
    found.add_argument("--profile", default=DEFAULT_PROFILE)
    found.add_argument("--threads", type=ours.numbers, default=[1, 2], metavar="N,N")
    found.add_argument("--rounds", type=int, default=5)
    found.add_argument("--prefill", type=ours.numbers, default=list(ours.PREFILL), metavar="N,N")
    found.add_argument("--depths", type=ours.numbers, default=list(ours.DEPTHS), metavar="N,N")
    found.add_argument("--no-log", action="store_true", help="do not append to docs/BENCH.md")
    return found


def report(args: argparse.Namespace, command: str) -> str:
    """Measure everything; one dated section of Markdown."""
    first = system.raise_priority()
    program(args.peer_build)
    lines = [
        f"### {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, beside llama.cpp",
        "",
        f"`{command}`; {system.machine()}; priority {'raised' if first else 'normal'}; "
        "tokens/s, min / median / max",
        "",
        *facts(args),
    ]
    rows = ["", "| test | threads | ours | llama.cpp | ratio |", "|---|---|---|---|---|"]
    for threads in args.threads:
        probe = system.BandwidthProbe()
        rounds = []
        for number in range(args.rounds):
            rounds.append(one_round(args, threads, probe))
            print(
                f"round {number + 1} of {args.rounds}, {threads} threads: probe {rounds[-1].probe:.1f} GB/s"
            )
        good = kept(rounds)
        probes = _spread([r.probe for r in good])
        lines.append(
            f"- {threads} threads: {len(good)} of {len(rounds)} rounds kept, probe {probes} GB/s (1 thread)"
        )
        rows += table(good, threads)
    return "\n".join([*lines, *rows, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, append to docs/BENCH.md; exit codes are those of cecilia.errors."""
    args = parser().parse_args(argv)
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        if args.rounds < 1:
            raise UsageError("invalid_rounds", f"--rounds {args.rounds}: at least 1")
        if not args.gguf.is_file():
            raise UsageError("no_gguf", f"{args.gguf} is not there: python -m tools.fetch")
        text = report(args, " ".join(["python -m tools.bench.peers", *_public(given)]))
    except CeciliaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(text)
    if not args.no_log:
        with LOG.open("a", encoding="utf-8") as log:
            log.write("\n" + text)
    return 0


def _public(given: Sequence[str]) -> list[str]:
    """The options without absolute paths, which say nothing on another machine."""
    return [Path(part).name if part.startswith("/") else part for part in given]


if __name__ == "__main__":
    sys.exit(main())
