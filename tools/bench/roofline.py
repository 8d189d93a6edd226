# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.bench.roofline [FILE.l3r ...]`: where the time of a step goes, beside what is possible.

For decoding at a depth and for a prefill, each kind of kernel's time, the bytes it must read and the
multiply-adds it must do, hence its rates; beside them the peaks of this machine, by peaks.c. Dense models.
"""

from __future__ import annotations

from cecilia.config import set_openmp_environment

set_openmp_environment()

import argparse  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections import defaultdict  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402
from unittest import mock  # noqa: E402

import numpy as np  # noqa: E402

from cecilia._kernels import isa  # noqa: E402
from cecilia.arch import architecture, dense  # noqa: E402
from cecilia.engine.load import load_runner  # noqa: E402
from cecilia.engine.recipes import DEFAULT_PROFILE, PROFILES  # noqa: E402
from cecilia.engine.runner import Runner  # noqa: E402
from cecilia.errors import CeciliaError  # noqa: E402
from cecilia.state.pages import POSITIONS  # noqa: E402
from tools.bench import ours, report, system  # noqa: E402

PEAKS = Path(__file__).with_name("peaks.c")
DEPTHS, PREFILL = (128, 4096), (512,)
STEPS = 16  # tokens of a decode measurement

# Parts of tensor names, by the attribute of a dense layer that computes with them.
LINEARS = {
    "qkv": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    "o": ("o_proj.weight",),
    "gate_up": ("gate_proj.weight", "up_proj.weight"),
    "down": ("down_proj.weight",),
}
POINTWISE = ("rmsnorm", "swiglu", "rmsnorm_heads", "add_bias")


@dataclass(frozen=True)
class Peaks:
    """GB/s read from memory and int8 G multiply-adds/s."""

    bandwidth: float
    products: float


@dataclass
class Work:
    """What a kind of kernel does in one measurement: seconds, bytes it must read, multiply-adds."""

    seconds: float = 0.0
    nbytes: float = 0.0
    products: float = 0.0


def measure_peaks(threads: int) -> Peaks:
    """Compile and run peaks.c. Raises CeciliaError `tool_failed`."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "peaks"
        try:
            compile_it = ["gcc", "-O3", "-march=native", "-fopenmp", "-o", str(program), str(PEAKS)]
            subprocess.run(compile_it, check=True, capture_output=True)
            done = subprocess.run([program, str(threads)], check=True, capture_output=True, text=True)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            raise CeciliaError("tool_failed", f"peaks.c: {error}") from error
    bandwidth, products, _ = done.stdout.split()
    return Peaks(float(bandwidth), float(products))


class Stopwatch:
    """Times calls by kind; what it wraps keeps every other attribute."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def around(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, timed."""
        clock = time.perf_counter

        def timed(*args: Any, **options: Any) -> Any:
            start = clock()
            found = call(*args, **options)
            self.seconds[kind] += clock() - start
            return found

        return timed


@contextmanager
def watching(runner: Runner, watch: Stopwatch) -> Iterator[None]:
    """Time the parts of every layer, the head and the pointwise kernels of a dense model."""
    model: Any = runner.session.model
    with mock.patch.multiple(
        dense, **{name: watch.around("norms, activations", getattr(dense, name)) for name in POINTWISE}
    ):
        for layer in model._layers:
            for part in (*LINEARS, "attention"):
                setattr(layer, part, watch.around(part, getattr(layer, part)))
        model._head = watch.around("head", model._head)
        yield


def required(runner: Runner, tokens: int, depth: int, calls: int, profile: str) -> dict[str, Work]:
    """Bytes and multiply-adds of `calls` forward passes of `tokens` each, the first behind `depth` others.

    Weights are read once a pass; a pass reads the cache of all positions before and in it.
    """
    file = runner.file
    spec: Any = architecture(file.metadata["architecture"]).spec_from(file.metadata["hyper"])
    work = {name: Work() for name in (*LINEARS, "attention", "head", "norms, activations")}
    head = dense.EMBED if spec.tied else dense.HEAD
    for entry in file.tensors.values():
        kind = "head" if entry.name == head else _linear_of(entry.name)
        if kind is not None:
            passes = calls * (1 if kind == "head" else tokens)
            work[kind].nbytes += calls * entry.nbytes
            work[kind].products += passes * entry.rows * entry.cols
    seen = np.arange(depth + 1, depth + 1 + calls * tokens)  # positions each token attends to
    page = dense.page_bytes(spec, PROFILES[profile])
    work["attention"].nbytes = float(seen[tokens - 1 :: tokens].sum()) * page / POSITIONS
    work["attention"].products = 2.0 * spec.layers * spec.heads * spec.head_dim * float(seen.sum())
    return work


