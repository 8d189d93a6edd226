# SPDX-License-Identifier: Apache-2.0
"""Admission, as a state machine with a clock of the test's."""

from __future__ import annotations

import pytest

from cecilia.engine.job import Finished, Timings, Usage
from server.errors import ApiError
from server.gate import Gate, Phase, Ticket


@pytest.fixture
def gate() -> Gate:
    gate = Gate(lambda: 0.0)
    gate.phase = Phase.OPEN
    return gate


def refusal(gate: Gate) -> ApiError:
    with pytest.raises(ApiError) as caught:
        gate.enter()
    return caught.value


def finished(*, prompt: int, cached: int, completion: int, cause: str = "eos") -> Finished:
    """100 ms for the prompt, 1000 ms for the answer."""
    return Finished("stop", cause, Usage(prompt, completion, cached, 0), Timings(100.0, 1000.0))  # type: ignore[arg-type]


def busy(gate: Gate, *, prompt_left: int = 0, produced: int = 0, limit: int = 10_000) -> Ticket:
    ticket = gate.enter()
    ticket.prompt_left, ticket.produced, ticket.limit = prompt_left, produced, limit
    return ticket


def test_one_at_a_time(gate: Gate) -> None:
    ticket = gate.enter()
    assert gate.busy
    error = refusal(gate)
    assert (error.status, error.code) == (429, "server_busy")
    ticket.release()
    assert not gate.busy
    gate.enter()


def test_how_far_the_running_generation_is() -> None:
    times = iter([5.0, 7.25])  # it starts, it is asked for
    gate = Gate(lambda: next(times))
    gate.phase = Phase.OPEN
    assert gate.activity() is None
    ticket = busy(gate, prompt_left=300, produced=4)
    assert gate.activity() == {"prompt_left": 300, "completion": 4, "seconds": 2.2}
    ticket.release()
    assert gate.activity() is None


def test_a_second_release_frees_nobody_elses_slot(gate: Gate) -> None:
    first = gate.enter()
    first.release()
    gate.enter()
    first.release()
    assert gate.busy


@pytest.mark.parametrize(
    ("phase", "code"), [(Phase.LOADING, "model_loading"), (Phase.CLOSING, "shutting_down")]
)
def test_no_work_is_taken_before_and_after(gate: Gate, phase: Phase, code: str) -> None:
    gate.phase = phase
    error = refusal(gate)
    assert (error.status, error.code) == (503, code)
    assert int(dict(error.headers)["Retry-After"]) >= 1
    assert not gate.busy


def test_the_wait_is_what_measured_speeds_make_of_the_rest(gate: Gate) -> None:
    # 1000 tokens a second in, 50 a second out.
    gate.observe(finished(prompt=150, cached=50, completion=50))
    busy(gate, prompt_left=2000, produced=0, limit=40)
    # 2000 / 1000 + 40 / 50
    assert gate.remaining() == pytest.approx(2.8)
    headers = dict(refusal(gate).headers)
    assert headers == {"Retry-After": "3", "retry-after-ms": "2800"}


def test_the_wait_shrinks_with_progress(gate: Gate) -> None:
    gate.observe(finished(prompt=100, cached=0, completion=50))
    ticket = busy(gate, prompt_left=1000, limit=40)
    waits = [gate.remaining()]
    ticket.prompt_left = 0
    waits.append(gate.remaining())
    ticket.produced = 39
    waits.append(gate.remaining())
    assert waits == sorted(waits, reverse=True)
    assert waits[-1] == pytest.approx(1 / 50)


@pytest.mark.parametrize("produced", [0, 40, 10_000])
def test_the_wait_is_a_whole_second_at_least(gate: Gate, produced: int) -> None:
    busy(gate, produced=produced, limit=produced)
    assert dict(refusal(gate).headers)["Retry-After"] == "1"


def test_a_long_wait_is_capped_and_not_to_be_retried(gate: Gate) -> None:
    gate.observe(finished(prompt=100, cached=0, completion=50))
    busy(gate, prompt_left=100_000)
    headers = dict(refusal(gate).headers)
    assert headers == {"Retry-After": "60", "retry-after-ms": "60000", "x-should-retry": "false"}


def test_a_cancelled_answer_says_nothing_about_lengths(gate: Gate) -> None:
    busy(gate).release()
    before = Gate(lambda: 0.0)
    before.phase = Phase.OPEN
    for each, cause in ((gate, "cancelled"), (before, "eos")):
        each.observe(finished(prompt=100, cached=0, completion=1, cause=cause))
        busy(each)
    assert gate.remaining() > before.remaining()


def test_nothing_measured_divides_by_nothing(gate: Gate) -> None:
    gate.observe(Finished("stop", "eos", Usage(5, 0, 5, 0), Timings(0.0, 0.0)))
    busy(gate, prompt_left=1)
    assert gate.remaining() > 0
