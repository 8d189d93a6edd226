# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.bench.memory`: what the state of a long Ling-3.0-tiny session takes, recipe by recipe.

No weights are needed: a session is filled in chunks as for any other model, with one that computes nothing.
Every size has a process of its own, which also tells what the empty window took. Sizes that would take more
than half of the memory there is now are left out, with the arithmetic.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from math import gcd
from multiprocessing import get_context

import numpy as np
import numpy.typing as npt

from cecilia.arch import ling3
from cecilia.arch.ling3 import Ling3Spec
from cecilia.engine import memory
from cecilia.engine.load import DEFAULT_CHUNK
from cecilia.engine.recipes import longest, profiles_of
from cecilia.engine.runner import chunks
from cecilia.engine.window import window_bytes
from cecilia.errors import CeciliaError
from cecilia.state.pages import PagePool
from cecilia.state.session import Session
from cecilia.state.state import State
from tools.bench import report, system
from tools.shapes import hyper

WINDOWS = (64 << 10, 128 << 10, 256 << 10)  # tokens
KEPT_FREE = 2  # a run takes at most one part in so many of the available memory
VALUE_BYTES = {"f32": 4, "bf16": 2, "int8": 1}
SCALE_BYTES = {"f32": 0, "bf16": 0, "int8": 4}  # of each stored vector
LATENT_PART = 128  # a latent vector is stored as vectors of at most this width
HEAD = [
    "| recipe | tokens | bytes a token | by the formula | counted by the pool | VmRSS, empty | VmRSS, full |",
    "|---|---|---|---|---|---|---|",
]


@dataclass(frozen=True)
class Taken:
    """Bytes: of the pool's pages, and by how much VmRSS grew: the empty window, the state of the KDA layers,
    the full window."""

    pool: int
    empty: int
    state: int
    full: int


class Nothing:
    """A model that leaves the pages as they are."""

    def forward(
        self, _tokens: Sequence[int], _state: State, _first: int, *, last_only: bool
    ) -> npt.NDArray[np.float32]:
        """No logits."""
        return np.zeros((int(last_only), 0), np.float32)


def bytes_per_token(spec: Ling3Spec, kv: str) -> int:
    """The formula: values and scales of every vector the MLA layers keep of a token."""
    form, _, value = kv.rpartition("-")
    if form:
        part = gcd(spec.kv_rank, LATENT_PART)
        widths = [part] * (spec.kv_rank // part) + [spec.rope_dim]
    else:
        widths = spec.heads * [spec.nope_dim + spec.rope_dim, spec.v_dim]
    layer = sum(width * VALUE_BYTES[value] + SCALE_BYTES[value] for width in widths)
    return layer * sum(spec.is_mla(i) for i in range(spec.layers))


def resident() -> int:
    """VmRSS of this process without memory shared by name, of which it has none."""
    found = system.memory_kib()
    return (found["RssAnon"] + found["RssFile"]) << 10


def fill(session: Session, tokens: int) -> None:
    """Append `tokens` tokens, a chunk at a time, and write every page.

    The session is filled twice: fresh pages are the kernel's zeros until a model writes to them, used pages
    are zeroed when they are handed out again.
    """
    for _ in range(2):
        session.clear()
        for part in chunks([0] * tokens, DEFAULT_CHUNK):
            session.evaluate(part)


def take(spec: Ling3Spec, kv: str, tokens: int) -> Taken:
    """Make and fill the state of one session in this process, which should have done nothing before."""
    page = ling3.page_bytes(spec, kv)
    before = resident()
    pool = PagePool(page, window_bytes(page, tokens))
    session = Session(Nothing(), pool, ling3.state_bytes(spec))
    empty = resident()
    session.clear()  # writes the state of the KDA layers
    cleared = resident()
    fill(session, tokens)
    return Taken(pool.allocated * pool.page_bytes, empty - before, cleared - empty, resident() - cleared)


def take_apart(spec: Ling3Spec, kv: str, tokens: int) -> Taken:
    """`take` in a process of its own. Raises CeciliaError `bench_failed` when that is killed."""
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as child:
            return child.submit(take, spec, kv, tokens).result()
    except BrokenProcessPool as error:
        raise CeciliaError("bench_failed", f"{kv}, {tokens} tokens: {error}") from error


def row(profile: str, tokens: int, each: int, found: Taken | str) -> str:
    """Of the table; instead of what was found, why nothing was."""
    head = f"| {profile} | {tokens >> 10}K | {each:,} | {_gib(each * tokens)}"
    if isinstance(found, str):
        return f"{head} | {found} | | |"
    return f"{head} | {_gib(found.pool)} | {found.empty / (1 << 20):.1f} MiB | {_gib(found.full)} |"


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.3f} GiB"


def measure(spec: Ling3Spec, profile: str, kv: str, tokens: int) -> Taken | str:
    """What one window takes, or why it was not filled."""
    if tokens > longest(profile):
        return f"not offered: {profile} ends at {longest(profile) >> 10}K"
    need, free = bytes_per_token(spec, kv) * tokens, memory.available()
    if need > free // KEPT_FREE:
        return f"skipped: more than 1/{KEPT_FREE} of {_gib(free)} available"
    return take_apart(spec, kv, tokens)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m tools.bench.memory", description="Memory of sessions.")
    report.add_log_option(found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, append to docs/BENCH.md; exit codes are those of cecilia.errors."""
    args = parser().parse_args(argv)
    spec = ling3.spec_from(hyper("ling3", full=True, changes={}))
    rows, states = [], []
    try:
        for profile, kv in profiles_of(ling3).items():
            for tokens in WINDOWS:
                found = measure(spec, profile, kv, tokens)
                rows.append(row(profile, tokens, bytes_per_token(spec, kv), found))
                if isinstance(found, Taken):
                    states.append(found.state)
    except CeciliaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    facts = [
        f"`{report.command('tools.bench.memory', argv)}`",
        f"states of the KDA layers {ling3.state_bytes(spec):,} bytes in every session, VmRSS {max(states):,}",
    ]
    report.publish(
        report.section("memory of Ling-3.0-tiny's sessions", facts, [*HEAD, *rows]), no_log=args.no_log
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
