# SPDX-License-Identifier: Apache-2.0
"""The credit window against a plain model of it: sets of what was sent and what was acknowledged."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.ack import AckError, Flow, State


class Machine(RuleBasedStateMachine):
    """An engine that steps when it may, and a reader that does anything."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = Flow(window=3)
        self.smallest = self.largest = 3
        self.sent: set[int] = set()
        self.arrived: set[int] = set()
        self.paused = self.ended = False

    @precondition(lambda self: self.flow.may_step and not self.ended)
    @rule(text=st.booleans())
    def step(self, text: bool) -> None:
        if self.flow.cancelled is not None:
            self.flow.finish()
            self.ended = True
        elif text:
            assert not self.paused
            number = self.flow.count()
            assert number not in self.sent
            self.sent.add(number)
            assert len(self.sent) - len(self.arrived) <= self.largest

    @rule(seq=st.integers(0, 40), window=st.none() | st.integers(1, 9))
    def ack(self, seq: int, window: int | None) -> None:
        before = (self.flow.acked, self.flow.window)
        news = set(range(1, seq + 1)) - self.arrived
        if not set(range(1, seq + 1)) <= self.sent:
            with pytest.raises(AckError):
                self.flow.ack(seq, window)
            assert (self.flow.acked, self.flow.window) == before
            return
        assert self.flow.ack(seq, window) == bool(news)
        self.arrived |= news
        if window is not None:
            self.largest = max(self.largest, window)

    @rule()
    def pause(self) -> None:
        alive = not self.ended and self.flow.cancelled is None
        assert self.flow.pause() == (alive and not self.paused)
        self.paused = self.paused or alive

    @rule()
    def resume(self) -> None:
        assert self.flow.resume() == (self.paused and not self.ended)
        self.paused = False

    @rule(reason=st.sampled_from(["cancelled", "flow_timeout"]))
    def cancel(self, reason: str) -> None:
        before = self.flow.cancelled
        assert self.flow.cancel(reason) == (before is None and not self.ended)
        if before is not None:
            assert self.flow.cancelled == before

    @invariant()
    def counts(self) -> None:
        assert (self.flow.sent, self.flow.acked) == (len(self.sent), len(self.arrived))
        assert self.flow.window is not None
        assert self.flow.credit == len(self.arrived) + self.flow.window - len(self.sent)

    @invariant()
    def never_stuck(self) -> None:
        """Whatever happened, everything acknowledged, resumed or cancelled lets the engine go on."""
        rest = Flow(self.flow.window, self.flow.sent, self.flow.acked, self.flow.paused, self.flow.cancelled)
        rest.resume()
        rest.ack(rest.sent)
        assert rest.may_step
        held = Flow(self.flow.window, self.flow.sent, self.flow.acked, self.flow.paused, self.flow.cancelled)
        held.cancel("cancelled")
        assert held.may_step

    def teardown(self) -> None:
        self.flow.cancel("cancelled")
        assert self.ended or self.flow.state is State.CANCELLING


TestFlow = Machine.TestCase
TestFlow.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


def test_without_a_window_nothing_is_counted_against() -> None:
    flow = Flow()
    for expected in range(1, 1000):
        assert flow.may_step
        assert flow.count() == expected
    assert flow.credit is None
    assert flow.ack(500, window=1)
    assert flow.window is None


def test_a_smaller_window_may_leave_negative_credit() -> None:
    flow = Flow(window=4)
    for _ in range(4):
        flow.count()
    assert flow.state is State.STALLED
    assert flow.ack(1, window=1)
    assert (flow.credit, flow.state) == (-2, State.STALLED)
    flow.ack(4)
    assert (flow.credit, flow.state) == (1, State.RUNNING)
