# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.bench.sessions [FILE.l3r]`: what it costs to go on with what is kept.

A history of pseudo-random tokens is read cold; then come a follow-up, a foreign request and another
follow-up, a turn that replaces the last one, a return to the replaced one, a fork, and a snapshot that is
written, read and gone on with. Times are those until the logits of the last new token, NEW of them each time.
Last, decoding through the session is timed beside a bare loop over the model, in turns.
"""

from __future__ import annotations

from cecilia.config import set_openmp_environment

set_openmp_environment()

import argparse  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TypeVar  # noqa: E402

import numpy as np  # noqa: E402

from cecilia._kernels import isa  # noqa: E402
from cecilia.engine.load import load_runner  # noqa: E402
from cecilia.engine.recipes import DEFAULT_PROFILE  # noqa: E402
from cecilia.engine.runner import Runner, chunks  # noqa: E402
from cecilia.errors import CeciliaError  # noqa: E402
from cecilia.state.snapshot import Snapshot, SnapshotFile  # noqa: E402
from cecilia.state.state import State  # noqa: E402
from tools.bench import report  # noqa: E402
from tools.bench.ours import MODEL, numbers  # noqa: E402

HISTORIES = (2048, 7168)
NEW = 48  # tokens of a turn
FOREIGN = 200  # tokens of a request of somebody else's
DECODED, TURNS = 16, 6  # tokens a turn, turns of each kind
ROOM = 2 << 30  # bytes for sequences at rest
HEAD = ["| what | tokens computed | time |", "|---|---|---|"]

T = TypeVar("T")


class Bench:
    """One model and one history."""

    def __init__(self, runner: Runner, history: int) -> None:
        self.runner, self.session = runner, runner.session
        rng = np.random.default_rng(history)
        draw = lambda n: rng.integers(0, runner.vocab, n).tolist()  # noqa: E731
        self.history = draw(history)
        self.turns = [draw(NEW) for _ in range(5)]
        self.foreign = draw(FOREIGN)
        self.rows: list[str] = []

    def read(self, what: str, tokens: list[int], mark: int | None = None) -> float:
        """Go on to the end of `tokens`, with a checkpoint at `mark`; a row of the report, and the seconds."""
        start = time.perf_counter()
        held = self.session.sync(tokens)
        for part in chunks(tokens[held:mark], self.runner.chunk):
            self.session.evaluate(part)
        if mark is not None:
            self.session.checkpoint()
            for part in chunks(tokens[mark:], self.runner.chunk):
                self.session.evaluate(part)
        seconds = time.perf_counter() - start
        self.rows.append(f"| {what} | {len(tokens) - held} of {len(tokens)} | {1e3 * seconds:.1f} ms |")
        return seconds

    def run(self) -> list[str]:
        """Everything, in order."""
        first, second, other, later, last = self.turns
        self.session.clear()
        cold = self.read("the history, cold", self.history + first, mark=len(self.history))
        chat = self.history + first + second
        self.read("a follow-up", chat)
        self.read("a foreign request", self.foreign)
        chat += later
        self.read("a follow-up after it", chat)
        self.read("another last turn", self.history + other)
        self.read("back to the first branch, and a turn", [*chat, *last])
        self._fork()
        self._snapshot(cold)
        self._overhead()
        return self.rows

    def _fork(self) -> None:
        session = self.session
        session.checkpoint()
        branch, seconds = timed(lambda: session.fork(session.running, len(session.tokens), name="fork"))
        shared = branch.pages.shared * session.pool.page_bytes
        self.rows.append(f"| a fork, {shared / 1e6:.1f} MB shared | 0 | {1e3 * seconds:.2f} ms |")
        session.cache.remove(branch)

    def _snapshot(self, cold: float) -> None:
        session, tokens = self.session, list(self.session.tokens)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "bench.snapshot"
            snapshot = Snapshot({}, session.running.branch(len(tokens)), {})
            nbytes, wrote = timed(partial(snapshot.write, path))
            del snapshot
            session.clear()
            restored, read = timed(lambda: self._restored(path))
        self.rows += [
            f"| a snapshot written, {nbytes / 1e6:.1f} MB | 0 | {1e3 * wrote:.0f} ms |",
            f"| checked and restored, {cold / read:.0f}x as fast as the prefill | 0 | {1e3 * read:.0f} ms |",
        ]
        assert restored == tokens
        self.read("a turn after it", tokens + self.turns[0])

    def _restored(self, path: Path) -> list[int]:
        with SnapshotFile(path) as file:
            file.verify()
            sequence = self.session.build(file.sequence)
            self.session.cache.add(sequence)
        return sequence.tokens

    def _overhead(self) -> None:
        """Decode in turns, through the session and through the model alone, at about the same depth."""
        session = self.session
        found: dict[str, list[float]] = {"session": [], "bare": []}
        for _ in range(TURNS):
            _, seconds = timed(lambda: [session.evaluate([1]) for _ in range(DECODED)])
            found["session"].append(seconds / DECODED)
            _, seconds = timed(self._bare)
            found["bare"].append(seconds / DECODED)
        through, bare = (statistics.median(found[kind]) for kind in ("session", "bare"))
        self.rows.append(
            f"| a step at depth {len(session.tokens)}, {100 * (through / bare - 1):+.1f} % of a bare loop's "
            f"{1e3 * bare:.2f} ms | 1 | {1e3 * through:.2f} ms |"
        )

    def _bare(self) -> None:
        """DECODED steps of the model alone, into pages that the next turn writes again."""
        session, depth = self.session, len(self.session.tokens)
        pages = session.running.pages
        pages.reserve(depth + DECODED)
        state = State(pages.pages, session.fixed)
        for i in range(DECODED):
            session.model.forward([1], state, depth + i, last_only=True)


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """The result and the seconds."""
    start = time.perf_counter()
    found = call()
    return found, time.perf_counter() - start


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m tools.bench.sessions", description="Sessions.")
    found.add_argument("model", type=Path, nargs="?", default=MODEL, metavar="FILE.l3r")
    found.add_argument("--threads", type=int, default=2)
    found.add_argument("--profile", default=DEFAULT_PROFILE)
    found.add_argument("--histories", type=numbers, default=list(HISTORIES), metavar="N,N")
    report.add_log_option(found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, append to docs/BENCH.md; exit codes are those of cecilia.errors."""
    args = parser().parse_args(argv)
    window = max(args.histories) + 10 * NEW + 2 * DECODED * TURNS
    body: list[str] = []
    try:
        runner = load_runner(
            args.model, profile=args.profile, context=window, threads=args.threads, cache_bytes=ROOM
        )
        try:
            runner.settle()
            for history in args.histories:
                body += ["", f"A history of {history} tokens:", "", *HEAD, *Bench(runner, history).run()]
        finally:
            runner.close()
    except CeciliaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    facts = [
        f"`{report.command('tools.bench.sessions', argv)}`",
        f"{args.model.name}, {isa.name()}, {args.profile}, {args.threads} threads",
    ]
    report.publish(report.section("going on with what is kept", facts, body[1:]), no_log=args.no_log)
    return 0


if __name__ == "__main__":
    sys.exit(main())
