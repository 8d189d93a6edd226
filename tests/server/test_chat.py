# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions: the answers, byte for byte where it matters, and every way they can end."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any
from unittest import mock

import pytest

from cecilia.engine.job import TokenLogprob
from server.openai import objects
from server.openai.chat import COMMENT_SECONDS
from tests.server.desk import CREATED, Desk, MakeDesk, chunks, error_of, events, numeric_error, reached
from tests.server.fake_engine import Hold

USAGE = {
    "prompt_tokens": 6,
    "completion_tokens": 3,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {"reasoning_tokens": 1},
}
# The fake engine spends 20 ms on the prompt and 10 ms on each token.
TIMINGS = {
    "cache_n": 2,
    "prompt_n": 4,
    "prompt_ms": 20.0,
    "prompt_per_second": 200.0,
    "predicted_n": 3,
    "predicted_ms": 30.0,
    "predicted_per_second": 100.0,
}
SCRIPT = [("", "hm"), "Hello", " world"]


async def test_an_answer_in_one_piece(make_desk: MakeDesk) -> None:
    desk = await make_desk(script=SCRIPT, cached=2)
    answer = await desk.open().chat(seed=9)
    assert answer.status == 200
    body = json.loads(answer.body)
    assert body.pop("id") == answer.headers["x-cecilia-generation-id"]
    assert answer.headers["x-cecilia-generation-id"].startswith("chatcmpl-")
    message = {"role": "assistant", "content": "Hello world", "refusal": None, "reasoning_content": "hm"}
    assert body == {
        "object": "chat.completion",
        "created": CREATED,
        "model": "tiny/model",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": USAGE,
        "system_fingerprint": "fp_0123456789ab_f32_scalar",
        "timings": TIMINGS,
        "cecilia": {"cause": "eos", "seed": 9},
    }


def chunk(answer_id: str, delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return head(answer_id, [choice]) | more


def head(answer_id: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": answer_id,
        "object": "chat.completion.chunk",
        "created": CREATED,
        "model": "tiny/model",
        "choices": choices,
        "system_fingerprint": "fp_0123456789ab_f32_scalar",
    }


async def test_a_stream(make_desk: MakeDesk) -> None:
    desk = await make_desk(script=SCRIPT, cached=2)
    answer = await desk.open().chat(stream=True, seed=9)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache, no-transform"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["transfer-encoding"] == "chunked"
    assert "content-encoding" not in answer.headers
    the_id = answer.headers["x-cecilia-generation-id"]
    assert chunks(answer.body) == [
        chunk(the_id, {"role": "assistant", "content": ""}),
        chunk(the_id, {"reasoning_content": "hm"}),
        chunk(the_id, {"content": "Hello"}),
        chunk(the_id, {"content": " world"}),
        chunk(the_id, {}, "stop", cecilia={"cause": "eos", "seed": 9}, timings=TIMINGS),
    ]
    assert events(answer.body)[-1] == "data: [DONE]"
    assert answer.complete


async def test_a_stream_with_usage(make_desk: MakeDesk) -> None:
    desk = await make_desk(script=SCRIPT, cached=2)
    answer = await desk.open().chat(stream=True, stream_options={"include_usage": True}, seed=9)
    the_id = answer.headers["x-cecilia-generation-id"]
    assert chunks(answer.body) == [
        chunk(the_id, {"role": "assistant", "content": ""}, usage=None),
        chunk(the_id, {"reasoning_content": "hm"}, usage=None),
        chunk(the_id, {"content": "Hello"}, usage=None),
        chunk(the_id, {"content": " world"}, usage=None),
        chunk(the_id, {}, "stop", usage=None, cecilia={"cause": "eos", "seed": 9}),
        head(the_id, []) | {"usage": USAGE, "timings": TIMINGS},
    ]


# What the engine tells, and how it is to be shown: a whole token, and the two halves of a character.
ENTRY = TokenLogprob(5, b"hm", -0.5, (TokenLogprob(5, b"hm", -0.5), TokenLogprob(6, b"", -9999.0)))
HALVES = (TokenLogprob(7, b"\xc3", -1.0), TokenLogprob(8, b"\xa9", 0.0))
SHOWN = [
    {
        "token": "hm",
        "bytes": [104, 109],
        "logprob": -0.5,
        "top_logprobs": [
            {"token": "hm", "bytes": [104, 109], "logprob": -0.5},
            {"token": "", "bytes": [], "logprob": -9999.0},
        ],
    },
    {"token": "\ufffd", "bytes": [0xC3], "logprob": -1.0, "top_logprobs": []},
    {"token": "\ufffd", "bytes": [0xA9], "logprob": 0.0, "top_logprobs": []},
]


async def test_logprobs_are_the_same_streamed_and_not(make_desk: MakeDesk) -> None:
    desk = await make_desk(script=[("", "hm", (ENTRY,)), ("\u00e9", "", HALVES[:1]), ("", "", HALVES[1:])])
    body = json.loads((await desk.open().chat(logprobs=True, top_logprobs=2)).body)
    assert body["choices"][0]["logprobs"] == {"content": SHOWN, "refusal": None}
    assert desk.engine.requests[0].logprobs == 2
    answer = await desk.open().chat(logprobs=True, top_logprobs=2, stream=True)
    choices = [each["choices"][0] for each in chunks(answer.body)]
    assert [(choice["delta"], choice["logprobs"]) for choice in choices] == [
        ({"role": "assistant", "content": ""}, None),
        ({"reasoning_content": "hm"}, {"content": SHOWN[:1], "refusal": None}),
        ({"content": "\u00e9"}, {"content": SHOWN[1:2], "refusal": None}),
        ({"content": ""}, {"content": SHOWN[2:], "refusal": None}),
        ({}, None),
    ]


async def test_an_empty_answer_has_empty_logprobs(make_desk: MakeDesk) -> None:
    desk = await make_desk(script=[])
    body = json.loads((await desk.open().chat(logprobs=True)).body)
    assert body["choices"][0]["logprobs"] == {"content": [], "refusal": None}


async def test_only_data_lines_and_comments_are_sent(make_desk: MakeDesk) -> None:
    desk = await make_desk(script=["a\nb", "\r", "\u2028", "\u0085"])
    answer = await desk.open().chat(stream=True)
    lines = [line for line in answer.body.decode("utf-8").splitlines() if line]
    assert all(line.startswith(("data: ", ": ")) for line in lines)
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in chunks(answer.body)) == (
        "a\nb\r\u2028\u0085"
    )


