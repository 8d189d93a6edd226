# SPDX-License-Identifier: Apache-2.0
"""The table of the routes under /engine/v1, and how the files of named sessions come and go by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from cecilia.state.snapshot import sweep
from server import log
from server.engine_v1 import generation, text
from server.engine_v1.cache import CacheRoutes
from server.engine_v1.status import StatusRoutes
from server.errors import ApiError
from server.fields import Body, parse_json
from server.http.exchange import Exchange
from server.http.responses import json_response
from server.openai.chat import ChatService
from server.openai.objects import Object
from server.worker import Engine, Job

Route = Callable[[Exchange], Awaitable[None]]
PREFIX = "/engine/v1/"
FINISH_SECONDS = 10.0


class EngineRoutes:
    """`session_dir`: where sessions with a name are kept; None keeps them in memory alone."""

    def __init__(self, service: ChatService, session_dir: Path | None) -> None:
        self._service = service
        self._cache = CacheRoutes(service.worker, session_dir)
        self._status = StatusRoutes(service)
        self._saving: set[asyncio.Task[None]] = set()
        if session_dir is not None:
            for orphan in sweep(session_dir):
                log.info("snapshot_removed", file=orphan.name, reason="unfinished")
            service.before = self._bring_back
            service.after = self._keep

    def table(self) -> dict[str, dict[str, Route]]:
        """Path -> method -> route."""
        generations = self._service.generations
        gets: dict[str, Callable[[], Object | Awaitable[Object]]] = {
            "status": self._status.status,
            "capabilities": self._status.capabilities,
            "memory": self._status.memory,
            "generation/status": lambda: generation.status(generations),
            "cache/status": self._cache.status,
        }
        posts: dict[str, Callable[[Body], Object | Awaitable[Object]]] = {
            "tokenize": lambda body: text.tokenize(self._engine(), body),
            "detokenize": lambda body: text.detokenize(self._engine(), body),
            "generation/pause": lambda body: generation.pause(generations, body),
            "generation/resume": lambda body: generation.resume(generations, body),
            "cancel": lambda body: generation.cancel(generations, body),
            "flow/ack": lambda body: generation.ack(generations, body),
            "cache/probe": self._cache.probe,
            "cache/clear": self._cache.clear,
            "cache/fork": self._cache.fork,
            "cache/save": self._cache.save,
            "cache/restore": self._cache.restore,
        }
        table = {PREFIX + name: {"GET": self._get(name, answer)} for name, answer in gets.items()}
        return table | {PREFIX + name: {"POST": self._post(answer)} for name, answer in posts.items()}

    def _engine(self) -> Engine:
        return self._service.worker.loaded.result()

    def _get(self, name: str, answer: Callable[[], Object | Awaitable[Object]]) -> Route:
        async def route(exchange: Exchange) -> None:
            if name.startswith("cache/"):
                self._service.gate.require_open()
            exchange.send(json_response(await _value(answer())))

        return route

    def _post(self, answer: Callable[[Body], Object | Awaitable[Object]]) -> Route:
        async def route(exchange: Exchange) -> None:
            self._service.gate.require_open()
            body = exchange.request.body
            exchange.send(json_response(await _value(answer(parse_json(body) if body else {}))))

        return route

    async def _bring_back(self, name: str) -> None:
        """Restore the snapshot of a session that is not in memory."""
        if any(entry.session_id == name for entry in self._engine().sessions.entries()):
            return
        if self._cache.saved(name) and not self._engine().sessions.resumable(name):
            try:
                entry = await self._cache.restore_session(name)
                log.info("session_restored", session=name, tokens=entry["tokens"])
            except ApiError as error:  # of another model or damaged: the turn is computed from its messages
                log.warning("session_not_restored", session=name, code=error.code, reason=error.message)

    async def finish(self) -> None:
        """Wait for the snapshots that are being written, but not for an engine that does not end its step."""
        if self._saving:
            await asyncio.wait(self._saving, timeout=FINISH_SECONDS)

    def _keep(self, name: str, job: Job) -> None:
        """Write the session's snapshot once the engine has let go of it."""
        task = asyncio.ensure_future(self._save(name, job))
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    async def _save(self, name: str, job: Job) -> None:
        await job.let_go()
        try:
            saved = await self._cache.save_session(name)
            log.info("session_saved", session=name, tokens=saved["tokens"], bytes=saved["bytes"])
        except ApiError as error:
            if error.code != "session_not_found":  # a turn that was refused left nothing to keep
                log.warning("session_not_saved", session=name, code=error.code, reason=error.message)


async def _value(answer: Object | Awaitable[Object]) -> Object:
    return answer if isinstance(answer, dict) else await answer
