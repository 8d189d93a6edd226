# SPDX-License-Identifier: Apache-2.0
"""The text stream: any cutting of the bytes gives what a slow reading of the whole gives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cecilia.text.stream import Piece, TextStream

THINK = ("<think>", "</think>")


def whole(
    data: bytes,
    stops: Sequence[str],
    think: tuple[str, str] | None,
    opens_in_think: bool,
    ends: Sequence[str] = (),
) -> tuple[str, str, bool]:
    """(content, reasoning, stopped) from the whole text at once, written from the rules alone."""
    text, reasoning = data.decode("utf-8", "replace"), ""
    if places := [text.index(end) + len(end) for end in ends if end in text]:
        ended = text[: min(places)]
        left = ended[: len(ended) - max(len(end) for end in ends if ended.endswith(end))]
        return (*whole(left.encode(), stops, think, opens_in_think)[:2], True)
    if think is not None:
        tagged = re.match(rf"\s*{re.escape(think[0])}(.*)", text, re.DOTALL)
        if tagged or opens_in_think:
            inside, closed, text = (tagged[1] if tagged else text).partition(think[1])
            reasoning = inside.strip("\n") if closed else inside.lstrip("\n")
            text = text.lstrip("\n")
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], reasoning, True
    return text, reasoning, False


def streamed(chunks: Iterable[bytes], **options: object) -> tuple[str, str, bool]:
    stream = TextStream(**options)  # type: ignore[arg-type]
    pieces = [*map(stream.push, chunks), stream.flush()]
    stopped = [piece.stopped for piece in pieces]
    assert stopped == sorted(stopped), "a stop is never taken back"
    return "".join(p.content for p in pieces), "".join(p.reasoning for p in pieces), pieces[-1].stopped


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    edges = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


PARTS = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<thi",
        "nk>",
        "</",
        "\n",
        "\n\n",
        " ",
        "a",
        "ab",
        "b",
        "ba",
        "END",
        "EN",
        "é",
        "漢",
        "🙂",
    ]
)
TEXTS = st.lists(st.one_of(PARTS.map(str.encode), st.binary(max_size=3)), max_size=14).map(b"".join)
STOPS = st.lists(
    st.sampled_from(["", "a", "ab", "aba", "b", "END", "ND", "\n\n", "漢", "<think>"]), max_size=4
)


@settings(max_examples=500, deadline=None)
@given(
    data=TEXTS,
    places=st.lists(st.integers(0, 60), max_size=12),
    stops=STOPS,
    think=st.sampled_from([None, THINK]),
    opens_in_think=st.booleans(),
    ends=st.sampled_from([(), ("END",), ("ab", "bab"), ("</think>a",)]),
)
@example(b"abcd", [1, 2, 3], ["abcd", "bc"], None, False, ())
@example(b"<think>\n\nx\n\n</think>\n\n\ny", list(range(30)), [], THINK, False, ())
def test_any_cutting_gives_the_text_of_the_whole(
    data: bytes,
    places: list[int],
    stops: list[str],
    think: tuple[str, str] | None,
    opens_in_think: bool,
    ends: tuple[str, ...],
) -> None:
    expected = whole(data, stops, think, opens_in_think, ends)
    options = {"stops": stops, "ends": ends, "think": think, "opens_in_think": opens_in_think}
    assert streamed(cut(data, places), **options) == expected
    assert streamed([bytes([value]) for value in data], **options) == expected
    assert streamed([data], **options) == expected


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=40), places=st.lists(st.integers(0, 40), max_size=6))
def test_any_bytes_become_what_python_makes_of_them(data: bytes, places: list[int]) -> None:
    assert streamed(cut(data, places)) == (data.decode("utf-8", "replace"), "", False)


def test_an_incomplete_character_is_held_then_replaced() -> None:
    stream = TextStream()
    assert stream.push("a漢".encode()[:-1]) == Piece("a")
    assert stream.flush() == Piece("\ufffd")


def test_text_is_released_as_soon_as_it_is_certain() -> None:
    stream = TextStream(stops=["STOP"], think=THINK)
    assert stream.push(b" <th") == Piece()
    assert stream.push(b"ree> S") == Piece(" <three> ")
    assert stream.push(b"TAR") == Piece("STAR")
    assert stream.push(b"T ST") == Piece("T ")
    assert stream.flush() == Piece("ST")


def test_text_before_the_stop_in_the_same_token_is_emitted_and_nothing_after() -> None:
    stream = TextStream(stops=["\nUser:"])
    assert stream.push(b"Fine.\nUser: hello") == Piece("Fine.", stopped=True)
    assert stream.push(b"more") == Piece(stopped=True)
    assert stream.flush() == Piece(stopped=True)


def test_stops_do_not_apply_inside_reasoning() -> None:
    stops = ["END"]
    assert streamed([b"<think>no END yet</think>yes END"], stops=stops, think=THINK) == (
        "yes ",
        "no END yet",
        True,
    )


def test_ends_apply_inside_reasoning_too() -> None:
    options: dict[str, object] = {"ends": ("<end>",), "stops": ["o"], "think": THINK, "opens_in_think": True}
    assert streamed([b"no\n<e", b"nd>never"], **options) == ("", "no\n", True)
    assert streamed([b"yes</think>\n\nn", b"<end>never"], **options) == ("n", "yes", True)


def test_reasoning_comes_out_while_it_is_being_written() -> None:
    stream = TextStream(think=THINK)
    assert stream.push(b"<think>\nFirst") == Piece(reasoning="First")
    assert stream.push(b"\n\n") == Piece()
    assert stream.push(b"then.\n</thi") == Piece(reasoning="\n\nthen.")
    assert stream.push(b"nk>\n\nYes") == Piece("Yes")


def test_generation_may_end_inside_reasoning() -> None:
    assert streamed([b"a\n</thin"], think=THINK, opens_in_think=True) == ("", "a\n</thin", False)


def test_a_later_think_tag_is_text() -> None:
    said = "Write <think> like this: <think>x</think>"
    assert streamed([said.encode()], think=THINK) == (said, "", False)


@pytest.mark.parametrize("said", [b"<think>x</think>y", b"x</think>y"])
def test_prompt_opened_block_with_and_without_a_repeated_tag(said: bytes) -> None:
    assert streamed([said], think=THINK, opens_in_think=True) == ("y", "x", False)
