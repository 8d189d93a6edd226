# SPDX-License-Identifier: Apache-2.0
"""Chat request bodies: every row of the field table, accepted and refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cecilia.sampler import SamplingParams
from server.errors import ApiError
from server.fields import parse_json
from server.openai.validate import ChatCall, parse_chat

DEFAULTS = {"temperature": 0.6, "top_p": 0.92, "top_k": 30}
USER = {"role": "user", "content": "hi"}


def parse(**fields: Any) -> ChatCall:
    body = {"messages": [USER]} | fields
    return parse_chat(parse_json(json.dumps(body).encode()), defaults=DEFAULTS, draw_seed=lambda: 77)


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    assert "\n" not in caught.value.message
    return caught.value


def contents(*messages: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in parse(messages=list(messages)).engine.messages]


def test_the_least_request_gets_the_models_defaults() -> None:
    call = parse()
    assert call.engine.messages == [USER]
    assert call.engine.sampling == SamplingParams(temperature=0.6, top_p=0.92, top_k=30, seed=77)
    assert (call.engine.max_tokens, call.engine.stop, call.engine.enable_thinking) == (None, (), None)
    assert (call.stream, call.include_usage, call.seed) == (False, False, 77)


SAMPLING = [
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 2}, {"temperature": 2.0}),
    ({"temperature": None}, {"temperature": 0.6}),
    ({"top_p": 0}, {"top_p": 0.0}),
    ({"top_p": 1}, {"top_p": 1.0}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"top_k": 0}, {"top_k": 0}),
    ({"top_k": 5}, {"top_k": 5}),
    ({"top_k": 2**64 - 1}, {"top_k": 2**31 - 1}),
    ({"min_p": 0.05}, {"min_p": 0.05}),
    ({"min_p": None}, {"min_p": 0.0}),
    ({"repeat_penalty": 1.1}, {"repeat_penalty": 1.1, "repeat_last_n": 64}),
    ({"repetition_penalty": 1.2}, {"repeat_penalty": 1.2}),
    ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, {"repeat_penalty": 1.1}),
    ({"repeat_last_n": -1}, {"repeat_last_n": -1}),
    ({"repeat_last_n": 0}, {"repeat_last_n": 0}),
    ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
    ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
    ({"logit_bias": {"0": 100, "7": -100.0, "9": 0.5}}, {"logit_bias": ((0, 100.0), (7, -100.0), (9, 0.5))}),
    ({"logit_bias": {"7": None}}, {"logit_bias": ()}),
    ({"seed": 5}, {"seed": 5}),
    ({"seed": -5}, {"seed": -5}),
    ({"seed": -1}, {"seed": 77}),
    ({"seed": None}, {"seed": 77}),
    ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
    ({"seed": -(2**63)}, {"seed": -(2**63)}),
]


@pytest.mark.parametrize(("fields", "expected"), SAMPLING, ids=str)
def test_sampling(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    sampling = parse(**fields).engine.sampling
    assert {name: getattr(sampling, name) for name in expected} == expected


OTHER = [
    ({"max_tokens": 7}, "max_tokens", 7),
    ({"max_completion_tokens": 3, "max_tokens": 7}, "max_tokens", 3),
    ({"max_completion_tokens": None, "max_tokens": 7}, "max_tokens", 7),
    ({"max_tokens": 10**9}, "max_tokens", 10**9),
    ({"stop": None}, "stop", ()),
    ({"stop": "x"}, "stop", ("x",)),
    ({"stop": ["a", "", "b"]}, "stop", ("a", "b")),
    ({"stop": ""}, "stop", ()),
    ({"stop": ["x"] * 16}, "stop", ("x",) * 16),
    ({"logprobs": True}, "logprobs", 0),
    ({"logprobs": True, "top_logprobs": None}, "logprobs", 0),
    ({"logprobs": True, "top_logprobs": 20}, "logprobs", 20),
    ({"logprobs": None}, "logprobs", None),
    ({"reasoning_effort": "none"}, "enable_thinking", False),
    ({"reasoning_effort": "high"}, "enable_thinking", None),
    ({"enable_thinking": True}, "enable_thinking", True),
    ({"chat_template_kwargs": {"enable_thinking": False, "x": 1}}, "enable_thinking", False),
    ({"chat_template_kwargs": {"enable_thinking": False, "x": 1}}, "template_kwargs", {"x": 1}),
]


@pytest.mark.parametrize(("fields", "name", "expected"), OTHER, ids=str)
def test_other_fields(fields: dict[str, Any], name: str, expected: Any) -> None:
    assert getattr(parse(**fields).engine, name) == expected


def test_streaming_options() -> None:
    assert parse(stream=True, stream_options={"include_usage": True}).include_usage
    assert not parse(stream=True, stream_options={}).include_usage
    assert not parse(stream=True, stream_options=None).include_usage
    # Without a stream the options are ignored, not refused.
    assert not parse(stream=False, stream_options={"include_usage": True}).include_usage
    assert not parse(stream=None).stream


IGNORED = [
    {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True},
    {"prediction": {}, "verbosity": "low", "prompt_cache_key": "k", "safety_identifier": "s"},
    {"modalities": ["text"], "of_the_future": [1, 2]},
    {"tools": [], "tool_choice": "none", "functions": [], "response_format": {"type": "text"}},
    {"tools": None, "tool_choice": None, "response_format": None, "logit_bias": None, "n": None},
    {"n": 1, "logprobs": False, "logit_bias": {}, "model": "anything"},
    {"logprobs": False, "top_logprobs": 0},
    {
        "min_p": 0,
        "repeat_penalty": 1,
        "repetition_penalty": 1.0,
        "presence_penalty": 0,
        "frequency_penalty": 0,
    },
]


@pytest.mark.parametrize("fields", IGNORED, ids=str)
def test_what_changes_nothing_is_accepted(fields: dict[str, Any]) -> None:
    assert parse(**fields).engine == parse().engine


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": "hi"}, "invalid_value", "messages"),
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": {}}, "invalid_value", "messages"),
    ({"messages": None}, "invalid_value", "messages"),
    ({"messages": [USER] * 4097}, "invalid_value", "messages"),
    ({"messages": ["hi"]}, "invalid_value", "messages[0]"),
    ({"messages": [USER, {"role": "robot", "content": ""}]}, "invalid_value", "messages[1].role"),
    ({"messages": [{"role": "function", "content": ""}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"content": "hi"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "hi"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "user", "content": {"text": "x"}}]}, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "invalid_value", "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
        "invalid_value",
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "unsupported_value",
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "unsupported_value",
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]},
        "unsupported_value",
        "messages[0].content[0]",
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]},
        "invalid_value",
        "messages",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}, USER]},
        "unsupported_parameter",
        "messages[0].tool_calls",
    ),
    ({"model": 5}, "invalid_value", "model"),
    ({"stream": 1}, "invalid_value", "stream"),
    ({"stream": "true"}, "invalid_value", "stream"),
    ({"stream_options": []}, "invalid_value", "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "invalid_value", "stream_options.include_usage"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"max_tokens": -1}, "invalid_value", "max_tokens"),
    ({"max_tokens": 1.0}, "invalid_value", "max_tokens"),
    ({"max_tokens": True}, "invalid_value", "max_tokens"),
    ({"max_tokens": "5"}, "invalid_value", "max_tokens"),
    ({"max_tokens": 10**30}, "invalid_value", "max_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"temperature": -0.1}, "invalid_value", "temperature"),
    ({"temperature": 2.1}, "invalid_value", "temperature"),
    ({"temperature": "1"}, "invalid_value", "temperature"),
    ({"temperature": False}, "invalid_value", "temperature"),
    ({"top_p": -0.1}, "invalid_value", "top_p"),
    ({"top_p": 1.1}, "invalid_value", "top_p"),
    ({"top_k": -2}, "invalid_value", "top_k"),
    ({"top_k": 1.5}, "invalid_value", "top_k"),
    ({"min_p": 1.5}, "invalid_value", "min_p"),
    ({"min_p": -0.1}, "invalid_value", "min_p"),
    ({"min_p": True}, "invalid_value", "min_p"),
    ({"repeat_penalty": 0}, "invalid_value", "repeat_penalty"),
    ({"repeat_penalty": 2.1}, "invalid_value", "repeat_penalty"),
    ({"repeat_penalty": 1.1, "repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
    ({"repeat_last_n": -2}, "invalid_value", "repeat_last_n"),
    ({"repeat_last_n": 1.5}, "invalid_value", "repeat_last_n"),
    ({"repeat_last_n": 2**31}, "invalid_value", "repeat_last_n"),
    ({"presence_penalty": 3}, "invalid_value", "presence_penalty"),
    ({"presence_penalty": "1"}, "invalid_value", "presence_penalty"),
    ({"frequency_penalty": -3}, "invalid_value", "frequency_penalty"),
    ({"seed": 1.5}, "invalid_value", "seed"),
    ({"seed": True}, "invalid_value", "seed"),
    ({"seed": "1"}, "invalid_value", "seed"),
    ({"seed": 2**63}, "invalid_value", "seed"),
    ({"seed": 2**70}, "invalid_value", "seed"),
    ({"stop": 5}, "invalid_value", "stop"),
    ({"stop": [5]}, "invalid_value", "stop"),
    ({"stop": ["x"] * 17}, "invalid_value", "stop"),
    ({"stop": ["\u00e9" * 513]}, "invalid_value", "stop"),
    ({"n": 2}, "unsupported_value", "n"),
    ({"n": 0}, "invalid_value", "n"),
    ({"logprobs": 0}, "invalid_value", "logprobs"),
    ({"logprobs": "true"}, "invalid_value", "logprobs"),
    ({"top_logprobs": 3}, "invalid_value", "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 3}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": True}, "invalid_value", "top_logprobs"),
    ({"logit_bias": [[5, 1]]}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"five": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"05": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"5\n": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"\u0665": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {str(2**31): 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"5": False}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"5": 100.5}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"5": -101}}, "invalid_value", "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
    ({"response_format": {"type": "json_schema"}}, "unsupported_parameter", "response_format"),
    ({"response_format": "json"}, "invalid_value", "response_format"),
    ({"tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
    ({"tool_choice": "auto"}, "unsupported_parameter", "tool_choice"),
    ({"functions": [{}]}, "unsupported_parameter", "functions"),
    ({"audio": {"voice": "x"}}, "unsupported_parameter", "audio"),
    ({"modalities": ["text", "audio"]}, "unsupported_value", "modalities"),
    ({"modalities": "audio"}, "invalid_value", "modalities"),
    ({"reasoning_effort": "huge"}, "invalid_value", "reasoning_effort"),
    ({"reasoning_effort": ["none"]}, "invalid_value", "reasoning_effort"),
    ({"enable_thinking": "false"}, "invalid_value", "enable_thinking"),
    ({"chat_template_kwargs": []}, "invalid_value", "chat_template_kwargs"),
    (
        {"chat_template_kwargs": {"enable_thinking": "false"}},
        "invalid_value",
        "chat_template_kwargs.enable_thinking",
    ),
    ({"chat_template_kwargs": {"messages": []}}, "invalid_value", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a b": 1}}, "invalid_value", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "invalid_value", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"template": 1}}, "invalid_value", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tokenizer": 1}}, "invalid_value", "chat_template_kwargs"),
    ({"continue_final_message": True}, "unsupported_parameter", "continue_final_message"),
]


@pytest.mark.parametrize(("fields", "code", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused(fields: dict[str, Any], code: str, param: str) -> None:
    error = refused(**fields)
    assert (error.code, error.param) == (code, param)


def test_messages_are_required() -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat({}, defaults={})
    assert (caught.value.code, caught.value.param) == ("missing_required_parameter", "messages")


# -- messages ---------------------------------------------------------------------------------------------


def test_parts_are_joined_without_a_separator() -> None:
    parts = [
        {"type": "text", "text": "a "},
        {"type": "input_text", "text": "b"},
        {"type": "text", "text": "c"},
    ]
    assert contents({"role": "user", "content": parts}) == [("user", "a bc")]


def test_system_messages_at_the_head_become_one() -> None:
    joined = contents({"role": "system", "content": "one"}, {"role": "developer", "content": "two"}, USER)
    assert joined == [("system", "one\n\ntwo"), ("user", "hi")]


def test_a_later_system_message_stays_where_it_is() -> None:
    late = contents({"role": "system", "content": "one"}, USER, {"role": "developer", "content": "two"}, USER)
    assert late == [("system", "one"), ("user", "hi"), ("system", "two"), ("user", "hi")]


def test_an_assistant_may_have_said_nothing() -> None:
    assert contents(USER, {"role": "assistant", "content": None}, USER)[1] == ("assistant", "")
    assert contents(USER, {"role": "assistant"}, USER)[1] == ("assistant", "")
    assert contents(USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]})[1] == (
        "assistant",
        "no",
    )


def test_earlier_reasoning_is_kept_for_the_template() -> None:
    call = parse(messages=[USER, {"role": "assistant", "content": "a", "reasoning_content": "r"}, USER])
    assert call.engine.messages[1] == {"role": "assistant", "content": "a", "reasoning_content": "r"}


# -- JSON -------------------------------------------------------------------------------------------------

BAD_JSON = {
    "empty": b"",
    "not json": b"{messages}",
    "cut off": b'{"messages": [',
    "nan": b'{"temperature": NaN}',
    "infinity": b'{"temperature": 1e999}',
    "invalid utf-8": b'{"messages": "\xff"}',
    "overlong utf-8": b'{"messages": "\xc0\xaf"}',
    "encoded surrogate": b'{"messages": "\xed\xa0\x80"}',
    "lone high surrogate": rb'{"messages": [{"role": "user", "content": "\ud800"}]}',
    "lone low surrogate": rb'{"messages": [{"role": "user", "content": "\udc00"}]}',
    "swapped surrogates": rb'{"messages": "\udc00\ud800"}',
    "byte order mark": b'\xef\xbb\xbf{"messages": []}',
    "a list": b"[]",
    "a number": b"5",
    "a string": b'"hi"',
    "null": b"null",
    "60,000 lists": b'{"messages": ' + b"[" * 60_000 + b"]" * 60_000 + b"}",
    "60,000 open objects": b'{"a":' * 60_000,
    "65 levels": b'{"a":' * 65 + b"1" + b"}" * 65,
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_bad_json(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json(BAD_JSON[name])
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    # The error can always be sent: its body is JSON in valid UTF-8.
    assert json.loads(caught.value.body())["error"]["code"] == "invalid_json"


def test_64_levels_pass() -> None:
    parse_json(b'{"a":' * 64 + b"1" + b"}" * 64)


def test_a_surrogate_pair_is_one_character() -> None:
    assert parse_json(rb'{"a": "\ud83d\ude00"}') == {"a": "\U0001f600"}
