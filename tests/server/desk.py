# SPDX-License-Identifier: Apache-2.0
"""The whole server but its sockets: app, gate, worker and a fake engine, on fake transports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cecilia.errors import CeciliaError
from server.app import App
from server.gate import Gate, Phase
from server.http.connection import Connection, Connections
from server.openai.chat import ChatService
from server.origin import OriginPolicy
from server.pages import load_page
from server.worker import Worker
from tests.server.fake_engine import PATIENCE, FakeEngine, Hold
from tests.server.fakes import Answer, FakeClock, FakeTransport, read_answers

CREATED = 1_700_000_000

MakeDesk = Callable[..., Any]
"""The fixture of that name: an awaitable ready `Desk` whose engine has the given settings."""


class Desk:
    """One server. `open` gives connections to it; `ready` waits for the engine."""

    def __init__(self, engine: FakeEngine, *, loads: bool = True) -> None:
        self.engine = engine
        self.clock = FakeClock()
        self.worker = Worker(asyncio.get_running_loop())
        self.gate = Gate(self.clock.time)
        self.parsing = ThreadPoolExecutor(max_workers=1)
        service = ChatService(
            self.worker, self.gate, self.clock, self.parsing, "tiny/model", wall_clock=lambda: CREATED + 0.5
        )
        policy = OriginPolicy(loopback_only=True, machine_name="board")
        self.app = App(service, policy=policy, chat_page=load_page("chat.html"))
        self.connections = Connections()
        if loads:
            self.worker.start(lambda: engine)

    async def ready(self) -> Desk:
        await asyncio.wait_for(asyncio.shield(self.worker.loaded), PATIENCE)
        self.gate.phase = Phase.OPEN
        return self

    def open(self) -> Line:
        return Line(self)

    async def idle(self) -> None:
        """Wait until the slot is free."""
        async with asyncio.timeout(PATIENCE):
            while self.gate.busy:
                await asyncio.sleep(0.001)

    def close(self) -> None:
        assert self.worker.stop(PATIENCE)
        self.parsing.shutdown()


class Line:
    """One client's connection."""

    def __init__(self, desk: Desk) -> None:
        self.connection = Connection(desk.app.handle, clock=desk.clock, open_connections=desk.connections)
        self.transport = FakeTransport(self.connection)
        self.connection.connection_made(self.transport)

    @property
    def wire(self) -> bytes:
        return bytes(self.transport.written)

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> None:
        lines = {"Host": "localhost:9091"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        if body is not None:
            lines["Content-Length"] = str(len(body))
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.connection.data_received(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + (body or b""))

    def post(self, **fields: Any) -> None:
        fields = {"messages": [{"role": "user", "content": "a b c d e f"}]} | fields
        self.send("POST", "/v1/chat/completions", json.dumps(fields).encode())

    async def until(self, text: bytes) -> None:
        """Wait until `text` is on the wire."""
        async with asyncio.timeout(PATIENCE):
            while text not in self.wire:
                await asyncio.sleep(0.001)

    async def answer(self, method: str = "GET") -> Answer:
        """Wait for the end of the answer."""
        async with asyncio.timeout(PATIENCE):
            while self.connection.busy:
                await asyncio.sleep(0.001)
        return read_answers(self.wire, method)[0]

    async def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        self.send(method, path, body, **headers)
        return await self.answer(method)

    async def chat(self, **fields: Any) -> Answer:
        self.post(**fields)
        return await self.answer()

    def lose(self) -> None:
        """The peer is gone."""
        self.transport.abort()


def events(body: bytes) -> list[str]:
    """The blocks of an event stream."""
    assert body.endswith(b"\n\n")
    return body.decode("utf-8").split("\n\n")[:-1]


def chunks(body: bytes) -> list[dict[str, Any]]:
    """The JSON of the data events, without [DONE]."""
    lines = [block.removeprefix("data: ") for block in events(body) if block.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def error_of(answer: Answer) -> dict[str, Any]:
    """The error object; it must be one as OpenAI's are."""
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = json.loads(answer.body)["error"]
    assert list(error)[:4] == ["message", "type", "param", "code"]
    assert isinstance(error["message"], str)
    return error


async def reached(hold: Hold) -> None:
    """Wait until the engine is there."""
    assert await asyncio.to_thread(hold.reached.wait, PATIENCE)


def numeric_error() -> CeciliaError:
    """What an engine raises in the middle of an answer."""
    return CeciliaError("numeric_error", "logits are not finite at position 7")
