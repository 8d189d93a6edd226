# SPDX-License-Identifier: Apache-2.0
"""A session reuses what any earlier sequence shares with a prompt; an error costs no more than its step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from cecilia.errors import MemoryLimitError
from cecilia.state.pages import PagePool
from cecilia.state.session import Session
from cecilia.state.state import State


class Recorder:
    """A model that notes what it is asked for: (tokens, first position, pages there)."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], int, int]] = []
        self.error: BaseException | None = None

    def forward(
        self, tokens: Sequence[int], state: State, first: int, *, last_only: bool
    ) -> NDArray[np.float32]:
        if self.error is not None:
            raise self.error
        self.calls.append((list(tokens), first, len(state.pages)))
        if state.fixed.nbytes:
            memoryview(state.fixed)[0] += 1  # how often it was changed
        return np.zeros((1 if last_only else len(tokens), 4), np.float32)


def make(pages: int = 8, state_bytes: int = 0) -> tuple[Recorder, PagePool, Session]:
    model, pool = Recorder(), PagePool(64, 64 * pages)
    return model, pool, Session(model, pool, state_bytes)


def test_evaluate_appends_at_the_next_position() -> None:
    model, pool, session = make()
    assert session.evaluate([1, 2, 3]).shape == (1, 4)
    assert session.evaluate(range(100), last_only=False).shape == (100, 4)
    assert model.calls == [([1, 2, 3], 0, 1), (list(range(100)), 3, 2)]
    assert session.tokens == [1, 2, 3, *range(100)]
    assert pool.in_use == 2


@pytest.mark.parametrize(
    ("held", "wanted", "reused"),
    [
        ([], [1, 2], 0),
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3], [1, 2, 3], 2),  # the last one is evaluated again, for its logits
        ([1, 2, 3], [1, 2], 1),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2, 3], [9], 0),
        ([1, 2, 3], [], 0),
    ],
)
def test_sync_keeps_the_common_prefix(held: list[int], wanted: list[int], reused: int) -> None:
    _, _, session = make()
    if held:
        session.evaluate(held)
    assert session.reusable(wanted) == reused
    assert session.tokens == held
    assert session.sync(wanted) == reused
    assert session.tokens == held[:reused]


def test_sync_shares_pages_and_clear_returns_them() -> None:
    _, pool, session = make()
    session.evaluate([7] * 200)
    assert pool.in_use == 4
    session.sync([7] * 65 + [8])
    assert (pool.in_use, len(session.running.pages), session.running.pages.shared) == (4, 2, 2)
    session.evaluate([8])  # the page of position 65 is written to, so it is copied
    assert (pool.in_use, session.running.pages.shared) == (5, 1)
    session.clear()
    assert (pool.in_use, session.tokens, len(session.cache)) == (0, [], 0)


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_failed_evaluation_leaves_the_session_as_it_was(error: BaseException) -> None:
    model, pool, session = make()
    session.evaluate([1] * 64)
    model.error = error
    with pytest.raises(type(error)):
        session.evaluate([2] * 65)
    assert (session.tokens, pool.in_use) == ([1] * 64, 1)
    model.error = None
    session.evaluate([3])
    assert model.calls[-1] == ([3], 64, 2)


def test_no_memory_leaves_the_session_as_it_was() -> None:
    model, pool, session = make(pages=2)
    session.evaluate([1] * 100)
    with pytest.raises(MemoryLimitError):
        session.evaluate([2] * 29)
    assert (len(model.calls), len(session.tokens), pool.in_use) == (1, 100, 2)
    session.evaluate([2] * 28)
    assert len(session.tokens) == 128


@pytest.mark.parametrize(
    ("wanted", "reused"),
    [
        ([1, 2, 3, 4, 5], 4),  # all of it: the state is at hand
        ([1, 2, 3, 4], 2),  # the last one is wanted again: back to the checkpoint
        ([1, 2, 3, 9], 2),
        ([1, 2, 9], 2),
        ([1, 9], 0),
    ],
)
def test_a_recurrent_state_goes_back_to_checkpoints_alone(wanted: list[int], reused: int) -> None:
    _, _, session = make(state_bytes=64)
    session.evaluate([1, 2])
    session.checkpoint()
    session.evaluate([3, 4])
    assert session.reusable(wanted) == reused
    assert session.sync(wanted) == reused
    assert session.tokens == wanted[:reused]
    assert memoryview(session.fixed)[0] == reused // 2  # changed once per call


def test_an_error_in_the_model_takes_a_recurrent_state_back_to_its_checkpoint() -> None:
    model, pool, session = make(state_bytes=64)
    session.evaluate([1, 2])
    session.checkpoint()
    session.evaluate([3] * 100)
    model.error = RuntimeError("no")
    with pytest.raises(RuntimeError, match="no"):
        session.evaluate([4])
    assert (session.tokens, pool.in_use, memoryview(session.fixed)[0]) == ([1, 2], 1, 1)


def test_an_error_without_a_checkpoint_takes_a_recurrent_state_with_it() -> None:
    model, pool, session = make(state_bytes=64)
    session.evaluate([1, 2])
    model.error = RuntimeError("no")
    with pytest.raises(RuntimeError, match="no"):
        session.evaluate([3])
    assert (session.tokens, pool.in_use) == ([], 0)
    assert not any(memoryview(session.fixed))


