# SPDX-License-Identifier: Apache-2.0
"""Chat request bodies: JSON to a `ChatCall`, or the 400 that says what is wrong and where.

Strict about the type of known fields, lenient about unknown ones. A known field that this server does not
implement is refused when it is set to something that would change the answer, and ignored otherwise.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from cecilia.engine.job import ChatRequest
from cecilia.sampler import REPEAT_LAST_N, SamplingParams
from server.errors import (
    ApiError,
    invalid_value,
    missing_parameter,
    unsupported_parameter,
    unsupported_value,
)
from server.openai.messages import parse_messages

MAX_DEPTH = 64
MAX_STOPS = 16
MAX_STOP_BYTES = 1024
MAX_TOP_LOGPROBS = 20
# A larger top_k keeps the whole vocabulary as well, and would not fit the sampler's machine integer.
MOST_TOP_K = 2**31 - 1
# A drawn seed is told in the answer, and JavaScript has no integers beyond 53 bits.
SEED_BITS = 53

Body = dict[str, Any]

_Value = TypeVar("_Value", int, float)
_MAX_INT32 = 2**31 - 1

# Fields with one value that means "off"; this server has no other. (field, values that mean off)
_ONLY_OFF: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("tools", ([],)),
    ("tool_choice", ("none",)),
    ("functions", ([],)),
    ("function_call", ("none",)),
    ("audio", ()),
)

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# What the template is given besides, and the parameters through which the values travel to it.
_TEMPLATE_RESERVED = frozenset(
    {"messages", "add_generation_prompt", "bos_token", "eos_token", "tools", "documents"}
    | {"self", "tokenizer", "template"}
)


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A chat request: what the engine gets, and how the answer is to be sent."""

    engine: ChatRequest
    stream: bool
    include_usage: bool
    seed: int
    """The seed in use, as the client gave it or as it was drawn."""


def parse_json(raw: bytes) -> Body:
    """The body as an object. orjson refuses invalid UTF-8, lone surrogates, NaN and a depth over 1024."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, "invalid_json", f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "invalid_json", "the request body must be a JSON object")
    _check_depth(value)
    return value


def parse_chat(
    body: Body,
    *,
    defaults: Mapping[str, float],
    draw_seed: Callable[[], int] = lambda: secrets.randbits(SEED_BITS),
) -> ChatCall:
    """Validate a chat request. `defaults` are the model's sampling defaults."""
    if "messages" not in body:
        raise missing_parameter("messages")
    messages = parse_messages(body["messages"])
    _refuse_unsupported(body)
    _string(body, "model")
    stream = _boolean(body, "stream") or False
    include_usage = _include_usage(body)
    seed = _seed(body, draw_seed)
    thinking, template_kwargs = _thinking(body)
    request = ChatRequest(
        messages=messages,
        sampling=_sampling(body, defaults, seed),
        max_tokens=_max_tokens(body),
        stop=_stops(body),
        enable_thinking=thinking,
        template_kwargs=template_kwargs,
        logprobs=_logprobs(body),
    )
    return ChatCall(request, stream=stream, include_usage=stream and include_usage, seed=seed)


# -- fields -----------------------------------------------------------------------------------------------


def _sampling(body: Body, defaults: Mapping[str, float], seed: int) -> SamplingParams:
    """The model's defaults stand for temperature, top_p and top_k; everything else is off by default."""
    repeat_penalty = _number(body, "repeat_penalty", 0.0, 2.0, low_allowed=False)
    repetition_penalty = _number(body, "repetition_penalty", 0.0, 2.0, low_allowed=False)  # the same, renamed
    return SamplingParams(
        temperature=_first(_number(body, "temperature", 0.0, 2.0), float(defaults.get("temperature", 0.0))),
        top_k=min(max(0, _first(_integer(body, "top_k", -1), int(defaults.get("top_k", 0)))), MOST_TOP_K),
        top_p=_first(_number(body, "top_p", 0.0, 1.0), float(defaults.get("top_p", 1.0))),
        seed=seed,
        min_p=_first(_number(body, "min_p", 0.0, 1.0), 0.0),
        repeat_penalty=_first(repeat_penalty, repetition_penalty, 1.0),
        repeat_last_n=_first(_integer(body, "repeat_last_n", -1, _MAX_INT32), REPEAT_LAST_N),
        presence_penalty=_first(_number(body, "presence_penalty", -2.0, 2.0), 0.0),
        frequency_penalty=_first(_number(body, "frequency_penalty", -2.0, 2.0), 0.0),
        logit_bias=_logit_bias(body),
    )


