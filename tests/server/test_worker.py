# SPDX-License-Identifier: Apache-2.0
"""The engine thread and the queue between it and the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from unittest import mock

import pytest

from cecilia.engine.job import ChatRequest, Delta, Event, Finished, Prefill
from cecilia.errors import CeciliaError, ModelFileError, RequestError
from cecilia.sampler import SamplingParams
from server.worker import QUEUE_STEPS, Job, Worker
from tests.server.fake_engine import PATIENCE, FakeEngine, Hold

REQUEST = ChatRequest([{"role": "user", "content": "a b c d e f"}], SamplingParams(), None)


class Desk:
    """A worker with a fake engine, and the count of jobs the engine has let go of."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.worker = Worker(asyncio.get_running_loop())
        self.worker.start(lambda: engine)
        self.released = 0
        self.release_seen = asyncio.Event()

    def submit(self) -> Job:
        return self.worker.submit(REQUEST, self._released)

    def _released(self) -> None:
        self.released += 1
        self.release_seen.set()

    async def wait_released(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.release_seen.wait()


@pytest.fixture
async def desk_of() -> AsyncIterator[Callable[..., Desk]]:
    desks: list[Desk] = []

    def make(**settings: object) -> Desk:
        desks.append(Desk(FakeEngine(**settings)))  # type: ignore[arg-type]
        return desks[-1]

    yield make
    for desk in desks:
        assert desk.worker.stop(PATIENCE)
        assert desk.engine.closed


async def drain(job: Job) -> tuple[list[Event], Finished]:
    events: list[Event] = []
    async with asyncio.timeout(PATIENCE):
        while not isinstance(news := await job.events(), Finished):
            events += news
    return events, news


async def whole(job: Job) -> Finished:
    await job.prepared()
    return (await drain(job))[1]


async def reached(hold: Hold) -> None:
    assert await asyncio.to_thread(hold.reached.wait, PATIENCE)


async def test_events_arrive_in_order_and_the_result_last(desk_of: Callable[..., Desk]) -> None:
    desk = desk_of(script=["a", "b", "c"])
    job = desk.submit()
    assert (await job.prepared()).tokens == tuple(range(6))
    events, finished = await drain(job)
    assert [event for event in events if isinstance(event, Delta)] == [
        Delta("a", "", 1),
        Delta("b", "", 2),
        Delta("c", "", 3),
    ]
    # Of the prefill reports only the newest is sure to arrive.
    assert [event for event in events if isinstance(event, Prefill)][-1] == Prefill(6, 6)
    assert (finished.cause, finished.usage.completion_tokens) == ("eos", 3)
    assert desk.released == 1


async def test_everything_runs_on_one_thread_that_is_not_the_loops(desk_of: Callable[..., Desk]) -> None:
    desk = desk_of()
    for _ in range(3):
        await drain(desk.submit())
    assert len(desk.engine.threads) == 1
    assert threading.get_ident() not in desk.engine.threads


async def filled(job: Job) -> None:
    async with asyncio.timeout(PATIENCE):
        while job.queued < QUEUE_STEPS:
            await asyncio.sleep(0)


async def test_a_full_queue_holds_the_engine(desk_of: Callable[..., Desk]) -> None:
    beyond = Hold()
    beyond.go.set()
    desk = desk_of(script=[*["x"] * QUEUE_STEPS, beyond, "y"])
    job = desk.submit()
    await filled(job)
    assert not beyond.reached.is_set()
    events, finished = await drain(job)
    assert beyond.reached.is_set()
    assert sum(isinstance(event, Delta) for event in events) == QUEUE_STEPS + 1
    assert finished.usage.completion_tokens == QUEUE_STEPS + 1


async def test_a_cancel_frees_an_engine_that_is_held_by_a_full_queue(desk_of: Callable[..., Desk]) -> None:
    desk = desk_of(script=["x"] * (3 * QUEUE_STEPS))
    job = desk.submit()
    await filled(job)
    job.cancel()
    await desk.wait_released()
    assert desk.engine.outcomes == ["cancelled"]


@pytest.mark.parametrize("where", ["prepare", "prefill", "decode"])
async def test_a_cancel_is_seen_at_every_stage(desk_of: Callable[..., Desk], where: str) -> None:
    hold = Hold()
    desk = desk_of(
        prepare_step=hold if where == "prepare" else None,
        prefill_steps=[hold] if where == "prefill" else [],
        script=["a", hold, "b", "c"] if where == "decode" else ["a"],
    )
    job = desk.submit()
    await reached(hold)
    job.cancel()
    hold.go.set()
    await desk.wait_released()
    assert desk.released == 1
    assert desk.engine.outcomes == ["cancelled"]
    await drain(desk.submit())


async def test_a_job_cancelled_before_its_turn_never_touches_the_engine(desk_of: Callable[..., Desk]) -> None:
    hold = Hold()
    desk = desk_of(script=[hold, "a"])
    first, second = desk.submit(), desk.submit()
    await reached(hold)
    second.cancel()
    hold.go.set()
    await drain(first)
    with pytest.raises(RequestError):
        await second.prepared()
    assert desk.released == 2
    assert len(desk.engine.requests) == 1


ERRORS = [
    RequestError("invalid_value", "no"),
    CeciliaError("numeric_error", "nan"),
    ZeroDivisionError("ours"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["prepare", "prefill", "decode"])
async def test_an_error_at_any_stage_reaches_the_request_and_frees_the_engine(
    desk_of: Callable[..., Desk], where: str, error: Exception
) -> None:
    desk = desk_of()
    if where == "prepare":
        desk.engine.prepare_step = error
    elif where == "prefill":
        desk.engine.prefill_steps = ["", error]
    else:
        desk.engine.script = ["a", error]
    job = desk.submit()
    with pytest.raises(type(error)) as caught:
        await whole(job)
    assert caught.value is error
    await desk.wait_released()
    assert desk.released == 1
    desk.engine.prepare_step, desk.engine.prefill_steps, desk.engine.script = None, [], ["fine"]
    assert (await drain(desk.submit()))[1].cause == "eos"


async def test_a_failed_load_is_told() -> None:
    def load() -> FakeEngine:
        raise ModelFileError("truncated", "too short")

    worker = Worker(asyncio.get_running_loop())
    worker.start(load)
    with pytest.raises(ModelFileError):
        await asyncio.wait_for(worker.loaded, PATIENCE)
    assert worker.stop(PATIENCE)


async def test_the_loop_is_woken_once_for_many_events(desk_of: Callable[..., Desk]) -> None:
    begin, end = Hold(), Hold()
    desk = desk_of(script=[begin, *["x"] * 50, end, "y"])
    job = desk.submit()
    await reached(begin)
    await job.events()
    loop = asyncio.get_running_loop()
    with mock.patch.object(loop, "call_soon_threadsafe", wraps=loop.call_soon_threadsafe) as wake:
        begin.go.set()
        assert end.reached.wait(PATIENCE)  # blocks the loop on purpose: it cannot take events meanwhile
        assert wake.call_count == 1
        end.go.set()
        _, finished = await drain(job)
    assert finished.usage.completion_tokens == 51


async def test_idle_work_waits_for_a_request_and_goes_on_after_it(desk_of: Callable[..., Desk]) -> None:
    first, second = Hold(), Hold()
    desk = desk_of(idle_steps=[first, second])
    await reached(first)
    job = desk.submit()
    first.go.set()
    assert (await whole(job)).cause == "eos"
    await reached(second)
    second.go.set()


async def test_idle_work_that_fails_is_told_and_ends(
    desk_of: Callable[..., Desk], caplog: pytest.LogCaptureFixture
) -> None:
    desk = desk_of(idle_steps=[CeciliaError("insufficient_memory", "no room"), "never"])
    assert (await whole(desk.submit())).cause == "eos"
    assert "weights_not_moved code=insufficient_memory" in caplog.text
    assert desk.engine.idle_steps == ["never"]
