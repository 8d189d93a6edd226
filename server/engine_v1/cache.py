# SPDX-License-Identifier: Apache-2.0
"""cache/probe, status, clear, fork, save and restore: what the engine keeps of earlier requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from cecilia.engine.job import ChatRequest
from cecilia.errors import CeciliaError
from cecilia.sampler import SamplingParams
from cecilia.state.snapshot import SUFFIX, SnapshotFile
from server.errors import from_engine, invalid_value, missing_parameter
from server.fields import Body, boolean, integer, string
from server.generations import conflict
from server.openai.messages import parse_messages
from server.openai.objects import Object
from server.openai.validate import session_name
from server.worker import Engine, Worker

SCOPES = ("all", "idle", "session")

T = TypeVar("T")


class CacheRoutes:
    """Needs the engine thread only to change something, and gets it between two steps of a generation."""

    def __init__(self, worker: Worker, session_dir: Path | None) -> None:
        self._worker = worker
        self._session_dir = session_dir
        self._files = asyncio.Lock()  # two writes of one session would share a file
        self._at_work: set[asyncio.Task[Object]] = set()

    async def probe(self, body: Body) -> Object:
        """POST cache/probe: what a prompt would find. The engine thread is not asked."""
        engine = self._worker.loaded.result()
        name, salt = _optional_name(body), string(body, "cache_salt") or ""

        def look() -> Object:
            tokens = tokens_of(engine, body)
            return asdict(engine.sessions.probe(tokens, salt=salt, name=name))

        return await _answered(asyncio.to_thread(look))

    async def status(self) -> Object:
        """GET cache/status. The engine thread is not asked."""
        sessions = self._worker.loaded.result().sessions
        return {
            "entries": [asdict(entry) for entry in sessions.entries()],
            "totals": asdict(sessions.totals()),
            "session_dir": self._session_dir is not None,
        }

    async def clear(self, body: Body) -> Object:
        """POST cache/clear."""
        scope, name = string(body, "scope") or "all", _optional_name(body)
        if scope not in SCOPES:
            raise invalid_value(f"scope must be one of {', '.join(SCOPES)}", "scope")
        if scope == "session" and name is None:
            raise missing_parameter("session_id")
        freed, removed = await _answered(self._worker.call(lambda engine: engine.sessions.clear(scope, name)))
        return {"freed_bytes": freed, "removed": removed}

    async def fork(self, body: Body) -> Object:
        """POST cache/fork."""
        name, at = _optional_name(body), integer(body, "at_tokens", 1)
        new, pin = _name(body, "new_session_id"), boolean(body, "pin") or False
        entry = await _answered(
            self._worker.call(lambda engine: engine.sessions.fork(name, new, at=at, pin=pin))
        )
        return asdict(entry)

    async def save(self, body: Body) -> Object:
        """POST cache/save: a session to its file; a generation at work is part of it."""
        name = _name(body, "session_id")
        return await self.save_session(name)

    async def save_session(self, name: str) -> Object:
        """Write the snapshot of session `name`; the engine goes on meanwhile."""
        return await self._to_its_end(self._save(name, self._path(name)))

    async def _save(self, name: str, path: Path) -> Object:
        async with self._files:
            snapshot = await _answered(self._worker.call(lambda engine: engine.sessions.freeze(name)))
            tokens = len(snapshot.sequence)
            nbytes = await _answered(asyncio.to_thread(snapshot.write, path))
        return {"session_id": name, "tokens": tokens, "bytes": nbytes}

    async def restore(self, body: Body) -> Object:
        """POST cache/restore: a session from its file."""
        return await self.restore_session(_name(body, "session_id"))

    async def restore_session(self, name: str) -> Object:
        """Read the snapshot of session `name`; it is checked before the engine is asked for anything."""
        return await self._to_its_end(self._restore(name, self._path(name)))

    async def _restore(self, name: str, path: Path) -> Object:
        def adopt(engine: Engine) -> Object:
            entry = engine.sessions.restore(file, name)
            return asdict(entry) | {"resumable": engine.sessions.resumable(name)}

        with await _answered(asyncio.to_thread(SnapshotFile, path)) as file:
            await _answered(asyncio.to_thread(file.verify))
            return await _answered(self._worker.call(adopt))

    async def _to_its_end(self, work: Coroutine[object, object, Object]) -> Object:
        """`work` in a task of its own: a client that goes away must not take a file from under a thread."""
        task = asyncio.ensure_future(work)
        self._at_work.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Object]) -> None:
        self._at_work.discard(task)
        if not task.cancelled():
            task.exception()  # told to the client, if there still is one

    def saved(self, name: str) -> bool:
        """Whether session `name` has a snapshot."""
        return self._session_dir is not None and self._path(name).is_file()

    def _path(self, name: str) -> Path:
        if self._session_dir is None:
            raise conflict("session_dir_unset", "the server was started without --session-dir")
        return self._session_dir / f"{name}{SUFFIX}"


def tokens_of(engine: Engine, body: Body) -> tuple[int, ...]:
    """The tokens a body means: `tokens`, or `messages` through the template; on a thread of its own."""
    tokens = body.get("tokens")
    if tokens is not None:
        if not isinstance(tokens, list) or any(type(token) is not int or token < 0 for token in tokens):
            raise invalid_value("tokens must be a list of token ids", "tokens")
        return tuple(tokens)
    if "messages" not in body:
        raise missing_parameter("messages")
    request = ChatRequest(
        parse_messages(body["messages"]),
        SamplingParams(),
        None,
        enable_thinking=boolean(body, "enable_thinking"),
    )
    return engine.tokens(request)


async def _answered(pending: Awaitable[T]) -> T:
    """What `pending` gives; an engine's error as the answer it makes."""
    try:
        return await pending
    except CeciliaError as error:
        raise from_engine(error) from error


def _optional_name(body: Body) -> str | None:
    name = string(body, "session_id")
    return None if name is None else session_name(name)


def _name(body: Body, field: str) -> str:
    name = string(body, field)
    if name is None:
        raise missing_parameter(field)
    return session_name(name, field)