def _logit_bias(body: Body) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias. Whether the model has the tokens is for the engine to say."""
    value = body.get("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise invalid_value("logit_bias must be an object of token ids and numbers", "logit_bias")
    for key in value:
        # Written one way only, so that no id can occur twice.
        if not re.fullmatch("0|[1-9][0-9]{0,9}", key) or int(key) > _MAX_INT32:
            raise invalid_value(f"logit_bias: {key[:40]!r} is not a token id", "logit_bias")
    biases = {int(key): _number(value, key, -100.0, 100.0, param="logit_bias") for key in value}
    return tuple((token, bias) for token, bias in biases.items() if bias is not None)


def _logprobs(body: Body) -> int | None:
    """How many likely tokens to tell beside each; None when nothing is asked for."""
    wanted = _boolean(body, "logprobs")
    top = _integer(body, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top and not wanted:
        raise invalid_value("top_logprobs needs logprobs to be true", "top_logprobs")
    return (top or 0) if wanted else None


def _seed(body: Body, draw_seed: Callable[[], int]) -> int:
    seed = _integer(body, "seed", -(2**63), 2**63 - 1)
    return draw_seed() if seed is None or seed == -1 else seed


def _max_tokens(body: Body) -> int | None:
    """`max_completion_tokens` wins; both are checked. The engine clamps to the window."""
    limits = [_integer(body, name, 1) for name in ("max_completion_tokens", "max_tokens")]
    return next((limit for limit in limits if limit is not None), None)


def _stops(body: Body) -> tuple[str, ...]:
    value = body.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid_value("stop must be a string or a list of strings", "stop")
    if len(stops) > MAX_STOPS:
        raise invalid_value(f"at most {MAX_STOPS} stop strings are accepted, got {len(stops)}", "stop")
    if any(len(stop.encode()) > MAX_STOP_BYTES for stop in stops):
        raise invalid_value(f"a stop string may be at most {MAX_STOP_BYTES} bytes long", "stop")
    return tuple(stop for stop in stops if stop)


def _include_usage(body: Body) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise invalid_value("stream_options must be an object", "stream_options")
    return _boolean(options, "include_usage", "stream_options.include_usage") or False


def _thinking(body: Body) -> tuple[bool | None, Body]:
    """(think or not, None when the request does not say; further variables for the template)."""
    kwargs = body.get("chat_template_kwargs")
    if kwargs is None:
        kwargs = {}
    if not isinstance(kwargs, dict):
        raise invalid_value("chat_template_kwargs must be an object", "chat_template_kwargs")
    for name in kwargs:
        if not name.isidentifier() or name in _TEMPLATE_RESERVED:
            raise invalid_value(f"{name!r} cannot be set for the template", "chat_template_kwargs")
    effort = body.get("reasoning_effort")
    if effort is not None and effort not in _EFFORTS:
        raise invalid_value(f"reasoning_effort must be one of {', '.join(_EFFORTS)}", "reasoning_effort")
    choices = (
        _boolean(kwargs, "enable_thinking", "chat_template_kwargs.enable_thinking"),
        _boolean(body, "enable_thinking"),
        False if effort == "none" else None,
    )
    thinking = next((choice for choice in choices if choice is not None), None)
    return thinking, {name: value for name, value in kwargs.items() if name != "enable_thinking"}


def _refuse_unsupported(body: Body) -> None:
    for name, off in _ONLY_OFF:
        value = body.get(name)
        # Compared with the type: 0 is no boolean here.
        if value is not None and not any(type(value) is type(same) and value == same for same in off):
            raise unsupported_parameter(f"{name} is not supported by this server", name)
    _refuse_choices(body)
    _refuse_formats(body)


def _refuse_choices(body: Body) -> None:
    n = _integer(body, "n", 1)
    if n is not None and n > 1:
        raise unsupported_value(f"n must be 1: one answer is generated per request, asked for {n}", "n")
    if _boolean(body, "continue_final_message"):
        text = "continue_final_message is not supported: an answer always begins a new assistant message"
        raise unsupported_parameter(text, "continue_final_message")


def _refuse_formats(body: Body) -> None:
    form = body.get("response_format")
    if form is not None:
        kind = form.get("type") if isinstance(form, dict) else None
        if not isinstance(kind, str):
            raise invalid_value("response_format must be an object with a type", "response_format")
        if kind != "text":
            raise unsupported_parameter(f"response_format {kind!r} is not supported", "response_format")
    modalities = body.get("modalities")
    if modalities is not None and not isinstance(modalities, list):
        raise invalid_value("modalities must be a list", "modalities")
    if any(kind != "text" for kind in modalities or ()):
        raise unsupported_value("text is the only modality", "modalities")


# -- types ------------------------------------------------------------------------------------------------


def _boolean(body: Body, name: str, param: str | None = None) -> bool | None:
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise invalid_value(f"{param or name} must be true or false", param or name)
    return value


def _string(body: Body, name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid_value(f"{name} must be a string", name)
    return value


def _integer(body: Body, name: str, low: int, high: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int:  # a bool is an int to isinstance, and 1e30 arrives as a float
        raise invalid_value(f"{name} must be an integer", name)
    if value < low or (high is not None and value > high):
        upper = "" if high is None else f" and at most {high}"
        raise invalid_value(f"{name} must be at least {low}{upper}, got {value}", name)
    return value


def _number(
    body: Body, name: str, low: float, high: float, *, low_allowed: bool = True, param: str | None = None
) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) not in (int, float):
        raise invalid_value(f"{name} must be a number", param or name)
    if not (low <= value <= high) or (value == low and not low_allowed):
        bound = "at least" if low_allowed else "over"
        text = f"{name} must be {bound} {low:g} and at most {high:g}, got {value:g}"
        raise invalid_value(text, param or name)
    return float(value)


def _first(*values: _Value | None) -> _Value:
    """The first that is given; the last one is the default and always is."""
    return next(value for value in values if value is not None)


def _check_depth(value: Body) -> None:
    """Nesting is bounded without recursion: level by level over containers only."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for container in level:
            items = container.values() if isinstance(container, dict) else container
            children.extend(item for item in items if isinstance(item, (dict, list)))
        if not children:
            return
        level = children
    raise ApiError(400, "invalid_json", f"the request body is nested deeper than {MAX_DEPTH} levels")
