# SPDX-License-Identifier: Apache-2.0
"""Files of sessions: clients that go away while a thread works on one, and when a turn is saved."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

from server.engine_v1.cache import CacheRoutes
from server.engine_v1.routes import EngineRoutes
from server.worker import Job, Worker
from tests.server.fake_engine import PATIENCE


class Writer:
    """A frozen session whose write takes until the test lets it end."""

    sequence = range(7)

    def __init__(self) -> None:
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.at_once = self.most = 0

    def write(self, _path: Path) -> int:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.begun.release()
        assert self.go.acquire(timeout=PATIENCE)
        self.at_once -= 1
        return 99


def routes(frozen: Any, directory: Path) -> CacheRoutes:
    """The routes over an engine that freezes every session to `frozen`."""
    engine = mock.Mock()
    engine.sessions.freeze.return_value = frozen

    def call(function: Callable[[Any], Any]) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(function(engine))
        return future

    return CacheRoutes(cast(Worker, mock.Mock(call=call)), directory)


async def test_a_write_outlives_its_client_and_the_next_one_waits_for_it(tmp_path: Path) -> None:
    writer = Writer()
    cache = routes(writer, tmp_path)
    first = asyncio.ensure_future(cache.save({"session_id": "one"}))
    assert await asyncio.to_thread(writer.begun.acquire, timeout=PATIENCE)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.ensure_future(cache.save({"session_id": "one"}))
    for _ in range(20):
        await asyncio.sleep(0)
    assert writer.at_once == 1  # the first one still writes, the second one has not begun
    writer.go.release(2)
    assert await second == {"session_id": "one", "tokens": 7, "bytes": 99}
    assert (writer.most, writer.at_once) == (1, 0)


async def test_a_session_is_saved_when_the_engine_has_let_go_of_its_turn() -> None:
    service = mock.Mock()
    engine_routes = EngineRoutes(service, None)
    order: list[str] = []
    save = mock.AsyncMock(side_effect=lambda _: order.append("saved") or {"tokens": 1, "bytes": 2})
    job = Job(mock.Mock(), asyncio.get_running_loop(), lambda: order.append("let go"))
    with mock.patch.object(engine_routes._cache, "save_session", save):
        engine_routes._keep("one", job)
        for _ in range(20):
            await asyncio.sleep(0)
        assert order == []
        job._end(None, RuntimeError("over"))
        await asyncio.wait_for(engine_routes.finish(), PATIENCE)
    assert order == ["let go", "saved"]