def _linear_of(name: str) -> str | None:
    return next((kind for kind, parts in LINEARS.items() if name.endswith(parts)), None)


def decode(runner: Runner, depth: int, profile: str) -> dict[str, Work]:
    """STEPS single tokens behind `depth` others."""
    runner.reset()
    runner.feed(ours.tokens(runner, depth))
    return _timed(runner, lambda: [runner.feed([5]) for _ in range(STEPS)], 1, depth, STEPS, profile)


def prefill(runner: Runner, n: int, profile: str) -> dict[str, Work]:
    """`n` tokens, at most one chunk, into an empty session."""
    runner.reset()
    return _timed(runner, lambda: runner.feed(ours.tokens(runner, n)), n, 0, 1, profile)


def _timed(
    runner: Runner, run: Callable[[], Any], tokens: int, depth: int, calls: int, profile: str
) -> dict[str, Work]:
    watch = Stopwatch()
    with watching(runner, watch):
        start = time.perf_counter()
        run()
        whole = time.perf_counter() - start
    work = required(runner, tokens, depth, calls, profile)
    for kind, seconds in watch.seconds.items():
        work[kind].seconds = seconds
    work["everything else"] = Work(whole - sum(watch.seconds.values()))
    total = Work(whole, sum(w.nbytes for w in work.values()), sum(w.products for w in work.values()))
    return {**work, "all": total}


def rows(title: str, work: dict[str, Work], steps: int, peaks: Peaks) -> Iterator[str]:
    """Of the Markdown table, per step."""
    for kind, found in work.items():
        yield (
            f"| {title} | {kind} | {1e3 * found.seconds / steps:.2f} "
            f"| {found.nbytes / steps / 1e6:.1f} | {_rate(found.nbytes, found.seconds, peaks.bandwidth)} "
            f"| {found.products / steps / 1e6:.0f} | {_rate(found.products, found.seconds, peaks.products)} |"
        )


def _rate(amount: float, seconds: float, peak: float) -> str:
    """Giga a second, and the share of the peak."""
    if not amount or not seconds:
        return ""
    rate = amount / seconds / 1e9
    return f"{rate:.1f} ({rate / peak:.0%})"


def section(path: Path, threads: int, peaks: Peaks, profile: str) -> Iterator[str]:
    """The table of one model."""
    limits = f"{peaks.bandwidth:.1f} GB/s, {peaks.products:.0f} GMAC/s"
    yield f"**{path.stem}, {threads} threads**; peaks: {limits}"
    yield ""
    yield "| step | kernel | ms | MB | GB/s (of peak) | M multiply-adds | GMAC/s (of peak) |"
    yield "|---|---|---|---|---|---|---|"
    for kind, sizes in ((decode, DEPTHS), (prefill, PREFILL)):
        for size in sizes:
            # The wrappers stay on what they wrap, so each measurement has a model of its own.
            runner = load_runner(path, profile=profile, threads=threads)
            try:
                runner.settle()
                ours.time_decode(runner, ours.WARM_UP, ours.WARM_UP)
                title = f"{kind.__name__} {size}"
                yield from rows(title, kind(runner, size, profile), STEPS if kind is decode else 1, peaks)
            finally:
                runner.close()
    yield ""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m tools.bench.roofline", description="Where the time goes.")
    found.add_argument("models", type=Path, nargs="*", default=[ours.MODEL], metavar="FILE.l3r")
    found.add_argument("--threads", type=ours.numbers, default=[1, 2], metavar="N,N")
    found.add_argument("--profile", default=DEFAULT_PROFILE)
    report.add_log_option(found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, append to docs/BENCH.md; exit codes are those of cecilia.errors."""
    args = parser().parse_args(argv)
    raised = system.raise_priority()
    facts = [
        f"`{report.command('tools.bench.roofline', argv)}`",
        f"{isa.name()}, {args.profile}",
        f"priority {'raised' if raised else 'normal'}",
    ]
    body: list[str] = []
    try:
        for path in args.models:
            for threads in args.threads:
                body += section(path, threads, measure_peaks(threads), args.profile)
    except CeciliaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    report.publish(report.section("where the time goes", facts, body), no_log=args.no_log)
    return 0


if __name__ == "__main__":
    sys.exit(main())
