# SPDX-License-Identifier: Apache-2.0
"""A session reuses the common prefix, and after any error holds exactly the tokens it held before."""

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


def test_sync_and_clear_return_pages() -> None:
    _, pool, session = make()
    session.evaluate([7] * 200)
    assert pool.in_use == 4
    session.sync([7] * 65 + [8])
    assert pool.in_use == 2
    session.clear()
    assert (pool.in_use, session.tokens) == (0, [])


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
    ("held", "wanted", "reused"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3], [1, 2, 3], 0),  # the last one is wanted again, and the state cannot be taken back
        ([1, 2, 3], [1, 2, 9, 4], 0),
        ([1, 2, 3], [1, 2], 0),
    ],
)
def test_a_recurrent_state_is_kept_whole_or_not_at_all(
    held: list[int], wanted: list[int], reused: int
) -> None:
    _, _, session = make(state_bytes=64)
    session.evaluate(held)
    assert session.sync(wanted) == reused
    assert session.tokens == held[:reused]
    assert memoryview(session._state.fixed)[0] == (1 if reused else 0)


def test_an_error_in_the_model_takes_a_recurrent_state_with_it() -> None:
    model, pool, session = make(state_bytes=64)
    session.evaluate([1, 2])
    model.error = RuntimeError("no")
    with pytest.raises(RuntimeError, match="no"):
        session.evaluate([3])
    assert session.tokens == []
    assert pool.in_use == 0
    assert not any(memoryview(session._state.fixed))
