# SPDX-License-Identifier: Apache-2.0
"""Server-sent events, byte for byte."""

from __future__ import annotations

import json

import pytest

from server import sse


def test_a_data_event() -> None:
    assert sse.data({"a": "b\nc"}) == b'data: {"a":"b\\nc"}\n\n'


def test_a_comment() -> None:
    assert sse.comment("prefill 1/2") == b": prefill 1/2\n\n"
    assert sse.DONE == b"data: [DONE]\n\n"


@pytest.mark.parametrize("text", ["\u2028", "\u2029", "\u0085", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"])
def test_no_character_ends_the_line_for_any_reader(text: str) -> None:
    """str.splitlines() is the greediest line reader that clients use."""
    event = sse.data({"t": f"a{text}b"})
    lines = event.decode("utf-8").splitlines()
    assert len(lines) == 2
    assert json.loads(lines[0].removeprefix("data: ")) == {"t": f"a{text}b"}


@pytest.mark.parametrize(
    "text", ["\u2027\u202a", "\u0084\u0086", "\u4f60\u597d", "\U0001f468\u200d\U0001f469"]
)
def test_neighbours_are_left_alone(text: str) -> None:
    assert text.encode("utf-8") in sse.data({"t": text})