async def test_an_http_1_0_stream_ends_with_the_connection(make_desk: MakeDesk) -> None:
    line = (await make_desk()).open()
    body = b'{"messages":[{"role":"user","content":"a"}],"stream":true}'
    line.connection.data_received(
        b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    await line.answer()
    wire_head, _, stream = line.wire.partition(b"\r\n\r\n")
    assert b"chunked" not in wire_head.lower()
    assert events(stream)[-1] == "data: [DONE]"
    assert line.transport.closed


async def test_nothing_to_say_is_still_an_answer(make_desk: MakeDesk) -> None:
    desk = await make_desk(script=[])
    body = json.loads((await desk.open().chat()).body)
    assert (body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]) == ("", "stop")
    assert all(math.isfinite(value) for value in body["timings"].values())
    deltas = [each["choices"][0]["delta"] for each in chunks((await desk.open().chat(stream=True)).body)]
    assert deltas == [{"role": "assistant", "content": ""}, {}]


async def test_length_is_told(make_desk: MakeDesk) -> None:
    desk = await make_desk(script=["a", "b", "c"])
    body = json.loads((await desk.open().chat(max_tokens=2)).body)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 2


async def test_a_drawn_seed_is_told(make_desk: MakeDesk) -> None:
    desk = await make_desk()
    body = json.loads((await desk.open().chat()).body)
    assert body["cecilia"]["seed"] == desk.engine.requests[0].sampling.seed


async def test_a_large_body_is_served_too(make_desk: MakeDesk) -> None:
    desk = await make_desk()
    long = [{"role": "user", "content": "x" * 300_000}]
    assert (await desk.open().chat(messages=long)).status == 200
    assert (await desk.open().chat(messages=long, n=3)).status == 400


