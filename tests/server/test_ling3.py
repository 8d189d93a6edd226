# SPDX-License-Identifier: Apache-2.0
"""Chats with a micro Ling-3.0 on a real server: reasoning, its switches, ends of a turn, the model list.

Weights are random, so what the model says is put into its mouth where it matters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import openai
import pytest

from cecilia.engine.generate import Engine
from cecilia.engine.load import load
from tests.server.fake_engine import PATIENCE
from tests.server.serving import Running, serving
from tools.make_tiny import make_tiny

ASK: list[Any] = [{"role": "user", "content": "Q"}]
# Ids of the control tokens of the byte vocabulary.
ENDOFTEXT, ROLE_END, ROLE, ROLE_CLOSE, THINK, THINK_CLOSE = 257, 258, 259, 260, 263, 264


def prompt_ids(switch: str, *tail: int) -> list[int]:
    """The prompt of ASK, by hand."""
    system = [ROLE, *b"SYSTEM", ROLE_CLOSE, *f"detailed thinking {switch}".encode(), ROLE_END]
    human = [ROLE, *b"HUMAN", ROLE_CLOSE, *b"Q", ROLE_END]
    return [*system, *human, ROLE, *b"ASSISTANT", ROLE_CLOSE, *b"\n", *tail]


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("ling3") / "micro.l3r", architecture="ling3", quant="w4a8")


@pytest.fixture(scope="module")
def server(micro: Path) -> Iterator[tuple[Running, Engine]]:
    engines: list[Engine] = []

    def start(_config: object, _progress: object) -> Engine:
        engines.append(load(micro, threads=1))
        return engines[0]

    with serving(start, loop_factory=asyncio.new_event_loop) as running:
        yield running, engines[0]


@pytest.fixture
def client(server: tuple[Running, Engine]) -> Iterator[openai.OpenAI]:
    url = f"{server[0].url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def speak(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the next answer say these texts, a token for each byte, and these token ids."""

    def say(*parts: str | int) -> None:
        ids = [i for part in parts for i in ([part] if isinstance(part, int) else part.encode())]
        monkeypatch.setattr("cecilia.sampler.Sampler.sample", mock.Mock(side_effect=ids))

    return say


def answer(client: openai.OpenAI, **options: Any) -> tuple[str | None, str | None, str]:
    """(reasoning, content, finish reason), the same streamed and whole."""
    whole = client.chat.completions.create(model="any", messages=ASK, max_tokens=20, **options).choices[0]
    return (
        (whole.message.model_extra or {}).get("reasoning_content"),
        whole.message.content,
        whole.finish_reason,
    )


def streamed(client: openai.OpenAI, **options: Any) -> tuple[str, str, str]:
    reasoning, content, reason = "", "", ""
    for chunk in client.chat.completions.create(
        model="any", messages=ASK, max_tokens=20, stream=True, **options
    ):
        choice = chunk.choices[0]
        reasoning += (choice.delta.model_extra or {}).get("reasoning_content", "")
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
    return reasoning, content, reason


OFF: list[dict[str, Any]] = [
    {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    {"extra_body": {"chat_template_kwargs": {"thinking_option": "off"}}},
    {"extra_body": {"enable_thinking": False}},
    {"reasoning_effort": "none"},
]
ON: list[dict[str, Any]] = [{}, {"extra_body": {"enable_thinking": True}}, {"reasoning_effort": "low"}]


@pytest.mark.parametrize("options", ON)
def test_thinking_comes_as_reasoning(
    client: openai.OpenAI, speak: Callable[..., None], options: dict[str, Any]
) -> None:
    for ask in (answer, streamed):
        speak("Hm.\n", THINK_CLOSE, "\n\nYes", ROLE_END)
        assert ask(client, **options) == ("Hm.", "Yes", "stop")


@pytest.mark.parametrize("options", OFF)
def test_without_thinking_all_is_content(
    client: openai.OpenAI, speak: Callable[..., None], options: dict[str, Any]
) -> None:
    speak("Yes.\nNo.", ROLE_END)
    assert answer(client, **options) == (None, "Yes.\nNo.", "stop")
    speak("Yes.\nNo.", ROLE_END)
    assert streamed(client, **options) == ("", "Yes.\nNo.", "stop")


@pytest.mark.parametrize("end", [ROLE_END, ENDOFTEXT, "<|role_end|>"])
def test_what_ends_a_turn(client: openai.OpenAI, speak: Callable[..., None], end: str | int) -> None:
    speak("Yes", end, " and on")
    assert answer(client, **OFF[0]) == (None, "Yes", "stop")
    speak("Hm", end, " and on")
    assert streamed(client) == ("Hm", "", "stop")


@pytest.mark.parametrize(
    ("options", "ids"),
    [(ON[0], prompt_ids("on", THINK)), (OFF[0], prompt_ids("off", THINK, THINK_CLOSE))],
)
def test_the_prompt(
    client: openai.OpenAI, server: tuple[Running, Engine], options: dict[str, Any], ids: list[int]
) -> None:
    used = client.chat.completions.create(model="any", messages=ASK, max_tokens=1, **options).usage
    assert used is not None
    assert used.prompt_tokens == len(ids)
    assert server[1]._runner.session.tokens[: len(ids)] == ids


def test_random_weights_say_something(client: openai.OpenAI) -> None:
    reasoning, content, reason = answer(client, temperature=1.5, seed=3)
    assert reasoning or content
    assert reason in ("stop", "length")


def test_a_conversation_goes_on(client: openai.OpenAI, speak: Callable[..., None]) -> None:
    speak("A", ROLE_END)
    answer(client, **OFF[0])
    more = [*ASK, {"role": "assistant", "content": "A"}, {"role": "user", "content": "R"}]
    speak("B", ROLE_END)
    next_turn: Any = client.chat.completions.create(model="any", messages=more, max_tokens=9, **OFF[0])
    details = next_turn.usage.prompt_tokens_details
    assert details.cached_tokens == len(prompt_ids("off", THINK, THINK_CLOSE)) + 1  # and "A"


def test_tools_are_refused(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client.chat.completions.create(model="any", messages=ASK, tools=[tool])


def test_the_model_list_tells_what_the_weights_are(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    meta = (model.model_extra or {})["meta"]
    assert (meta["architecture"], meta["weights"]) == ("ling3", "random")
