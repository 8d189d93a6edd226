# SPDX-License-Identifier: Apache-2.0
"""A whole server around a fake engine, in this process, on a free port."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from server import listen
from server.config import Config
from server.service import Service
from tests.server.fake_engine import PATIENCE


@dataclass
class Running:
    """A server in a thread of its own."""

    url: str
    service: Service
    loop: asyncio.AbstractEventLoop

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def stop(self) -> None:
        """As a signal would; does nothing once the server has ended."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.service.stop)


@contextmanager
def serving(
    load: Callable[..., Any],
    *,
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    ready: bool = True,
    model_id: str | None = None,
    session_dir: str | None = None,
) -> Iterator[Running]:
    """Run a server until the block ends; `ready` waits for the engine to be loaded."""
    started = threading.Event()
    box: list[Any] = []

    def main() -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(body())

    async def body() -> None:
        sockets = listen.bind("127.0.0.1", 0)
        service = Service(
            Config(model="models/fake.l3r", model_id=model_id, session_dir=session_dir), sockets
        )
        box.append(Running(service.address, service, asyncio.get_running_loop()))
        running = asyncio.ensure_future(service.run(load))
        if ready:
            await service.ready.wait()
        started.set()
        await running

    thread = threading.Thread(target=main, name="test-server")
    thread.start()
    try:
        assert started.wait(PATIENCE)
        yield box[0]
    finally:
        box[0].stop()
        box[0].stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()