# -- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_that_does_not_fit(make_desk: MakeDesk, stream: bool) -> None:
    desk = await make_desk(context=4)
    answer = await desk.open().chat(stream=stream)
    assert answer.status == 400
    error = error_of(answer)
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (6, 4)
    # The phrases that client libraries look for.
    assert "this model's maximum context length is" in error["message"]
    assert "exceeds the context window" in error["message"]
    assert not desk.gate.busy


async def test_busy(make_desk: MakeDesk) -> None:
    hold = Hold()
    desk = await make_desk(script=["a", hold, "b"])
    first, second = desk.open(), desk.open()
    first.post(stream=True)
    await reached(hold)
    answer = await second.chat()
    assert answer.status == 429
    assert (error_of(answer)["type"], error_of(answer)["code"]) == ("rate_limit_error", "server_busy")
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert 0 < int(answer.headers["retry-after-ms"]) <= 60_000
    hold.go.set()
    assert (await first.answer()).complete
    assert (await desk.open().chat()).status == 200


async def test_a_bad_request_does_not_take_the_slot(make_desk: MakeDesk) -> None:
    desk = await make_desk()
    line = desk.open()
    line.send("POST", "/v1/chat/completions", b"[" * 60_000)
    answer = await line.answer()
    assert (answer.status, error_of(answer)["code"]) == (400, "invalid_json")
    assert not desk.gate.busy
    assert desk.engine.requests == []


# -- errors of the engine ---------------------------------------------------------------------------------

ENGINE_FAULTS = [(numeric_error(), "numeric_error"), (ZeroDivisionError("secret"), "internal_error")]


@pytest.mark.parametrize(("fault", "code"), ENGINE_FAULTS)
async def test_a_fault_before_the_end_of_a_whole_answer(
    make_desk: MakeDesk, fault: Exception, code: str
) -> None:
    desk = await make_desk(script=["a", fault])
    answer = await desk.open().chat()
    assert answer.status == 500
    assert error_of(answer)["code"] == code
    assert b"secret" not in answer.body
    await desk.idle()


@pytest.mark.parametrize(("fault", "code"), ENGINE_FAULTS)
async def test_a_fault_in_a_stream_is_its_last_event(
    make_desk: MakeDesk, fault: Exception, code: str
) -> None:
    desk = await make_desk(script=["a", fault])
    answer = await desk.open().chat(stream=True)
    assert (answer.status, answer.complete) == (200, True)
    last = json.loads(events(answer.body)[-1].removeprefix("data: "))
    assert list(last) == ["error"]
    assert last["error"]["code"] == code
    assert "secret" not in answer.body.decode()
    await desk.idle()
    desk.engine.script = ["fine"]
    assert (await desk.open().chat()).status == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("method", ["role_chunk", "delta_chunk", "last_chunks", "whole"])
async def test_a_fault_of_the_servers_own_releases_the_slot(
    make_desk: MakeDesk, method: str, stream: bool
) -> None:
    desk = await make_desk()
    with mock.patch.object(objects.Completion, method, side_effect=ZeroDivisionError):
        await desk.open().chat(stream=stream)
    await desk.idle()
    assert (await desk.open().chat()).status == 200


# -- comments ---------------------------------------------------------------------------------------------


async def test_comments_fill_a_long_prefill(make_desk: MakeDesk) -> None:
    first, second = Hold(), Hold()
    desk = await make_desk(prefill_chunk=3, prefill_steps=[first, second], script=["a"])
    line = desk.open()
    line.post(stream=True)
    await reached(first)
    await line.until(b'"role":"assistant"')  # at once, before any of the prefill
    start = len(line.wire)
    desk.clock.advance(COMMENT_SECONDS - 0.1)
    assert len(line.wire) == start
    desk.clock.advance(0.1)
    assert line.wire[start:].count(b": prefill 0/6\n\n") == 1
    desk.clock.advance(3 * COMMENT_SECONDS)
    assert line.wire[start:].count(b": prefill 0/6\n\n") == 4
    first.go.set()
    await reached(second)
    await line_sees_progress(desk, line)
    second.go.set()
    answer = await line.answer()
    assert [each["choices"][0]["delta"] for each in chunks(answer.body)] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {},
    ]
    # Nothing is left behind but the keep-alive deadline.
    assert desk.clock.pending == 1


