# SPDX-License-Identifier: Apache-2.0
"""The server on real sockets and both event loops, used through the official client."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator

import openai
import pytest
import uvloop

from cecilia.errors import ModelFileError
from server import listen
from server.config import Config
from server.service import Service
from tests.server.fake_engine import PATIENCE, FakeEngine, Hold
from tests.server.serving import Running, serving

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
ASK = [{"role": "user", "content": "one two three"}]


@pytest.fixture(params=LOOPS)
def loop_factory(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    return LOOPS[request.param]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def server(engine: FakeEngine, loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> Iterator[Running]:
    with serving(lambda _config, _progress: engine, loop_factory=loop_factory) as running:
        yield running
    assert engine.closed


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
    ) as client:
        yield client


class Sockets:
    """Plain connections, closed at the end of the test."""

    def __init__(self) -> None:
        self._open: list[socket.socket] = []

    def send(self, server: Running, request: bytes, *, receive_buffer: int | None = None) -> socket.socket:
        connection = socket.socket()
        self._open.append(connection)
        connection.settimeout(PATIENCE)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(server.address)
        connection.sendall(request)
        return connection

    def close(self) -> None:
        for connection in self._open:
            connection.close()


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    opened = Sockets()
    yield opened
    opened.close()


def chat_bytes(*, stream: bool) -> bytes:
    body = json.dumps({"messages": ASK, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_create_and_stream_give_the_same(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = [("", "think"), "H\u00e9llo", " \u4e16\u754c", "\u2028", "\U0001f600"]
    whole = client.chat.completions.create(model="any", messages=ASK)  # type: ignore[arg-type]
    assert whole.choices[0].message.content == "H\u00e9llo \u4e16\u754c\u2028\U0001f600"
    assert whole.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(
        model="any",
        messages=ASK,
        stream_options={"include_usage": True},  # type: ignore[arg-type]
    ) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.content == whole.choices[0].message.content
    assert streamed.choices[0].message.model_extra["reasoning_content"] == "think"  # type: ignore[index]
    assert streamed.usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens == 8


def test_no_usage_chunk_unless_asked(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="any", messages=ASK, stream=True))  # type: ignore[call-overload]
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "cecilia"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_error_classes(client: openai.OpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="any", messages=ASK, temperature=5)  # type: ignore[arg-type]
    assert (bad.value.code, bad.value.param) == ("invalid_value", "temperature")
    assert bad.value.request_id
    engine.context = 2
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="any", messages=ASK)  # type: ignore[arg-type]
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="any", input="x")
    engine.context, engine.script = 256, ["a", ZeroDivisionError("ours")]
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="any", messages=ASK)  # type: ignore[arg-type]
    with pytest.raises(openai.APIError, match="internal error"):
        list(client.chat.completions.create(model="any", messages=ASK, stream=True))  # type: ignore[call-overload]
    engine.script = ["fine"]
    client.chat.completions.create(model="any", messages=ASK)  # type: ignore[arg-type]


def test_busy_and_then_free(client: openai.OpenAI, engine: FakeEngine) -> None:
    hold = Hold()
    engine.script = ["a", hold, "b"]
    stream = client.chat.completions.create(model="any", messages=ASK, stream=True)  # type: ignore[call-overload]
    assert hold.reached.wait(PATIENCE)
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model="any", messages=ASK)  # type: ignore[arg-type]
    assert caught.value.code == "server_busy"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    hold.go.set()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "ab"
    # The slot is free before the end of the stream is seen: no retry is needed.
    client.chat.completions.create(model="any", messages=ASK)  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_reset_ends_the_generation(
    sockets: Sockets, server: Running, engine: FakeEngine, stage: str, stream: bool
) -> None:
    hold = Hold()
    engine.prefill_steps = [hold] if stage == "prefill" else []
    engine.script = ["a", hold, *["b"] * 100]
    connection = sockets.send(server, chat_bytes(stream=stream))
    assert hold.reached.wait(PATIENCE)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    eventually(lambda: engine.outcomes == ["cancelled"])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_closed_client_is_noticed_without_a_reset(
    sockets: Sockets, server: Running, engine: FakeEngine, stage: str, stream: bool
) -> None:
    """close() looks like a half-close until something is written: the probes find out."""
    hold = Hold()
    engine.prefill_steps = [hold] if stage == "prefill" else []
    engine.script = ["a", hold, *["b"] * 100]
    connection = sockets.send(server, chat_bytes(stream=stream))
    assert hold.reached.wait(PATIENCE)
    if stream:
        eventually(lambda: b"assistant" in connection.recv(65536))
    connection.close()
    eventually(lambda: engine.outcomes == ["cancelled"])


@pytest.mark.parametrize("stream", [True, False])
def test_a_half_close_is_answered(sockets: Sockets, server: Running, stream: bool) -> None:
    connection = sockets.send(server, chat_bytes(stream=stream))
    connection.shutdown(socket.SHUT_WR)
    answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"world" in answer
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")


def test_a_refused_body_is_answered_and_not_reset(sockets: Sockets, server: Running) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n"
    answer = read_all(sockets.send(server, head + b"x" * 30_000))
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_expect_continue(sockets: Sockets, server: Running) -> None:
    body = json.dumps({"messages": ASK}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
    connection = sockets.send(server, head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
    assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.sendall(body)
    assert read_all(connection).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_slow_reader_holds_the_engine(sockets: Sockets, server: Running, engine: FakeEngine) -> None:
    engine.context = 200_000
    engine.script = ["x" * 1000] * 100_000
    connection = sockets.send(server, chat_bytes(stream=True), receive_buffer=4096)
    eventually(lambda: bool(engine.requests))
    health = sockets.send(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert b'{"status":"ok",' in read_all(health)
    assert engine.outcomes == []  # 100 MB were not taken by anyone
    connection.close()
    eventually(lambda: engine.outcomes == ["cancelled"])


def test_health_answers_while_the_model_loads(
    sockets: Sockets, engine: FakeEngine, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    hold = Hold()

    def load(_config: Config, progress: Callable[[float], None]) -> FakeEngine:
        progress(0.5)
        hold.wait(lambda: False)
        return engine

    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with serving(load, loop_factory=loop_factory, ready=False) as running:
        assert hold.reached.wait(PATIENCE)
        answer = read_all(sockets.send(running, health))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'{"status":"loading","progress":0.5}' in answer
        assert b'"code":"model_loading"' in sockets.send(running, chat_bytes(stream=True)).recv(65536)
        hold.go.set()
        eventually(lambda: read_all(sockets.send(running, health)).startswith(b"HTTP/1.1 200 OK"))


def test_a_failed_load_ends_the_server(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    def load(_config: Config, _progress: Callable[[float], None]) -> FakeEngine:
        raise ModelFileError("truncated", "the file ends early")

    async def body() -> None:
        await Service(Config(), listen.bind("127.0.0.1", 0)).run(load)

    with asyncio.Runner(loop_factory=loop_factory) as runner, pytest.raises(ModelFileError):
        runner.run(body())


def test_stopping_while_loading_does_not_wait_for_the_load(
    engine: FakeEngine, loop_factory: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.service.ENGINE_STOP_SECONDS", 0.01)
    hold = Hold()

    def load(_config: Config, _progress: Callable[[float], None]) -> FakeEngine:
        hold.wait(lambda: False)
        return engine

    with serving(load, loop_factory=loop_factory, ready=False):
        assert hold.reached.wait(PATIENCE)
    hold.go.set()


def test_stopping_lets_the_answer_end(
    sockets: Sockets, engine: FakeEngine, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    hold = Hold()
    engine.script = ["a", hold, "b"]
    with serving(lambda _config, _progress: engine, loop_factory=loop_factory) as running:
        connection = sockets.send(running, chat_bytes(stream=True))
        assert hold.reached.wait(PATIENCE)
        running.stop()
        eventually(lambda: running.service.stopping)
        hold.go.set()
        assert read_all(connection).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert engine.outcomes == ["eos"]


def test_a_second_signal_stops_now(
    sockets: Sockets, engine: FakeEngine, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    hold = Hold()
    engine.script = ["a", hold, "b"]
    with serving(lambda _config, _progress: engine, loop_factory=loop_factory) as running:
        sockets.send(running, chat_bytes(stream=True))
        assert hold.reached.wait(PATIENCE)
        running.stop()
        running.stop()
        eventually(lambda: engine.closed)
    assert engine.outcomes == ["cancelled"]