def test_a_foreign_request_between_two_turns_costs_the_chat_nothing() -> None:
    _, _, session = make()
    session.evaluate([1, 2, 3, 4])
    assert session.sync([7, 7]) == 0  # a title is wanted
    session.evaluate([7, 7])
    assert session.sync([1, 2, 3, 4, 5]) == 4
    assert session.sync([7, 7, 7]) == 2


def test_both_branches_of_a_chat_can_be_gone_on_with() -> None:
    _, _, session = make(state_bytes=64)
    session.evaluate([1, 2])
    session.checkpoint()
    session.evaluate([3, 4])
    assert session.sync([1, 2, 8, 9]) == 2
    session.evaluate([8])
    assert session.sync([1, 2, 3, 4, 5]) == 4
    assert memoryview(session.fixed)[0] == 2
    assert session.sync([1, 2, 8, 9]) == 3
    assert memoryview(session.fixed)[0] == 2


def test_another_salt_sees_nothing() -> None:
    _, _, session = make()
    session.sync([1, 2, 3, 4], salt="mine")
    session.evaluate([1, 2, 3, 4])
    assert session.reusable([1, 2, 3, 4]) == session.reusable([1, 2, 3, 4], salt="yours") == 0
    assert session.sync([1, 2, 3, 4, 5], salt="yours") == 0
    assert session.sync([1, 2, 3, 4, 5], salt="mine") == 4


def test_a_named_sequence_is_gone_on_with_by_its_session_alone() -> None:
    _, _, session = make()
    session.sync([1, 2, 3], name="mine")
    session.evaluate([1, 2, 3])
    mine = session.running
    assert session.sync([1, 2, 3, 4]) == 3
    assert session.running is not mine
    assert session.cache.named("mine") is mine
    session.evaluate([4])
    assert session.sync([1, 2, 3, 9], name="mine") == 3
    assert session.running is mine


def test_sequences_at_rest_make_room_the_least_worthy_first() -> None:
    _, pool, session = make(pages=4)
    session.evaluate([1] * 64)
    session.sync([2])
    session.evaluate([2] * 64)
    session.sync([1] * 64 + [3])  # the first one is wanted again
    session.evaluate([3])
    session.sync([4])
    session.evaluate([4] * 128)
    assert pool.in_use <= 4
    assert session.reusable([2] * 64 + [0]) == 0
    assert session.reusable([1] * 64 + [0]) == 64


def test_without_room_nothing_but_the_cache_is_lost() -> None:
    _, _, session = make(pages=3)
    session.evaluate([1] * 64)
    session.sync([2])
    session.evaluate([2] * 64)
    with pytest.raises(MemoryLimitError):
        session.evaluate([3] * 192)
    assert session.tokens == [2] * 64
    session.evaluate([3] * 128)


def test_a_pinned_sequence_is_not_evicted() -> None:
    _, _, session = make(pages=3)
    session.evaluate([1] * 64)
    session.running.pinned = True
    session.sync([2])
    with pytest.raises(MemoryLimitError):
        session.evaluate([2] * 192)
    assert session.reusable([1] * 64 + [0]) == 64


def test_what_another_sequence_covers_is_not_kept_twice() -> None:
    _, _, session = make()
    session.evaluate([1, 2, 3])
    session.fork(session.running, 2)
    named = session.fork(session.running, 1, name="kept")
    assert len(session.cache) == 2
    session.sync([9])
    assert [entry.tokens for entry in session.cache] == [[1], [1, 2, 3]]
    assert session.cache.named("kept") is named


def test_checkpoints_are_thinned_where_they_are_densest() -> None:
    _, pool, session = make(state_bytes=64)
    session.most_checkpoints = 5
    for count in (1, 10, 1, 10, 10, 10, 10):
        session.evaluate([1] * count)
        session.checkpoint()
    # 1 11 12 22 32 42 52: of those between the first and the last three, the one closest behind another goes
    assert sorted(session.running.checkpoints) == [1, 22, 32, 42, 52]
    assert pool.charged == 5 * 64
    session.clear()
    assert (pool.charged, pool.used_bytes) == (0, 0)


def test_a_checkpoint_without_room_is_none() -> None:
    _, _, session = make(pages=1, state_bytes=64)
    session.evaluate([1])
    session.checkpoint()
    assert session.running.checkpoints == {}
    assert session.sync([1, 2]) == 1  # the state at hand serves all the same


def test_a_recurrent_session_is_branched_off_where_it_stands() -> None:
    """Its state is at hand without a checkpoint, but another request needs one of its own to go on from."""
    _, _, session = make(state_bytes=64)
    session.sync([1, 2], name="mine")
    session.evaluate([1, 2])
    mine = session.running
    assert session.sync([1, 2, 3]) == 2
    assert (session.running is mine, session.tokens, memoryview(session.fixed)[0]) == (False, [1, 2], 1)
    assert session.cache.named("mine") is mine


def test_without_room_for_a_checkpoint_another_request_starts_again() -> None:
    _, _, session = make(pages=1, state_bytes=64)
    session.sync([1, 2], name="mine")
    session.evaluate([1, 2])
    assert session.sync([1, 2, 3]) == 0
    assert (session.tokens, any(memoryview(session.fixed))) == ([], False)
