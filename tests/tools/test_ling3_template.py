# SPDX-License-Identifier: Apache-2.0
"""Ling-3.0's chat template, judged by the strings that the published one gives."""

from __future__ import annotations

from typing import Any

import pytest

from cecilia.errors import RequestError
from cecilia.text.chat import ChatTemplate
from tools.convert.byte_vocabulary import LING3_TEMPLATE

TEMPLATE = ChatTemplate(LING3_TEMPLATE)

Q = {"role": "user", "content": "Q"}
ON = "<role>SYSTEM</role>detailed thinking on<|role_end|>"
OFF = "<role>SYSTEM</role>detailed thinking off<|role_end|>"
HUMAN = "<role>HUMAN</role>Q<|role_end|>"
THINK = "<role>ASSISTANT</role>\n<think>"
NO_THINK = "<role>ASSISTANT</role>\n<think></think>"


def rendered(*messages: dict[str, Any], **options: Any) -> str:
    return "".join(segment.text for segment in TEMPLATE.render(list(messages), **options))


def said(role: str, content: str, **more: str) -> dict[str, str]:
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    ("options", "thinks"),
    [
        ({}, True),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"thinking_option": "on"}, True),
        ({"thinking_option": "off"}, False),
        ({"thinking_option": "off", "enable_thinking": True}, True),
        ({"thinking_option": "on", "enable_thinking": False}, False),
    ],
)
def test_thinking(options: dict[str, Any], thinks: bool) -> None:
    assert rendered(Q, **options) == (ON + HUMAN + THINK if thinks else OFF + HUMAN + NO_THINK)


def test_another_thinking_option_is_refused() -> None:
    with pytest.raises(RequestError, match="neither 'on' nor 'off'"):
        rendered(Q, thinking_option="maybe")


@pytest.mark.parametrize(
    ("text", "turn"),
    [
        ("You are X.", "You are X.\ndetailed thinking on"),
        ("", "\ndetailed thinking on"),
        ("X\n", "X\n\ndetailed thinking on"),
        ("Be brief, detailed thinking on", "Be brief, detailed thinking on"),
        ("detailed thinking off", "detailed thinking off"),
    ],
)
def test_the_system_turn(text: str, turn: str) -> None:
    found = rendered(said("system", text), Q)
    assert found == f"<role>SYSTEM</role>{turn}<|role_end|>{HUMAN}{THINK}"


def test_a_directive_in_the_system_text_does_not_change_what_the_request_says() -> None:
    found = rendered(said("system", "detailed thinking on"), Q, enable_thinking=False)
    assert found == f"{ON}{HUMAN}{NO_THINK}"


def test_a_later_system_message_is_a_turn_of_its_own() -> None:
    found = rendered(Q, said("system", "Later."), Q)
    assert found == f"{ON}{HUMAN}<role>SYSTEM</role>Later.<|role_end|>{HUMAN}{THINK}"


@pytest.mark.parametrize(
    ("message", "turn"),
    [
        (said("assistant", "A"), "<think></think>A"),
        (said("assistant", "\nA\n"), "<think></think>\nA\n"),
        (said("assistant", "\n\nA\n", reasoning_content="\n\nR\n r\n"), "<think>R\n r</think>A\n"),
        (said("assistant", "A", reasoning_content=""), "<think></think>A"),
        (said("assistant", "<think>\nR\n</think>\n\nA"), "<think>R</think>A"),
        (said("assistant", "R\n</think>A"), "<think>R</think>A"),
        (said("assistant", "<think></think>A"), "<think></think>A"),
        (said("assistant", "R</think>A</think>B"), "<think>R</think>A</think>B"),
        (said("assistant", "x</think>A", reasoning_content="R"), "<think>R</think>x</think>A"),
    ],
)
def test_assistant_turns_keep_their_reasoning(message: dict[str, str], turn: str) -> None:
    found = rendered(Q, message, Q, enable_thinking=False)
    assert found == f"{OFF}{HUMAN}<role>ASSISTANT</role>\n{turn}<|role_end|>{HUMAN}{NO_THINK}"


def test_without_a_generation_prompt() -> None:
    assert rendered(Q, add_generation_prompt=False) == ON + HUMAN


def test_without_thinking_a_history_is_prompt_and_answer() -> None:
    first = rendered(Q, enable_thinking=False)
    assert rendered(Q, said("assistant", "\nA"), Q, enable_thinking=False).startswith(
        f"{first}\nA<|role_end|>"
    )


def test_results_of_tools_share_a_turn() -> None:
    found = rendered(Q, said("tool", "1"), said("tool", "2"), Q)
    results = "\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert found == f"{ON}{HUMAN}<role>OBSERVATION</role>{results}<|role_end|>{HUMAN}{THINK}"


def test_content_that_is_a_list_is_refused() -> None:
    with pytest.raises(RequestError, match="must be text"):
        rendered({"role": "user", "content": [{"type": "text", "text": "Q"}]})


def test_what_users_write_is_no_control_token() -> None:
    segments = TEMPLATE.render([said("user", "<|role_end|>"), said("assistant", "A</think>B")])
    assert [segment.text for segment in segments if segment.is_user_text] == ["<|role_end|>", "A", "B"]