async def line_sees_progress(desk: Desk, line: Any) -> None:
    for _ in range(1000):
        desk.clock.advance(COMMENT_SECONDS)
        if b": prefill 3/6\n\n" in line.wire:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the progress was never told")


async def test_a_stream_that_talks_has_no_comments(make_desk: MakeDesk) -> None:
    holds = [Hold() for _ in range(4)]
    desk = await make_desk(script=[step for hold in holds for step in ("x", hold)])
    line = desk.open()
    line.post(stream=True)
    for count, hold in enumerate(holds, 1):
        await reached(hold)
        while line.wire.count(b'"content":"x"') < count:
            await asyncio.sleep(0.001)
        desk.clock.advance(COMMENT_SECONDS - 1)
        hold.go.set()
    answer = await line.answer()
    assert not any(block.startswith(":") for block in events(answer.body))


# -- clients that go away ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("where", ["prepare", "prefill", "decode"])
async def test_a_lost_client_ends_its_generation(make_desk: MakeDesk, where: str, stream: bool) -> None:
    hold = Hold()
    desk = await make_desk(
        prepare_step=hold if where == "prepare" else None,
        prefill_steps=[hold] if where == "prefill" else [],
        script=["a", hold, *["b"] * 1000] if where == "decode" else ["a"] * 1000,
    )
    line = desk.open()
    line.post(stream=stream)
    await reached(hold)
    line.lose()
    if where == "prepare":
        hold.go.set()
    await desk.idle()
    assert desk.engine.outcomes == ["cancelled"]
    desk.engine.prepare_step, desk.engine.prefill_steps, desk.engine.script = None, [], ["fine"]
    assert (await desk.open().chat()).status == 200


async def test_a_half_closed_stream_is_probed_and_goes_on(make_desk: MakeDesk) -> None:
    hold = Hold()
    desk = await make_desk(script=["a", hold, "b"])
    line = desk.open()
    line.post(stream=True)
    await line.until(b'"content":"a"')
    start = len(line.wire)
    assert line.connection.eof_received()
    assert line.wire[start:].count(b": generated 1\n\n") == 1  # at once
    desk.clock.advance(1.0)
    assert line.wire[start:].count(b": generated 1\n\n") >= 2  # the one that meets a reset
    hold.go.set()
    answer = await line.answer()
    assert answer.complete
    assert line.transport.closed


async def test_a_half_closed_whole_answer_is_still_given(make_desk: MakeDesk) -> None:
    hold = Hold()
    desk = await make_desk(script=["a", hold, "b"])
    line = desk.open()
    line.post()
    await reached(hold)
    assert line.connection.eof_received()
    assert line.wire == b""  # a quick answer comes alone
    desk.clock.advance(0.5)
    # The second meets the reset of a peer that is gone. RFC 9110, 15.2: any number may precede an answer.
    assert line.wire == 2 * b"HTTP/1.1 100 Continue\r\n\r\n"
    hold.go.set()
    answer = await line.answer()
    assert json.loads(answer.body)["choices"][0]["message"]["content"] == "ab"


async def test_a_half_closed_http_1_0_client_gets_its_answer_alone(make_desk: MakeDesk) -> None:
    hold = Hold()
    desk = await make_desk(script=["a", hold])
    line = desk.open()
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    head = b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
    line.connection.data_received(head + body)
    await reached(hold)
    assert line.connection.eof_received()
    desk.clock.advance(10.0)
    assert line.wire == b""  # HTTP/1.0 knows no interim answers
    hold.go.set()
    assert (await line.answer()).status == 200


async def test_a_reader_that_stops_holds_the_engine_and_is_cut_off(make_desk: MakeDesk) -> None:
    desk = await make_desk(script=["x" * 1000] * 100_000, context=200_000)
    line = desk.open()
    line.transport.stuck = True
    line.post(stream=True)
    while line.transport.unsent <= line.transport.high:
        await asyncio.sleep(0.001)
    before = len(line.wire)
    await asyncio.sleep(0.05)
    assert len(line.wire) < before + 200_000  # one batch of the bounded queue at most
    for _ in range(3):
        desk.clock.advance(60)
    assert line.transport.aborted
    await desk.idle()
    assert desk.engine.outcomes == ["cancelled"]
