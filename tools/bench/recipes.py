# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.bench.recipes [DIR ...]`: what cache recipes and weight quantisations cost in accuracy.

DIR holds a checkpoint and `golden.npz`, whose token ids are evaluated, each row from an empty context, with
every quantisation and every recipe the architecture has. Each result is held against two others:
    dequantised  the same weights' values in f32 and the float cache of the same form (expanded, latent): what
                 is left is the error of the cache and of 8-bit activations
    original     the f32 conversion with the f32 recipe: everything together
Where the golden holds likelihoods (`nll`), the held-out nats per token stand beside them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cecilia.arch import architecture
from cecilia.engine.load import load_runner
from cecilia.engine.recipes import profiles_of
from cecilia.errors import CeciliaError, UsageError
from cecilia.formats.l3r import open_model
from tools.bench import ours, report
from tools.bench.rewrite import dequantised
from tools.compare import Distance, Golden, distance, read_golden, token_nll
from tools.convert.pipeline import Options, convert

FIXTURES = ours.MODEL.parents[2] / "shared" / "fixtures" / "ling3"
QUANTISATIONS = ("f32", "w8a8", "w4a8", "q4")  # the first leaves the weights as they are
FLOAT = "f32"
HEAD = [
    "| weights | recipe | dequantised: max error | mean error | mean KL | top-1 "
    "| original: max error | mean error | mean KL | top-1 | nats per token |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
]


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    quantisation: str
    profile: str
    to_dequantised: Distance
    to_original: Distance
    nats: float | None

    def row(self) -> str:
        """In Markdown."""
        apart = " | ".join(_cells(found) for found in (self.to_dequantised, self.to_original))
        nats = "" if self.nats is None else f"{self.nats:.5f}"
        return f"| {self.quantisation} | {self.profile} | {apart} | {nats} |"


def _cells(found: Distance) -> str:
    sizes = (found.max_error, found.mean_error, found.mean_kl)
    return " | ".join([*(f"{size:.2g}" for size in sizes), f"{100 * found.agreement:.2f} %"])


def float_profile(profile: str, profiles: dict[str, str]) -> str:
    """The profile with f32 values in a cache of the same form as that of `profile`."""
    form, dash, _ = profiles[profile].rpartition("-")
    return next(name for name, kv in profiles.items() if kv == f"{form}{dash}{FLOAT}")


def profiles_in(path: Path) -> dict[str, str]:
    """The profiles of a file's architecture, with their KV recipes."""
    with open_model(path) as file:
        return profiles_of(architecture(file.metadata["architecture"]))


def logits_of(path: Path, profile: str, ids: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    """Logits [N, T, V] of rows [N, T] of token ids, each from an empty context."""
    runner = load_runner(path, profile=profile)
    try:
        return np.stack([runner.evaluate(row.tolist()) for row in ids])
    finally:
        runner.close()


def nats_per_token(logits: npt.NDArray[np.float32], ids: npt.NDArray[np.integer]) -> float:
    """The mean of -log p of every token but each row's first."""
    return float(np.mean([token_nll(found, row) for found, row in zip(logits, ids, strict=True)]))


def measure(checkpoint: Path, golden: Golden, folder: Path) -> Iterator[Result]:
    """Every quantisation with every recipe, f32 with f32 first; files are made in `folder`."""
    made = {
        quant: convert(checkpoint, folder / f"{quant}.l3r", Options(quant, tokenizer="none")).path
        for quant in QUANTISATIONS
    }
    profiles = profiles_in(made[FLOAT])
    order = sorted(profiles, key=lambda name: name != FLOAT)
    original = logits_of(made[FLOAT], FLOAT, golden.ids)
    for quant, path in made.items():
        wide = dequantised(path, folder / "wide.l3r")
        floats = {name: float_profile(name, profiles) for name in order}
        references = {name: logits_of(wide, name, golden.ids) for name in set(floats.values())}
        for profile in order:
            found = logits_of(path, profile, golden.ids)
            yield Result(
                quant,
                profile,
                _apart(references[floats[profile]], found),
                _apart(original, found),
                None if golden.nll is None else nats_per_token(found, golden.ids),
            )
            print(f"{checkpoint.name}: {quant}, {profile}", file=sys.stderr)


def _apart(reference: npt.NDArray[np.float32], found: npt.NDArray[np.float32]) -> Distance:
    vocab = found.shape[-1]
    return distance(reference.reshape(-1, vocab), found.reshape(-1, vocab))


def checkpoints(given: Sequence[Path]) -> list[Path]:
    """The directories given, else those of the fixtures. Raises UsageError `no_golden`."""
    found = list(given) or sorted(path.parent for path in FIXTURES.glob("*/golden.npz"))
    for folder in found or [FIXTURES]:
        if not (folder / "golden.npz").is_file():
            raise UsageError("no_golden", f"{folder} holds no golden.npz")
    return found


def first_rows(golden: Golden, rows: int | None) -> Golden:
    """The golden's ids and likelihoods of its first `rows` rows, all for None."""
    nll = None if golden.nll is None else golden.nll[:rows]
    return replace(golden, ids=golden.ids[:rows], nll=nll)


def facts_about(golden: Golden, first: Result) -> list[str]:
    """What the table was taken from, and how the f32 figure compares with the golden's own."""
    rows, tokens = golden.ids.shape
    facts = [f"{rows} x {tokens} tokens"]
    if golden.nll is not None and first.nats is not None:
        own = golden.nll.mean(dtype=np.float64)
        facts.append(f"nats per token of the golden {own:.5f}, of f32 here {first.nats:.5f}")
    return facts


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m tools.bench.recipes", description="Accuracy of recipes.")
    found.add_argument(
        "checkpoints",
        nargs="*",
        type=Path,
        metavar="DIR",
        help="a checkpoint with its golden.npz (default: all of the fixtures)",
    )
    found.add_argument("--rows", type=ours.times, metavar="N", help="only the first N rows")
    report.add_log_option(found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, append to docs/BENCH.md; exit codes are those of cecilia.errors."""
    args = parser().parse_args(argv)
    try:
        for checkpoint in checkpoints(args.checkpoints):
            golden = first_rows(read_golden(checkpoint / "golden.npz"), args.rows)
            with tempfile.TemporaryDirectory(prefix="cecilia-") as folder:
                found = list(measure(checkpoint, golden, Path(folder)))
            facts = [f"`{report.command('tools.bench.recipes', argv)}`", *facts_about(golden, found[0])]
            text = report.section(f"recipes of {checkpoint.name}", facts, [*HEAD, *(r.row() for r in found)])
            report.publish(text, no_log=args.no_log)
    except CeciliaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
