# SPDX-License-Identifier: Apache-2.0
"""The life of the process: bind, load, serve, drain, end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cecilia.errors import UsageError
from server import listen, log
from server.app import App
from server.config import Config
from server.gate import Gate, Phase
from server.http.connection import Connection, Connections
from server.openai.chat import ChatService
from server.origin import OriginPolicy, is_loopback
from server.pages import load_page
from server.worker import Engine, Worker

DRAIN_SECONDS = 10.0
ENGINE_STOP_SECONDS = 5.0

# What a line at the start says of weights that are not the ones somebody published.
_WEIGHTS = {
    "random": "random (not a trained model)",
    "trained-here": "trained-here (not a published model)",
}

Progress = Callable[[float], None]
Load = Callable[[Config, Progress], Engine]


def run(config: Config, load: Load) -> None:
    """Serve until a signal; raises CeciliaError when it cannot. `load` is called on the engine thread."""
    if config.session_dir is not None:
        _make_directory(Path(config.session_dir))
    sockets = listen.bind(config.host, config.port)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(Service(config, sockets), load))


def _make_directory(path: Path) -> None:
    """A directory for this user alone: what is said in sessions is in their snapshots."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError("bad_session_dir", f"--session-dir {path}: {error.strerror}") from error


async def _serve(service: Service, load: Load) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, service.stop)
    await service.run(load)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # no wheel for this platform: asyncio's own loop does the same, slower
        return None
    return uvloop.new_event_loop


class Service:
    """One running server."""

    def __init__(self, config: Config, sockets: list[socket.socket]) -> None:
        self._config = config
        self._sockets = sockets
        self._connections = Connections()
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self.ready = asyncio.Event()

    @property
    def address(self) -> str:
        """http://host:port"""
        return listen.url(self._sockets)

    async def run(self, load: Load) -> None:
        """Serve until told to stop; raises what loading raised."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        worker, gate = Worker(loop), Gate(loop.time)
        parsing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cecilia-parse")
        # A file may turn out to hold a model that has a name; until it is read it goes by its own.
        model_id = self._config.model_id or Path(self._config.model).stem
        service = ChatService(worker, gate, loop, parsing, model_id)
        directory = self._config.session_dir
        app = App(
            service,
            policy=self._policy(),
            chat_page=load_page("chat.html"),
            session_dir=None if directory is None else Path(directory),
        )
        servers = [
            await loop.create_server(lambda: self._connection(app, loop), sock=opened)
            for opened in self._sockets
        ]
        progress = _Progress(app, loop)
        worker.start(lambda: load(self._config, progress))
        try:
            await self._until_loaded(worker)
            if worker.loaded.done():
                engine = worker.loaded.result()
                service.model_id = self._config.model_id or str(engine.info["id"])
                gate.phase = Phase.OPEN
                self._announce(engine, service.model_id, loop.time() - started)
                self.ready.set()
                await self._stopping.wait()
        finally:
            gate.phase = Phase.CLOSING
            for server in servers:
                server.close()
            await self._drain()
            await app.engine_routes.finish()
            stopped = worker.stop(ENGINE_STOP_SECONDS)
            parsing.shutdown(wait=stopped, cancel_futures=True)
            log.info("service_stopped", clean=stopped)

    @property
    def stopping(self) -> bool:
        """Whether the end has been asked for."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """First call: let the answer in work end. Second call: now."""
        if self._stopping.is_set():
            self._hurry.set()
        else:
            log.info("service_stopping", busy=sum(connection.busy for connection in self._connections))
            self._stopping.set()

    def _connection(self, app: App, loop: asyncio.AbstractEventLoop) -> Connection:
        return Connection(app.handle, clock=loop, open_connections=self._connections)

    def _policy(self) -> OriginPolicy:
        local = all(is_loopback(opened.getsockname()[0]) for opened in self._sockets)
        if not local:
            log.warning(
                "open_to_network", address=self.address, hint="anyone who reaches this port may use it"
            )
        return OriginPolicy(loopback_only=local)

    async def _until_loaded(self, worker: Worker) -> None:
        """Wait for the engine, or for a signal; raises what loading raised."""
        await _first(asyncio.wait({worker.loaded}), self._stopping.wait())
        if worker.loaded.done():
            worker.loaded.result()

    def _announce(self, engine: Engine, model_id: str, seconds: float) -> None:
        info = engine.info
        weights = str(info["weights"])
        log.info(
            "service_ready",
            address=self.address,
            model=model_id,
            weights=_WEIGHTS.get(weights, weights),
            weights_in=info["weights_in"],
            context=engine.context,
            threads=info["threads"],
            profile=info["profile"],
            isa=info["isa"],
            seconds=seconds,
        )

    async def _drain(self) -> None:
        """Idle connections close at once, busy ones after their answer, all of them after a while."""
        for connection in self._connections:
            connection.drain()
        await _first(self._connections.all_gone(), self._hurry.wait(), timeout=DRAIN_SECONDS)
        for connection in self._connections:
            connection.abort()


async def _first(*waits: Coroutine[Any, Any, object], timeout: float | None = None) -> None:
    """Wait until one of `waits` is over, or the time; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


class _Progress:
    """Loading progress, called on the engine thread: to /health, and one log line per tenth."""

    def __init__(self, app: App, loop: asyncio.AbstractEventLoop) -> None:
        self._app = app
        self._loop = loop
        self._told = 0

    def __call__(self, share: float) -> None:
        self._app.progress = share  # one attribute, one writer: no lock needed
        tenth = int(share * 10)
        if tenth > self._told:
            self._told = tenth
            log.info("loading", percent=tenth * 10)
