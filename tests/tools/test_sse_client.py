# SPDX-License-Identifier: Apache-2.0
"""The reference client on a live server: the whole text, a window that adapts, an error that is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from unittest import mock

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import Running, serving
from tools import sse_client

WORDS = [f"w{i} " for i in range(30)]


@pytest.fixture
def server() -> Iterator[Running]:
    with serving(lambda *_: FakeEngine(script=WORDS), loop_factory=asyncio.new_event_loop) as running:
        yield running


def test_an_answer_arrives_whole(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert sse_client.main(["a question", "--base-url", server.url, "--session-id", "mine"]) == 0
    assert capsys.readouterr().out == "".join(WORDS) + "\n"


def test_keys_pause_resume_and_cancel(server: Running) -> None:
    stream = sse_client.Client(server.url).stream({"messages": [{"role": "user", "content": "a"}]})
    pieces = iter(stream)
    while "w0 " not in next(pieces):
        pass
    for key in "pxrq":
        stream.press(key)
    assert "".join(WORDS).startswith("w0 " + "".join(pieces))
    assert stream.last["cecilia"]["cause"] == "cancelled"


@pytest.mark.parametrize(("sent", "window"), [(9, 2), (5, 8), (7, 4)])
def test_the_window_follows_the_slower_side(server: Running, sent: int, window: int) -> None:
    client = sse_client.Client(server.url)
    stream = client.stream({"messages": [{"role": "user", "content": "a"}]})
    with mock.patch.object(client, "post", return_value=(200, {"sent_seq": sent})) as post:
        stream.acknowledge(5)
    assert post.call_args.args[1] == {"generation_id": stream.id, "seq": 5, "window": 4}
    assert stream.window == window
    stream.close()


def test_a_refusal_is_told(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert sse_client.main(["a", "--base-url", server.url, "--session-id", "../x"]) == 1
    assert "session_id must be" in capsys.readouterr().err
    assert sse_client.main(["a", "--base-url", "http://127.0.0.1:9"]) == 1
