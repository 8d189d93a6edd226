# SPDX-License-Identifier: Apache-2.0
"""What the engine keeps of earlier requests, as its users may see and change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cecilia.engine.job import Prompt
from cecilia.engine.runner import Runner
from cecilia.engine.snapshots import note_of, prompt_of
from cecilia.errors import MemoryLimitError, RequestError
from cecilia.state import sequence as state
from cecilia.state.snapshot import Snapshot, SnapshotFile

Scope = Literal["all", "idle", "session"]


@dataclass(frozen=True, slots=True)
class Probe:
    """How much of a prompt is held. `common_tokens`: of the longest common prefix, which a recurrent state
    can be continued from only at checkpoints. `source`: a session's name, "live", "cache", or None."""

    prompt_tokens: int
    cached_tokens: int
    common_tokens: int
    recompute_tokens: int
    source: str | None


@dataclass(frozen=True, slots=True)
class Entry:
    """A sequence that is held. `kind`: "live" for the one that runs or ran last, "session" for one with a
    name, or "cache". `bytes` are those of its pages and checkpoints, `shared_bytes` those of pages that other
    sequences own too. `last_used`: seconds of the monotonic clock, 0 while it is live."""

    id: str
    kind: Literal["live", "session", "cache"]
    session_id: str | None
    tokens: int
    bytes: int
    shared_bytes: int
    checkpoints: tuple[int, ...]
    hits: int
    parent: str | None
    pinned: bool
    last_used: float
    in_use: bool


@dataclass(frozen=True, slots=True)
class Totals:
    """Of the page pool: `used_bytes` belong to some sequence, `allocated_bytes` are held from the system."""

    sequences: int
    used_bytes: int
    allocated_bytes: int
    limit_bytes: int
    evictions: int


