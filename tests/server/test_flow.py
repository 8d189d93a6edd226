# SPDX-License-Identifier: Apache-2.0
"""Held and paused streams by the clock, and the slot after anything that can happen to one."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from server.openai.chat import ACK_SECONDS, COMMENT_SECONDS
from tests.server.desk import Desk, Line, MakeDesk, chunks
from tests.server.fake_engine import PATIENCE

WORDS = [f"w{i} " for i in range(12)]
ROUNDS, STEPS = 100, 100  # of random interleavings


async def seen(line: Line, count: int) -> None:
    """Wait until `count` numbered chunks are on the wire."""
    async with asyncio.timeout(PATIENCE):
        while line.wire.count(b'"cecilia":{"seq":') < count:
            await asyncio.sleep(0.001)


async def until(desk: Desk, state: str) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE):
        while (status := json.loads((await desk.open().ask("GET", "/engine/v1/generation/status")).body))[
            "state"
        ] != state:
            await asyncio.sleep(0.001)
    return dict(status)


def post(name: str, **fields: Any) -> tuple[str, str, bytes]:
    return "POST", f"/engine/v1/{name}", json.dumps(fields).encode()


async def test_silence_of_a_reader_ends_a_stalled_stream(make_desk: MakeDesk) -> None:
    desk = await make_desk(script=WORDS)
    line = desk.open()
    line.post(stream=True, flow={"mode": "ack", "window": 2})
    await seen(line, 2)
    await until(desk, "stalled")
    start = len(line.wire)
    desk.clock.advance(COMMENT_SECONDS)
    assert line.wire[start:].count(b": stalled, generated 2\n\n") == 1
    desk.clock.advance(ACK_SECONDS - COMMENT_SECONDS)
    answer = await line.answer()
    last = chunks(answer.body)[-1]
    assert (last["choices"][0]["finish_reason"], last["cecilia"]["cause"]) == ("stop", "flow_timeout")
    await desk.idle()
    assert desk.engine.outcomes == ["cancelled"]


async def test_a_paused_stream_is_kept_alive_and_never_timed_out(make_desk: MakeDesk) -> None:
    desk = await make_desk(script=WORDS)
    line = desk.open()
    line.post(stream=True, flow={"mode": "ack", "window": 2})
    await seen(line, 2)
    assert (await desk.open().ask(*post("generation/pause"))).status == 200
    await until(desk, "paused")
    start = len(line.wire)
    for _ in range(40):
        desk.clock.advance(COMMENT_SECONDS)
    assert line.wire[start:].count(b": paused, generated 2\n\n") == 40
    generation = (await until(desk, "paused"))["generation_id"]
    await desk.open().ask(*post("flow/ack", generation_id=generation, seq=2, window=100))
    await desk.open().ask(*post("generation/resume"))
    answer = await line.answer()
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks(answer.body))
    assert text == "".join(WORDS)


@pytest.mark.parametrize("seed", range(ROUNDS // 10))
async def test_whatever_clients_do_the_slot_is_free_in_the_end(make_desk: MakeDesk, seed: int) -> None:
    """Random acknowledgements, pauses, resumptions, cancellations and disconnects, in any order."""
    desk = await make_desk(script=WORDS)
    rng = random.Random(seed)
    for _ in range(10):
        line = desk.open()
        line.post(stream=True, flow={"mode": "ack", "window": rng.randint(1, 4)})
        await line.until(b'"role":"assistant"')
        generation = desk.app._service.generations.active
        for _ in range(STEPS):
            action = rng.choice(
                ["ack", "pause", "resume", "ack", "resume", "step", "cancel", "lose", "clock"]
            )
            if generation is None or desk.app._service.generations.active is not generation:
                break
            if action == "ack":
                status = await desk.open().ask(
                    *post("flow/ack", generation_id=generation.id, seq=rng.randint(0, 12))
                )
                assert status.status in (200, 400)
            elif action in ("pause", "resume"):
                assert (await desk.open().ask(*post(f"generation/{action}"))).status in (200, 409)
            elif action == "cancel" and rng.random() < 0.1:
                assert (await desk.open().ask(*post("cancel"))).status in (200, 409)
            elif action == "lose" and rng.random() < 0.1:
                line.lose()
            elif action == "clock":
                desk.clock.advance(rng.choice([1.0, COMMENT_SECONDS]))
            await asyncio.sleep(0)
            flow = generation.job.flow
            assert 0 <= flow.acked <= flow.sent
        line.lose()
        await desk.idle()
        got = "".join(
            chunk["choices"][0]["delta"].get("content", "")
            for chunk in _whole_chunks(line.wire)
            if chunk["choices"]
        )
        assert "".join(WORDS).startswith(got)
    assert len(desk.engine.outcomes) == 10


def _whole_chunks(wire: bytes) -> list[dict[str, Any]]:
    """The data events that arrived whole, whatever came after."""
    lines = wire.replace(b"\r\n", b"\n").split(b"\n")
    found = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: {")]
    return [json.loads(line) for line in found if line.endswith(b"}")]
