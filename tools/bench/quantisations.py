# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.bench.quantisations`: what each weight quantisation of the default model costs and brings.

Every one is held against the file's own dequantised weights in f32: perplexity, and KL divergence at every
eighth position, of the rows of a golden file (which gives the token ids and nothing else). Caches are f32 for
these, so that weights alone differ. `rounding` is plain round-to-nearest, beside the search of `--quant`. A
k-quant file is made with llama-quantize from the same GGUF. Speeds are of the default profile.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cecilia.engine.load import load_runner
from cecilia.engine.runner import Runner
from cecilia.errors import CeciliaError, UsageError
from cecilia.formats.l3r import open_model
from tools.bench import ours, report, system
from tools.bench.peer_build import LLAMA_CPP, program
from tools.bench.peers import SMOLLM2
from tools.bench.rewrite import round_to_nearest
from tools.compare import FIRST_COUNTED, kl_divergence, log_softmax, read_golden
from tools.convert.pipeline import Options, convert

GOLDEN = ours.MODEL.parents[2] / "shared" / "fixtures" / "smollm2" / "golden_llamacpp.npz"
K_QUANT = "Q4_K_M"
STRIDE = 8  # positions between two whose KL is taken
SPEEDS = ("prefill 512", "decode 128")


@dataclass
class Variant:
    """One file, and what came out."""

    name: str
    path: Path
    kl: list[float] = field(default_factory=list)
    nll: list[npt.NDArray[np.float64]] = field(default_factory=list)
    speeds: dict[str, float] = field(default_factory=dict)

    @property
    def bits_per_weight(self) -> float:
        """Mean over all tensors, scales and padding included."""
        with open_model(self.path) as file:
            entries = file.tensors.values()
            return 8 * sum(e.nbytes for e in entries) / sum(e.rows * e.cols for e in entries)

    def row(self) -> str:
        """Of the Markdown table."""
        kl = np.array(self.kl)
        mean, error = kl.mean(), kl.std(ddof=1) / len(kl) ** 0.5
        perplexity = np.exp(np.concatenate(self.nll).mean())
        size = self.path.stat().st_size / 1e6
        speeds = " | ".join(f"{self.speeds[name]:.0f}" for name in SPEEDS)
        return (
            f"| {self.name} | {self.bits_per_weight:.2f} | {size:.0f} MB | {perplexity:.4f} "
            f"| {mean:.5f} +- {error:.5f} | {speeds} |"
        )


def k_quant(gguf: Path, build: Path | None, out: Path) -> Path:
    """The k-quant file that llama-quantize makes of `gguf`. Raises CeciliaError `bench_failed`."""
    tool = program(LLAMA_CPP, build, "llama-quantize")
    command = [str(tool), "--allow-requantize", str(gguf), str(out), K_QUANT]
    environment = ["env", f"LD_LIBRARY_PATH={tool.parent}"]
    done = subprocess.run([*environment, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CeciliaError("bench_failed", f"llama-quantize: {done.stderr.strip().splitlines()[-1]}")
    return out


def variants(gguf: Path, build: Path | None, folder: Path) -> Iterator[Variant]:
    """All of them, the f32 reference first, made in `folder`."""
    made = {}
    for quant in ("f32", "keep", "q8", "q4"):
        made[quant] = convert(gguf, folder / f"{quant}.l3r", Options(quant=quant)).path
    yield Variant("f32", made["f32"])
    yield Variant("keep (Q4_1)", made["keep"])
    for quant in ("q8", "q4"):
        yield Variant(quant, made[quant])
        rounded = folder / f"{quant}-rounding.l3r"
        yield Variant(f"{quant}, rounding", round_to_nearest(made["f32"], made[quant], rounded))
    file = k_quant(gguf, build, folder / "k.gguf")
    yield Variant(f"keep ({K_QUANT})", convert(file, folder / "k.l3r", Options()).path)


def take_quality(found: Sequence[Variant], rows: npt.NDArray[np.integer]) -> None:
    """Fill kl and nll of every variant, the first of which is the reference; rows [N, 512] of token ids."""
    runners = [load_runner(variant.path, profile="f32") for variant in found]
    try:
        for number, ids in enumerate(rows):
            take_row(found, runners, ids)
            print(f"row {number + 1} of {len(rows)}", file=sys.stderr)
    finally:
        for runner in runners:
            runner.close()


def take_row(found: Sequence[Variant], runners: Sequence[Runner], ids: npt.NDArray[np.integer]) -> None:
    """One row of token ids, by itself, through every variant."""
    reference: npt.NDArray[np.float32] | None = None
    for variant, runner in zip(found, runners, strict=True):
        logits = runner.evaluate(ids.tolist())
        sampled = logits[::STRIDE]
        reference = sampled.copy() if reference is None else reference
        variant.kl += kl_divergence(reference, sampled).tolist()
        counted = log_softmax(logits[FIRST_COUNTED:-1])
        variant.nll.append(-counted[np.arange(len(counted)), ids[FIRST_COUNTED + 1 :]])


def take_speed(found: Sequence[Variant], repeats: int) -> None:
    """Fill the speeds of every variant: medians of rounds in which they take turns, two threads."""
    samples: dict[str, list[dict[str, float]]] = {variant.name: [] for variant in found}
    for _ in range(repeats):
        for variant in found:
            runner = load_runner(variant.path, threads=2)
            try:
                speeds = ours.measure(runner, [512], [128], repeats=1)
            finally:
                runner.close()
            samples[variant.name].append({name: values[0] for name, values in speeds.items()})
    for variant in found:
        for name in SPEEDS:
            variant.speeds[name] = float(np.median([sample[name] for sample in samples[variant.name]]))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m tools.bench.quantisations", description="Weight formats.")
    found.add_argument("--gguf", type=Path, default=SMOLLM2.gguf)
    found.add_argument("--golden", type=Path, default=GOLDEN, metavar="G.npz", help="rows of token ids")
    found.add_argument("--llama-cpp-build", type=Path, metavar="DIR", help="DIR/bin/llama-quantize is built")
    found.add_argument("--rows", type=ours.times, metavar="N", help="only the first N rows")
    found.add_argument("--repeats", type=ours.times, default=5, help="rounds of the speeds")
    report.add_log_option(found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, append to docs/BENCH.md; exit codes are those of cecilia.errors."""
    args = parser().parse_args(argv)
    try:
        if not args.golden.is_file():
            raise UsageError("no_golden", f"{args.golden} is not there")
        rows = np.atleast_2d(read_golden(args.golden).ids)[: args.rows]
        with tempfile.TemporaryDirectory(prefix="cecilia-") as folder:
            found = list(variants(args.gguf, args.llama_cpp_build, Path(folder)))
            take_quality(found, rows)
            raised = system.raise_priority()
            take_speed(found, args.repeats)
            table = [variant.row() for variant in found]
    except CeciliaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    facts = [
        f"`{report.command('tools.bench.quantisations', argv)}`",
        f"{args.gguf.name}, {len(rows)} rows",
        f"speeds in tokens/s, two threads, medians of {args.repeats}",
        f"priority {'raised' if raised else 'normal'}",
    ]
    body = [
        f"| weights | bits a weight | file | perplexity | mean KL to f32, nats | {' | '.join(SPEEDS)} |",
        "|---|---|---|---|---|---|---|",
        *table,
    ]
    report.publish(report.section("weight quantisations", facts, body), no_log=args.no_log)
    return 0


if __name__ == "__main__":
    sys.exit(main())
