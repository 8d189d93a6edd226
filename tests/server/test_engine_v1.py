# SPDX-License-Identifier: Apache-2.0
"""The routes under /engine/v1 on a real server with a micro model, stopped and started as a process is."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cecilia.engine.load import load
from tests.server.fake_engine import PATIENCE
from tests.server.serving import Running, serving
from tools.make_tiny import make_tiny

SEA = [{"role": "user", "content": "Tell me of the sea. " * 8}]
ON = [*SEA, {"role": "assistant", "content": "It is wide."}, {"role": "user", "content": "And the sky?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("engine_v1") / "micro.l3r", architecture="ling3", quant="q8_32")


@contextmanager
def running(model: Path, session_dir: Path | None = None) -> Iterator[Client]:
    directory = None if session_dir is None else str(session_dir)
    start: Callable[..., Any] = lambda *_: load(model, threads=1, context=1024)  # noqa: E731
    with serving(start, loop_factory=asyncio.new_event_loop, session_dir=directory) as server:
        yield Client(server)


class Client:
    """Plain HTTP, so that every byte of an answer can be looked at."""

    def __init__(self, server: Running) -> None:
        self.server = server

    def ask(self, path: str, body: Any = None) -> tuple[int, Any, http.client.HTTPMessage]:
        connection = http.client.HTTPConnection(*self.server.address, timeout=PATIENCE)
        try:
            if body is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(body))
            response = connection.getresponse()
            return response.status, json.loads(response.read()), response.headers
        finally:
            connection.close()

    def engine(self, path: str, body: Any = None) -> Any:
        status, answer, _ = self.ask(f"/engine/v1/{path}", body)
        assert status == 200, answer
        return answer

    def refused(self, path: str, body: Any) -> tuple[int, str]:
        status, answer, headers = self.ask(path, body)
        assert (headers["x-should-retry"] == "false") == (status == 409)
        return status, answer["error"]["code"]

    def chat(self, messages: Any, **options: Any) -> Any:
        body = {"messages": messages, "max_tokens": 12, "seed": 5, "temperature": 0.8} | options
        status, answer, _ = self.ask("/v1/chat/completions", body)
        assert status == 200, answer
        return answer

    def stream(self, messages: Any, **options: Any) -> Stream:
        body = {
            "messages": messages,
            "max_tokens": 40,
            "seed": 5,
            "temperature": 0.8,
            "stream": True,
        } | options
        return Stream(self, body)


class Stream:
    """A streamed answer, read chunk by chunk."""

    def __init__(self, client: Client, body: Any) -> None:
        self.connection = http.client.HTTPConnection(*client.server.address, timeout=PATIENCE)
        self.connection.request("POST", "/v1/chat/completions", json.dumps(body))
        self.response = self.connection.getresponse()
        assert self.response.status == 200, self.response.read()
        self.id = self.response.headers["X-Cecilia-Generation-Id"]
        self.chunks: list[Any] = []

    def next(self) -> Any:
        """The next chunk of text or the last one; None at the end."""
        for raw in iter(self.response.readline, b""):
            line = raw.decode().strip()
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            self.chunks.append(chunk)
            return chunk
        self.close()
        return None

    def rest(self) -> None:
        while self.next() is not None:
            pass
        self.close()

    @property
    def text(self) -> str:
        deltas = [choice["delta"] for chunk in self.chunks for choice in chunk["choices"]]
        parts = ("reasoning_content", "content")
        return "".join("".join(delta.get(part) or "" for delta in deltas) + "|" for part in parts)

    @property
    def entries(self) -> list[Any]:
        """The log-probabilities of all tokens."""
        found = [choice.get("logprobs") for chunk in self.chunks for choice in chunk["choices"]]
        return [entry for each in found if each for entry in each["content"]]

    @property
    def seqs(self) -> list[int]:
        return [chunk["cecilia"]["seq"] for chunk in self.chunks if "seq" in chunk.get("cecilia", {})]

    def close(self) -> None:
        self.response.close()
        self.connection.close()


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[Client]:
    with running(model) as client:
        yield client


@pytest.fixture
def client(shared: Client) -> Client:
    shared.engine("cache/clear", {})
    return shared


def test_idle(client: Client) -> None:
    assert client.engine("generation/status") == {"state": "idle", "generation_id": None}
    status = client.engine("status")
    assert (status["ready"], status["busy"], status["phase"]) == (True, False, "open")
    assert client.engine("memory")["cache"]["used_bytes"] == 0
    assert client.engine("capabilities")["features"]["tools"] is False
    for name in ("generation/pause", "generation/resume", "cancel"):
        assert client.refused(f"/engine/v1/{name}", {}) == (409, "no_active_generation")
        assert client.refused(f"/engine/v1/{name}", {"generation_id": "x"}) == (404, "generation_not_found")


def test_a_follow_up_finds_what_a_probe_told(client: Client) -> None:
    client.chat(SEA, session_id="mine")
    probe = client.engine("cache/probe", {"messages": ON, "session_id": "mine"})
    usage = client.chat(ON, session_id="mine")["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == probe["cached_tokens"] > 0
    assert probe["source"] == "mine"
    entries = client.engine("cache/status")["entries"]
    assert [entry["session_id"] for entry in entries if entry["kind"] == "live"] == ["mine"]


def test_forks(client: Client) -> None:
    client.chat(SEA, session_id="one")
    fork = client.engine("cache/fork", {"session_id": "one", "new_session_id": "two"})
    assert (fork["session_id"], fork["parent"] is not None, fork["shared_bytes"] > 0) == ("two", True, True)
    route = "/engine/v1/cache/fork"
    assert client.refused(route, {"session_id": "x", "new_session_id": "y"}) == (404, "session_not_found")
    assert client.refused(route, {"session_id": "one", "new_session_id": "two"}) == (409, "session_exists")
    assert client.refused(route, {"session_id": "one"}) == (400, "missing_required_parameter")
    assert client.refused(route, {"new_session_id": "../x"}) == (400, "invalid_value")
    status, answer, _ = client.ask(route, {"session_id": "one", "new_session_id": "z", "at_tokens": 2})
    assert (status, answer["error"]["code"]) == (409, "position_not_restorable")
    assert answer["error"]["nearest_above"] > 2


def test_tokens_there_and_back(client: Client) -> None:
    answer = client.engine("tokenize", {"text": "sea ü", "with_pieces": True})
    assert (answer["count"], client.engine("detokenize", {"tokens": answer["tokens"]})) == (
        6,
        {"text": "sea ü"},
    )
    assert len(answer["pieces"]) == 6
    chat = client.engine("tokenize", {"messages": SEA})
    assert chat["count"] == client.chat(SEA, max_tokens=1)["usage"]["prompt_tokens"]
    assert client.refused("/engine/v1/detokenize", {"tokens": [10**9]}) == (400, "token_out_of_range")
    assert client.refused("/engine/v1/detokenize", {"tokens": ["a"]}) == (400, "invalid_value")
    assert client.refused("/engine/v1/tokenize", {}) == (400, "missing_required_parameter")


def test_credit_holds_the_engine_and_changes_no_text(client: Client) -> None:
    undisturbed = client.stream(SEA)
    undisturbed.rest()
    stream = client.stream(SEA, flow={"mode": "ack", "window": 2})
    while len(stream.seqs) < 2:
        stream.next()
    status = _until(client, "stalled")
    assert (status["sent_seq"], status["credit"], status["generation_id"]) == (2, 0, stream.id)
    ack = {"generation_id": stream.id, "seq": 3}
    assert client.refused("/engine/v1/flow/ack", ack) == (400, "ack_out_of_range")
    assert client.engine("flow/ack", ack | {"seq": 1})["advanced"]
    assert not client.engine("flow/ack", ack | {"seq": 1})["advanced"]
    while (chunk := stream.next()) is not None:
        if seq := chunk.get("cecilia", {}).get("seq"):
            assert seq <= client.engine("flow/ack", ack | {"seq": seq, "window": 1})["sent_seq"]
    assert stream.text == undisturbed.text
    assert stream.seqs == list(range(1, len(stream.seqs) + 1))
    assert client.engine("flow/ack", ack)["state"] == "finished"
    assert not any("cecilia" in chunk for chunk in undisturbed.chunks[:-1])


def _until(client: Client, state: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while (status := client.engine("generation/status"))["state"] != state:
        assert time.monotonic() < deadline, f"never {state}: {status}"
    return status


def test_a_pause_stands_still_and_a_resumption_goes_on(client: Client) -> None:
    undisturbed = client.stream(SEA)
    undisturbed.rest()
    stream = client.stream(SEA, flow={"mode": "ack", "window": 1})
    while not stream.seqs:
        stream.next()
    assert client.engine("generation/pause", {"generation_id": stream.id})["changed"]
    assert not client.engine("generation/pause", {})["changed"]
    client.engine("flow/ack", {"generation_id": stream.id, "seq": 1, "window": 1000})
    assert client.engine("generation/status")["state"] == "paused"
    assert client.engine("cache/probe", {"messages": SEA})["common_tokens"] > 0
    assert client.engine("cache/clear", {"scope": "idle"})["removed"] == 1  # the engine takes calls meanwhile
    assert [entry["kind"] for entry in client.engine("cache/status")["entries"]] == ["live"]
    assert client.refused("/engine/v1/cache/clear", {}) == (409, "in_use")
    assert client.refused("/v1/chat/completions", {"messages": SEA}) == (429, "server_busy")
    assert client.engine("generation/resume", {})["changed"]
    stream.rest()
    assert stream.text == undisturbed.text


def test_a_cancelled_stream_ends_well(client: Client) -> None:
    stream = client.stream(SEA, flow={"mode": "ack", "window": 1})
    while not stream.seqs:
        stream.next()
    assert client.engine("cancel", {"generation_id": stream.id, "reason": "enough"})["changed"]
    stream.rest()
    last = stream.chunks[-1]
    assert (last["choices"][0]["finish_reason"], last["cecilia"]["cause"]) == ("stop", "enough")
    assert not client.engine("cancel", {"generation_id": stream.id})["changed"]
    assert client.chat(SEA)["choices"]


@pytest.mark.parametrize("state", ["paused", "stalled"])
def test_a_reader_that_goes_away_frees_the_slot(client: Client, state: str) -> None:
    stream = client.stream(SEA, flow={"mode": "ack", "window": 1})
    while not stream.seqs:
        stream.next()
    if state == "paused":
        client.engine("generation/pause", {})
    _until(client, state)
    stream.close()
    _until(client, "idle")
    assert client.chat(SEA)["choices"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"flow": {"mode": "credit", "window": 2}}, "flow"),
        ({"flow": {"mode": "ack", "window": 0}}, "window"),
        ({"flow": {"mode": "ack"}}, "flow.window"),
        ({"flow": {"mode": "ack", "window": 1}, "stream": False}, "flow"),
        ({"session_id": "a/b"}, "session_id"),
        ({"session_id": ".hidden"}, "session_id"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"continue_generation": True}, "session_id"),
        ({"continue_generation": True, "session_id": "x"}, "messages"),
    ],
)
def test_bad_fields_are_named(client: Client, change: dict[str, Any], param: str) -> None:
    status, answer, _ = client.ask("/v1/chat/completions", {"messages": SEA, "stream": True} | change)
    assert (status, answer["error"]["param"]) == (400, param)


def test_without_a_directory_nothing_is_saved(client: Client) -> None:
    client.chat(SEA, session_id="mine")
    for name in ("save", "restore"):
        assert client.refused(f"/engine/v1/cache/{name}", {"session_id": "mine"}) == (
            409,
            "session_dir_unset",
        )


def test_a_session_outlives_the_server(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path) as client:
        client.chat(SEA, session_id="mine")
        saved = client.engine("cache/save", {"session_id": "mine"})
        expected = client.chat(ON, session_id="other")["choices"]
    assert (tmp_path / "mine.snapshot").stat().st_size == saved["bytes"]
    with running(model, tmp_path) as client:
        answer = client.chat(ON, session_id="mine")  # brought back without being asked
        assert answer["choices"] == expected
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert client.refused("/engine/v1/cache/restore", {"session_id": "x"}) == (404, "snapshot_not_found")


def test_a_damaged_snapshot_is_refused_and_its_turn_answered(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path) as client:
        expected = client.chat(SEA, session_id="mine")["choices"]
        client.engine("cache/save", {"session_id": "mine"})
    path = tmp_path / "mine.snapshot"
    data = path.read_bytes()
    path.write_bytes(data[:-4096])
    with running(model, tmp_path) as client:
        assert client.refused("/engine/v1/cache/restore", {"session_id": "mine"}) == (409, "snapshot_damaged")
        assert client.chat(SEA, session_id="mine")["choices"] == expected


def test_an_interrupted_generation_is_delivered_after_a_restart(model: Path, tmp_path: Path) -> None:
    asked = {"stop": ["zzz"], "logprobs": True, "top_logprobs": 1}
    flow = {"flow": {"mode": "ack", "window": 7}, "session_id": "mine"} | asked
    with running(model) as client:
        whole = client.stream(SEA, **asked)
        whole.rest()
    with running(model, tmp_path) as client:
        stream = client.stream(SEA, **flow)
        while len(stream.seqs) < 7:
            stream.next()
        _until(client, "stalled")
        client.engine("generation/pause", {})
        client.engine("cache/save", {"session_id": "mine"})
        kept = (tmp_path / "mine.snapshot").read_bytes()
        stream.close()  # which cancels it, and the session is saved as it is then
        _until(client, "idle")
    (tmp_path / "mine.snapshot").write_bytes(kept)
    with running(model, tmp_path) as client:
        assert client.engine("cache/restore", {"session_id": "mine"})["resumable"]
        go_on = {"session_id": "mine", "continue_generation": True}
        rest = client.stream([], **go_on)
        rest.rest()
        assert rest.chunks[-1]["cecilia"]["seed"] == 5
        assert _joined(stream, rest) == whole.text
        assert stream.entries == whole.entries
        status, answer, _ = client.ask("/v1/chat/completions", go_on)
        assert (status, answer["error"]["code"]) == (409, "generation_not_resumable")
        missing = go_on | {"session_id": "x"}
        assert client.refused("/v1/chat/completions", missing) == (404, "session_not_found")


def _joined(first: Stream, rest: Stream) -> str:
    first.chunks += rest.chunks
    return first.text
