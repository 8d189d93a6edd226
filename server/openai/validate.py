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
from typing import Any

from cecilia.engine.job import ChatRequest
from cecilia.sampler import REPEAT_LAST_N, SamplingParams
from server.ack import MAX_WINDOW
from server.errors import (
    invalid_value,
    missing_parameter,
    unsupported_parameter,
    unsupported_value,
)
from server.fields import Body, boolean, first, integer, number, string
from server.openai.messages import parse_messages

SESSION_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
MAX_SALT = 256  # characters
MAX_STOPS = 16
MAX_STOP_BYTES = 1024
MAX_TOP_LOGPROBS = 20
# A larger top_k keeps the whole vocabulary as well, and would not fit the sampler's machine integer.
MOST_TOP_K = 2**31 - 1
# A drawn seed is told in the answer, and JavaScript has no integers beyond 53 bits.
SEED_BITS = 53

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
    window: int | None = None
    """How many events may be under way; None without acknowledgements."""


def parse_chat(
    body: Body,
    *,
    defaults: Mapping[str, float],
    draw_seed: Callable[[], int] = lambda: secrets.randbits(SEED_BITS),
) -> ChatCall:
    """Validate a chat request. `defaults` are the model's sampling defaults."""
    session, continues = _session(body)
    messages = [] if continues else parse_messages(_given(body, "messages"))
    _refuse_unsupported(body)
    string(body, "model")
    stream = boolean(body, "stream") or False
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
        cache_salt=_cache_salt(body),
        session_id=session,
        continues=continues,
    )
    return ChatCall(request, stream, stream and include_usage, seed, _window(body, stream=stream))


def session_name(value: str, param: str = "session_id") -> str:
    """`value` if it can be the name of a session, and of its file."""
    if not re.fullmatch(SESSION_NAME, value):
        text = f"{param} must be 1 to 64 letters, digits and . _ -, beginning with a letter or digit"
        raise invalid_value(text, param)
    return value


# -- fields -----------------------------------------------------------------------------------------------


def _sampling(body: Body, defaults: Mapping[str, float], seed: int) -> SamplingParams:
    """The model's defaults stand for temperature, top_p and top_k; everything else is off by default."""
    repeat_penalty = number(body, "repeat_penalty", 0.0, 2.0, low_allowed=False)
    repetition_penalty = number(body, "repetition_penalty", 0.0, 2.0, low_allowed=False)  # the same, renamed
    return SamplingParams(
        temperature=first(number(body, "temperature", 0.0, 2.0), float(defaults.get("temperature", 0.0))),
        top_k=min(max(0, first(integer(body, "top_k", -1), int(defaults.get("top_k", 0)))), MOST_TOP_K),
        top_p=first(number(body, "top_p", 0.0, 1.0), float(defaults.get("top_p", 1.0))),
        seed=seed,
        min_p=first(number(body, "min_p", 0.0, 1.0), 0.0),
        repeat_penalty=first(repeat_penalty, repetition_penalty, 1.0),
        repeat_last_n=first(integer(body, "repeat_last_n", -1, _MAX_INT32), REPEAT_LAST_N),
        presence_penalty=first(number(body, "presence_penalty", -2.0, 2.0), 0.0),
        frequency_penalty=first(number(body, "frequency_penalty", -2.0, 2.0), 0.0),
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
    biases = {int(key): number(value, key, -100.0, 100.0, param="logit_bias") for key in value}
    return tuple((token, bias) for token, bias in biases.items() if bias is not None)


def _logprobs(body: Body) -> int | None:
    """How many likely tokens to tell beside each; None when nothing is asked for."""
    wanted = boolean(body, "logprobs")
    top = integer(body, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top and not wanted:
        raise invalid_value("top_logprobs needs logprobs to be true", "top_logprobs")
    return (top or 0) if wanted else None


def _seed(body: Body, draw_seed: Callable[[], int]) -> int:
    seed = integer(body, "seed", -(2**63), 2**63 - 1)
    return draw_seed() if seed is None or seed == -1 else seed


def _max_tokens(body: Body) -> int | None:
    """`max_completion_tokens` wins; both are checked. The engine clamps to the window."""
    limits = [integer(body, name, 1) for name in ("max_completion_tokens", "max_tokens")]
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
    return boolean(options, "include_usage", "stream_options.include_usage") or False


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
        boolean(kwargs, "enable_thinking", "chat_template_kwargs.enable_thinking"),
        boolean(body, "enable_thinking"),
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
    n = integer(body, "n", 1)
    if n is not None and n > 1:
        raise unsupported_value(f"n must be 1: one answer is generated per request, asked for {n}", "n")
    if boolean(body, "continue_final_message"):
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


def _given(body: Body, name: str) -> Any:
    if name not in body:
        raise missing_parameter(name)
    return body[name]


def _session(body: Body) -> tuple[str | None, bool]:
    """(the session's name, whether its restored generation is to go on)."""
    name = string(body, "session_id")
    if name is not None:
        session_name(name)
    continues = boolean(body, "continue_generation") or False
    if continues and name is None:
        raise missing_parameter("session_id")
    if continues and body.get("messages"):
        raise invalid_value("continue_generation goes on with what there is: no messages", "messages")
    return name, continues


def _cache_salt(body: Body) -> str:
    salt = string(body, "cache_salt") or ""
    if len(salt) > MAX_SALT:
        raise invalid_value(f"cache_salt may be at most {MAX_SALT} characters long", "cache_salt")
    return salt


def _window(body: Body, *, stream: bool) -> int | None:
    """The window of `flow`, None without acknowledgements."""
    flow = body.get("flow")
    if flow is None:
        return None
    if not isinstance(flow, dict) or flow.get("mode") != "ack":
        raise invalid_value('flow must be an object with the mode "ack"', "flow")
    if not stream:
        raise invalid_value("flow needs stream to be true", "flow")
    window = integer(flow, "window", 1, MAX_WINDOW)
    if window is None:
        raise missing_parameter("flow.window")
    return window
