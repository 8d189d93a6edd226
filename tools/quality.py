# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.quality`: does the default model still compute what another engine computed with it?

Token ids of a long text, perplexity and KL divergence of each cache recipe against llama.cpp's stored
results, and the float conversion against the numpy reference. One table; exit code 1 when a bound is broken.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cecilia.arch import llama
from cecilia.engine.load import load_runner
from cecilia.engine.recipes import profiles_of
from cecilia.errors import CeciliaError
from cecilia.formats.l3r import open_model
from cecilia.text.tokenizer import Tokenizer
from tools.compare import Comparison, Golden, compare, read_golden

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "smollm2-135m-instruct.l3r"
FIXTURES = ROOT.parent / "shared" / "fixtures"
REFERENCE_TEST = "tests/reference"

MAX_PERPLEXITY_CHANGE = 0.005  # of the golden's
MAX_MEAN_KL = 0.01  # nats
BOUND = "bf16-v1"
"""The recipe the bounds are for: the others' figures stand beside it."""


@dataclass(frozen=True)
class Line:
    """One line of the table. `passed` None: shown without a bound, or skipped with the reason in `figure`."""

    what: str
    figure: str
    bound: str = ""
    passed: bool | None = None

    def __str__(self) -> str:
        verdict = {True: "ok", False: "BROKEN", None: ""}[self.passed]
        return f"{self.what:<28}{self.figure:<34}{self.bound:<16}{verdict}".rstrip()


def token_lines(model: Path, text: str, golden: Golden) -> Iterator[Line]:
    """The ids of `text` against the golden's, which are the first of them."""
    want = golden.ids.reshape(-1).tolist()
    with open_model(model) as file:
        if file.tokenizer is None:
            yield Line("token ids", "skipped: the file holds no tokenizer")
            return
        facts = file.metadata["text"]
        tokenizer = Tokenizer(
            file.tokenizer, bos_id=facts["bos_id"], add_bos=facts["add_bos"], eos_ids=facts["eos_ids"]
        )
    ours = tokenizer.encode_text(text)[: len(want)]
    equal = sum(a == b for a, b in zip(ours, want, strict=False))
    yield Line("token ids", f"{equal:,} of {len(want):,} equal", "all", ours == want)


def profile_lines(profile: str, found: Comparison, *, bounded: bool) -> Iterator[Line]:
    """What one recipe gave, with or without the bounds."""
    if found.perplexity is not None and found.golden_perplexity is not None:
        change = found.perplexity / found.golden_perplexity - 1
        figure = f"{found.perplexity:.4f} / {found.golden_perplexity:.4f} = {change:+.2%}"
        line = _bounded(f"{profile} perplexity", figure, abs(change), MAX_PERPLEXITY_CHANGE, "{:.1%}")
        yield line if bounded else replace(line, bound="", passed=None)
    if found.mean_kl is not None:
        figure = f"{found.mean_kl:.5f} nats, {found.positions} positions"
        line = _bounded(f"{profile} mean KL", figure, found.mean_kl, MAX_MEAN_KL, "{:.2f}")
        yield line if bounded else replace(line, bound="", passed=None)
        yield Line(f"{profile} argmax", f"{found.argmax_agreement:.1%} equal")
    if found.greedy is not None:
        yield Line(f"{profile} greedy", "{} of {} tokens before a difference".format(*found.greedy))


def _bounded(what: str, figure: str, value: float, limit: float, style: str) -> Line:
    return Line(what, figure, "at most " + style.format(limit), value <= limit)


def golden_lines(model: Path, fixtures: Path, rows: int | None, threads: int | None) -> Iterator[Line]:
    """Everything that is compared with the stored results; or one line with the reason why not."""
    folder = fixtures / "smollm2"
    if not folder.is_dir():
        yield Line("golden results", f"skipped: no {folder}")
        return
    golden = read_golden(folder / "golden_llamacpp.npz")
    yield from token_lines(model, (folder / "kjv.txt").read_text(encoding="utf-8"), golden)
    for profile in (BOUND, *(name for name in profiles_of(llama) if name != BOUND)):
        runner = load_runner(model, profile=profile, threads=threads)
        try:
            found = compare(runner, golden, rows)
            yield from profile_lines(profile, found, bounded=profile == BOUND and rows is None)
        finally:
            runner.close()


def reference_line() -> Line:
    """The f32 conversion against numpy: a test, since the reference belongs to the tests."""
    what, bound = "f32 against numpy", "0.001, argmax"
    if importlib.util.find_spec("pytest") is None:
        return Line(what, "skipped: pytest is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "model", REFERENCE_TEST]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    report = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    return Line(what, report[-1].strip("= "), bound, done.returncode == 0)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m tools.quality", description="Quality of the default model."
    )
    found.add_argument("--model", type=Path, default=MODEL, metavar="FILE.l3r")
    found.add_argument(
        "--fixtures", type=Path, default=FIXTURES, metavar="DIR", help="where golden results are kept"
    )
    found.add_argument(
        "--rows", type=int, metavar="N", help="only the first N rows: quicker, and without bounds"
    )
    found.add_argument("--threads", type=int, metavar="N")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table line by line; return 1 when a bound is broken, else 0 or an error's code."""
    args = parser().parse_args(argv)
    broken = False
    try:
        for line in golden_lines(args.model, args.fixtures, args.rows, args.threads):
            print(line, flush=True)
            broken |= line.passed is False
    except CeciliaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    last = reference_line()
    print(last)
    return int(broken or last.passed is False)


if __name__ == "__main__":
    sys.exit(main())
