# SPDX-License-Identifier: Apache-2.0
"""cache/probe, status, clear, fork, save and restore: what the engine keeps of earlier requests."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

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


class CacheRoutes:
    """Needs the engine thread only to change something, and gets it between two steps of a generation."""

    def __init__(self, worker: Worker, session_dir: Path | None) -> None:
        self._worker = worker
        self._session_dir = session_dir
        self._writing = asyncio.Lock()  # two writes of one session would share a file

    async def probe(self, body: Body) -> Object:
        """POST cache/probe: what a prompt would find. The engine thread is not asked."""
        engine = self._worker.loaded.result()
        name, salt = _optional_name(body), string(body, "cache_salt") or ""

        def look() -> Object:
            tokens = tokens_of(engine, body)
            return asdict(engine.sessions.probe(tokens, salt=salt, name=name))

        found: Object = await _answered(asyncio.to_thread(look))
        return found

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
        path = self._path(name)
        async with self._writing:
            snapshot = await _answered(self._worker.call(lambda engine: engine.sessions.freeze(name)))
            tokens = len(snapshot.sequence)
            nbytes = await _answered(asyncio.to_thread(snapshot.write, path))
        return {"session_id": name, "tokens": tokens, "bytes": nbytes}

    async def restore(self, body: Body) -> Object:
        """POST cache/restore: a session from its file."""
        return await self.restore_session(_name(body, "session_id"))

    async def restore_session(self, name: str) -> Object:
        """Read the snapshot of session `name`; it is checked before the engine is asked for anything."""
        path = self._path(name)
        with await _answered(asyncio.to_thread(SnapshotFile, path)) as file:
            await _answered(asyncio.to_thread(file.verify))
            entry = await _answered(self._worker.call(lambda engine: engine.sessions.restore(file, name)))
            resumable = await _answered(self._worker.call(lambda engine: engine.sessions.resumable(name)))
        return asdict(entry) | {"resumable": resumable}

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


async def _answered(pending: Any) -> Any:
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
