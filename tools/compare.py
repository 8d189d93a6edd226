# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.compare FILE.l3r --golden G.npz`: compare with stored results of another engine.

A golden is an .npz file with `ids` [T] or [N, T] and any of
    logits  [T, V], of the first row; or [M, V] with `logits_at` [M, 2], the (row, position) of each
    nll     [N, T-1], -log p(ids[n, i+1] | ids[n, :i+1]) in nats
    greedy  [n] after ids[:T // 3]; or [R, n] with `greedy_rows` [R], each after ids[row, :64]
Each row is evaluated from an empty context. Perplexity is exp(mean nll); over the positions 256..511
when rows are 512 long, so that every predicted token has a fair amount of context.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from numpy.lib.npyio import NpzFile

from cecilia.errors import CeciliaError, UsageError

Array = npt.NDArray[Any]

GREEDY_PROMPT = 64
# What numpy, zipfile and zlib raise about a damaged or hostile archive.
_UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    MemoryError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)
_KNOWN = ("ids", "logits", "logits_at", "nll", "greedy", "greedy_rows")
LONG_ROW, FIRST_COUNTED = 512, 255  # nll[255] is the first whose predicted token stands at position 256


class Evaluator(Protocol):
    """What is compared: `cecilia.engine.runner.Runner`, or anything that answers like it."""

    def evaluate(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits f32 [T, V] from an empty context."""

    def greedy(self, tokens: Sequence[int], n: int) -> list[int]:
        """The n likeliest tokens after `tokens`, one at a time."""


@dataclass(frozen=True)
class Golden:
    """A golden in one form: `logits` [M, V] belong to `at` [M, 2]; `greedy` holds (prompt, continuation)."""

    ids: Array
    at: Array
    logits: Array | None
    nll: Array | None
    greedy: list[tuple[list[int], list[int]]]

    def rows(self, limit: int | None) -> list[int]:
        """The rows there is something to compare in, among the first `limit`."""
        count = len(self.ids) if limit is None else min(limit, len(self.ids))
        wanted = set(self.at[:, 0].tolist()) if self.nll is None else set(range(count))
        return sorted(row for row in wanted if row < count)


@dataclass(frozen=True)
class Comparison:
    """What came out; None where the golden does not hold the reference. KL is KL(golden || ours) in nats."""

    positions: int
    max_error: float | None
    argmax_agreement: float | None
    mean_kl: float | None
    max_nll_error: float | None
    perplexity: float | None
    golden_perplexity: float | None
    greedy: tuple[int, int] | None  # tokens equal up to the first difference, tokens compared

    @property
    def error(self) -> float:
        """What a tolerance is about: the largest error of a logit, of an nll where there are no logits."""
        found = self.max_nll_error if self.max_error is None else self.max_error
        return 0.0 if found is None else found


def read_golden(path: Path) -> Golden:
    """Read and check a golden. Raises UsageError `invalid_golden` with what is wrong."""
    try:
        # NpzFile itself: np.load would also take a bare .npy, which has no names.
        with path.open("rb") as source, NpzFile(source, own_fid=False, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except _UNREADABLE as error:
        raise UsageError("invalid_golden", f"{path}: {error}") from error
    try:
        return _golden(arrays)
    except (KeyError, IndexError, ValueError) as error:
        raise UsageError("invalid_golden", f"{path}: {error}") from error


def _golden(arrays: dict[str, Array]) -> Golden:
    if "ids" not in arrays:
        raise ValueError(f"holds no ids, only {' '.join(sorted(arrays)) or 'nothing'}")
    for name, array in arrays.items():
        kinds = "f" if name in ("logits", "nll") else "iu"
        if name in _KNOWN and array.dtype.kind not in kinds:
            raise ValueError(f"{name} holds {array.dtype}")
    ids = np.atleast_2d(arrays["ids"])
    if ids.ndim != 2 or not ids.size:
        raise ValueError(f"ids {ids.shape} are no rows of tokens")
    logits, nll = arrays.get("logits"), arrays.get("nll")
    at = arrays.get("logits_at", np.stack([np.zeros_like(ids[0]), np.arange(ids.shape[1])], axis=1))
    if at.ndim != 2 or at.shape[1] != 2:
        raise ValueError(f"logits_at {at.shape} are no pairs")
    if nll is not None and nll.shape != (len(ids), ids.shape[1] - 1):
        raise ValueError(f"nll {nll.shape} does not belong to ids {ids.shape}")
    if logits is not None and (logits.ndim != 2 or len(logits) != len(at)):
        raise ValueError(f"logits {logits.shape} for {len(at)} positions")
    if logits is None:
        at = at[:0]
    if at.size and (at.min() < 0 or (at.max(axis=0) >= ids.shape).any()):
        raise ValueError(f"logits_at points outside ids {ids.shape}")
    golden = Golden(ids, at, logits, nll, _greedy(arrays, ids))
    if logits is None and nll is None and not golden.greedy:
        raise ValueError("holds none of logits, nll, greedy")
    return golden


def _greedy(arrays: dict[str, Array], ids: Array) -> list[tuple[list[int], list[int]]]:
    if "greedy" not in arrays:
        return []
    if arrays["greedy"].ndim != (2 if "greedy_rows" in arrays else 1):
        raise ValueError(f"greedy has the shape {arrays['greedy'].shape}")
    if "greedy_rows" not in arrays:
        return [(ids[0, : ids.shape[1] // 3].tolist(), arrays["greedy"].tolist())]
    pairs = zip(arrays["greedy_rows"], arrays["greedy"], strict=True)
    return [(ids[row, :GREEDY_PROMPT].tolist(), tokens.tolist()) for row, tokens in pairs]


def log_softmax(logits: Array) -> npt.NDArray[np.float64]:
    """Log-probabilities f64 over the last axis."""
    x: npt.NDArray[np.float64] = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x


def perplexity(nll: Array) -> float:
    """exp(mean) of nll [N, T-1]; of its second half when rows are 512 tokens long."""
    counted = nll[:, FIRST_COUNTED:] if nll.shape[1] == LONG_ROW - 1 else nll
    return float(np.exp(counted.mean(dtype=np.float64)))


def kl_divergence(golden: Array, ours: Array) -> Array:
    """KL(softmax(golden) || softmax(ours)) in nats for each row of two [M, V]."""
    p, q = log_softmax(golden), log_softmax(ours)
    found: Array = (np.exp(p) * (p - q)).sum(axis=-1)
    return found


@dataclass(frozen=True)
class Distance:
    """How far logits are from a golden's: absolute errors, KL(golden || ours) in nats, equal argmax."""

    max_error: float
    mean_error: float
    mean_kl: float
    agreement: float


def distance(golden: Array, ours: Array) -> Distance:
    """The distance of two [M, V], M at least 1."""
    error = np.abs(ours - golden)
    return Distance(
        float(error.max()),
        float(error.mean(dtype=np.float64)),
        float(kl_divergence(golden, ours).mean()),
        float((ours.argmax(axis=-1) == golden.argmax(axis=-1)).mean()),
    )


def compare(runner: Evaluator, golden: Golden, rows: int | None = None) -> Comparison:
    """Evaluate what the golden holds, its first `rows` rows, and compare.

    Raises UsageError `invalid_golden` when its logits are of another vocabulary.
    """
    logits: list[Array] = []
    nll: list[Array] = []
    wanted = golden.rows(rows)
    chosen = [index for row in wanted for index in np.flatnonzero(golden.at[:, 0] == row)]
    for row in wanted:
        ids = golden.ids[row]
        found = runner.evaluate(ids.tolist())
        if golden.logits is not None and found.shape[1] != golden.logits.shape[1]:
            raise UsageError(
                "invalid_golden", f"logits of {golden.logits.shape[1]} tokens, the model has {found.shape[1]}"
            )
        logits.extend(found[golden.at[golden.at[:, 0] == row, 1]])
        if golden.nll is not None:
            nll.append(token_nll(found, ids))
    matches = [_matching(runner.greedy(prompt, len(want)), want) for prompt, want in golden.greedy]
    greedy = (sum(matches), sum(len(want) for _, want in golden.greedy)) if matches else None
    return _comparison(golden, wanted, chosen, logits, nll, greedy)


def _comparison(
    golden: Golden,
    rows: list[int],
    chosen: list[Any],
    logits: list[Array],
    nll: list[Array],
    greedy: tuple[int, int] | None,
) -> Comparison:
    max_error = agreement = mean_kl = max_nll_error = ours = reference = None
    if golden.logits is not None and chosen:
        apart = distance(golden.logits[chosen].astype(np.float32), np.stack(logits))
        max_error, agreement, mean_kl = apart.max_error, apart.agreement, apart.mean_kl
    if golden.nll is not None and nll:
        max_nll_error = float(np.abs(np.stack(nll) - golden.nll[rows]).max())
        ours, reference = perplexity(np.stack(nll)), perplexity(golden.nll[rows])
    return Comparison(len(chosen), max_error, agreement, mean_kl, max_nll_error, ours, reference, greedy)


def token_nll(logits: Array, ids: Array) -> Array:
    """-log p of each next token, f64 [T-1]; a block of rows at a time, since [T, V] in f64 is large."""
    parts = [
        -log_softmax(logits[start:stop])[np.arange(stop - start), ids[start + 1 : stop + 1]]
        for start in range(0, len(ids) - 1, 64)
        for stop in [min(start + 64, len(ids) - 1)]
    ]
    return np.concatenate(parts)


def _matching(ours: list[int], golden: list[int]) -> int:
    """How many tokens are equal before the first that is not; what follows a difference is another text."""
    for count, (a, b) in enumerate(zip(ours, golden, strict=True)):
        if a != b:
            return count
    return len(golden)


def print_comparison(found: Comparison) -> None:
    """One line for each thing compared, on stdout."""
    if found.max_error is not None:
        print(f"max logit error    {found.max_error:.6f} over {found.positions} positions")
        print(f"argmax agreement   {found.argmax_agreement:.4f}")
        print(f"mean KL            {found.mean_kl:.6f} nats")
    if found.perplexity is not None and found.golden_perplexity is not None:
        print(f"perplexity         {found.perplexity:.4f}, golden {found.golden_perplexity:.4f}")
        print(f"                   {100 * (found.perplexity / found.golden_perplexity - 1):+.2f} %")
        print(f"max nll error      {found.max_nll_error:.6f} nats")
    if found.greedy is not None:
        print(f"greedy             {found.greedy[0]} of {found.greedy[1]} tokens before a first difference")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m tools.compare", description="Hold a .l3r file against golden results."
    )
    found.add_argument("file", type=Path, metavar="FILE.l3r")
    found.add_argument("--golden", type=Path, required=True, metavar="G.npz")
    found.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="exit 1 when a logit (an nll, without logits) is off by more",
    )
    found.add_argument("--profile", default="int8-v1", help="KV recipe: int8-v1 (default), bf16-v1 or f32")
    found.add_argument("--rows", type=int, metavar="N", help="only the first N rows of the golden")
    found.add_argument("--threads", type=int, metavar="N")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit code 1 beyond the tolerance, else those of cecilia.errors."""
    from cecilia.engine.load import load_runner

    args = parser().parse_args(argv)
    try:
        if args.rows is not None and args.rows < 1:
            raise UsageError("invalid_rows", f"--rows {args.rows}: at least 1")
        golden = read_golden(args.golden)
        runner = load_runner(args.file, profile=args.profile, threads=args.threads)
        try:
            found = compare(runner, golden, args.rows)
        finally:
            runner.close()
    except CeciliaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print_comparison(found)
    if args.tolerance is not None and not found.error <= args.tolerance:
        print(f"tolerance_exceeded: {found.error:.6f} is more than {args.tolerance}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