class Sessions:
    """All calls on the engine thread, between steps, but `probe`, `entries` and `totals`: from any thread."""

    def __init__(
        self, runner: Runner, key: Mapping[str, str], interrupted: Callable[[], Prompt | None]
    ) -> None:
        self._runner = runner
        self._key = key
        self._session = runner.session
        self._interrupted = interrupted
        self._suspended: dict[str, Prompt] = {}

    def probe(self, tokens: Sequence[int], *, salt: str = "", name: str | None = None) -> Probe:
        """What a prompt of `tokens` would find. Changes nothing."""
        wanted = tokens[:-1]
        cached = self._session.reusable(tokens, salt=salt, name=name)
        common, source = 0, None
        for each in self._session.sequences():
            shared = each.common(wanted) if each.salt == salt else 0
            if shared > common or (shared and shared == common and each.name == name):
                common, source = shared, self._source(each)
        return Probe(len(tokens), cached, common, len(tokens) - cached, source)

    def entries(self) -> list[Entry]:
        """All that is held."""
        return [self._entry(each) for each in self._session.sequences()]

    def totals(self) -> Totals:
        """The budget and what is taken of it."""
        pool, cache = self._runner.pool, self._session.cache
        return Totals(
            len(list(self._session.sequences())),
            pool.used_bytes,
            pool.allocated * pool.page_bytes + pool.charged,
            pool.limit_bytes,
            cache.evictions,
        )

    def clear(self, scope: Scope, name: str | None = None) -> tuple[int, int]:
        """Forget sequences: "all", the "idle" ones, or that of a "session"; (bytes freed, how many).

        Raises RequestError `session_not_found`, and `in_use` when one of them is at work: then none is gone.
        """
        going = [each for each in self._session.sequences() if scope != "session" or each.name == name]
        if scope == "session" and not going:
            raise _not_found(name)
        busy = self._interrupted() is not None
        if scope == "idle":
            going = [each for each in going if each is not self._session.running or not busy]
        elif busy and self._session.running in going:
            raise RequestError("in_use", "the sequence of the generation at work cannot be cleared")
        before, removed = self._runner.pool.used_bytes, len(going)
        while going:
            self._forget(going.pop())
        return before - self._runner.pool.used_bytes, removed

    def fork(self, name: str | None, new_name: str, *, at: int | None = None, pin: bool = False) -> Entry:
        """A session `new_name` that goes on from the first `at` tokens of session `name`, None for the live
        one; by default all it can be continued from.

        Raises RequestError `session_not_found`, `session_exists`, `position_not_restorable` (facts
        `nearest_below` and `nearest_above`) and `cache_full`.
        """
        source = self._find(name)
        if self._named(new_name) is not None:
            raise RequestError(
                "session_exists", f"session {new_name!r} exists already", param="new_session_id"
            )
        if source is self._session.running:
            self._session.checkpoint()
        count = source.reusable(len(source)) if at is None else at
        _require_restorable(source, count)
        try:
            branch = self._session.fork(source, count, name=new_name, pinned=pin)
        except MemoryLimitError as error:
            raise RequestError("cache_full", error.message) from error
        return self._entry(branch)

    def freeze(self, name: str) -> Snapshot:
        """Session `name` as it is now, to be written by any thread; a generation at work is part of it.

        Raises RequestError `session_not_found` and `position_not_restorable`, MemoryLimitError.
        """
        source = self._find(name)
        live = source is self._session.running
        if live:
            self._session.checkpoint()
        count = source.reusable(len(source))
        if count == 0:
            raise RequestError("position_not_restorable", f"session {name!r} has no state to go on from")
        prompt = (self._interrupted() if live else None) or self._suspended.get(name)
        note, blobs = ({}, {}) if prompt is None else note_of(prompt)
        branch = source.branch(count)
        return Snapshot(self._key, branch, {"session": name, "generation": note or None}, blobs)

    def restore(self, file: SnapshotFile, name: str) -> Entry:
        """Make the verified snapshot session `name`, in place of what that was.

        Raises RequestError `snapshot_mismatch`, `snapshot_damaged`, `in_use` while the session is at work,
        and `cache_full`; then nothing has changed.
        """
        file.require(self._key, self._runner.context)
        former = self._named(name)
        if former is self._session.running and self._interrupted() is not None:
            raise RequestError("in_use", f"session {name!r} is at work", param="session_id")
        prompt = self._noted(file, name)
        try:
            sequence = self._session.build(file.sequence)
        except MemoryLimitError as error:
            raise RequestError("cache_full", error.message) from error
        self._suspended.pop(name, None)
        if former is not None:
            self._forget(former)
        if prompt is not None:
            self._suspended[name] = prompt
        sequence.name = name
        self._session.cache.add(sequence)
        return self._entry(sequence)

    def _noted(self, file: SnapshotFile, name: str) -> Prompt | None:
        """The interrupted generation in `file`, if there is one."""
        note = file.note.get("generation")
        if note is None:
            return None
        window, vocab = self._runner.context, self._runner.vocab
        return prompt_of(note, file.blob("logits"), name, vocab=vocab, window=window)

    def resumable(self, name: str) -> bool:
        """Whether session `name` has a restored generation to go on with."""
        return name in self._suspended

    def attached(self, name: str | None) -> None:
        """Note that session `name` was asked for more: a restored generation is no longer to be had."""
        self._suspended.pop(name or "", None)

    def suspended(self, name: str) -> Prompt:
        """The restored generation of session `name`. Raises RequestError `session_not_found` and
        `generation_not_resumable`."""
        if name not in self._suspended:
            if self._named(name) is None:
                raise _not_found(name)
            raise RequestError(
                "generation_not_resumable",
                f"session {name!r} has no generation to go on with",
                param="continue_generation",
            )
        return self._suspended[name]

    def _find(self, name: str | None) -> state.Sequence:
        found = self._session.running if name is None else self._named(name)
        if found is None or not len(found):
            raise _not_found(name)
        return found

    def _named(self, name: str) -> state.Sequence | None:
        return next((each for each in self._session.sequences() if each.name == name), None)

    def _forget(self, each: state.Sequence) -> None:
        self._suspended.pop(each.name or "", None)
        if each is self._session.running:
            self._session.drop()
        else:
            self._session.cache.remove(each)

    def _source(self, each: state.Sequence) -> str:
        return each.name or ("live" if each is self._session.running else "cache")

    def _entry(self, each: state.Sequence) -> Entry:
        live = each is self._session.running
        checkpoints = list(each.checkpoints.values())
        page_bytes, shared = self._runner.pool.page_bytes, each.pages.shared
        return Entry(
            id=each.id,
            kind="live" if live else "session" if each.name else "cache",
            session_id=each.name,
            tokens=len(each),
            bytes=len(each.pages) * page_bytes + sum(state.nbytes for state in checkpoints),
            shared_bytes=shared * page_bytes,
            checkpoints=tuple(sorted(each.checkpoints)),
            hits=each.hits,
            parent=each.parent,
            pinned=each.pinned,
            last_used=each.last_used,
            in_use=live and self._interrupted() is not None,
        )


def _require_restorable(source: state.Sequence, count: int) -> None:
    """Refuse a position that `source` cannot be continued from, naming the nearest ones that it can."""
    if 0 < count <= len(source) and source.reusable(count) == count:
        return
    places = source.positions()
    if places is None:
        places = [1, len(source)]
    below = max((place for place in places if place <= count), default=0)
    above = min((place for place in places if place >= count), default=places[-1])
    raise RequestError(
        "position_not_restorable",
        f"session of {len(source)} tokens cannot be continued from token {count}; nearest: {below}, {above}",
        param="at_tokens",
        facts={"nearest_below": below, "nearest_above": above},
    )


def _not_found(name: str | None) -> RequestError:
    what = "there is no live sequence" if name is None else f"there is no session {name!r}"
    return RequestError("session_not_found", what, param="session_id")
