# SPDX-License-Identifier: Apache-2.0
"""What goes into a generation and what comes out of it: plain frozen data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cecilia.sampler import SamplingParams


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A validated chat request. `max_tokens` None means up to the end of the context window.

    `logprobs`: how many of the likeliest tokens are told beside each token; None tells nothing.
    `cache_salt`: state of earlier requests serves this one only if theirs was the same. `session_id`: the
    session this is a turn of. `continues`: no turn, but the rest of the session's restored generation.
    """

    messages: list[dict[str, Any]]
    sampling: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...] = ()
    enable_thinking: bool | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    cache_salt: str = ""
    session_id: str | None = None
    continues: bool = False


@dataclass(frozen=True, slots=True)
class Prefill:
    """Progress through the prompt: `done` of `total` tokens are in the session, reused ones included."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its bytes (part of a character perhaps) and the natural logarithm of its probability, finite.

    `top`: the likeliest tokens at its place, likeliest first; the token itself need not be among them.
    """

    token: int
    bytes: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request ready to run: its token ids, how many may follow, and how many the session already holds.

    `opens_in_think`: the prompt ends inside a think block, so the answer begins there. `marks`: positions in
    `tokens` that later prompts may part at, in rising order.
    A generation that was interrupted goes on from `generated`, the tokens of the answer so far, whose text
    was delivered as far as it was certain; `waiting`: the entries of those whose text was not; `logits`: f32
    [V] after the last of them, or None when they have to be had again.
    """

    tokens: tuple[int, ...]
    request: ChatRequest
    max_tokens: int
    cached_tokens: int
    opens_in_think: bool = False
    marks: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()
    waiting: tuple[TokenLogprob, ...] = ()
    logits: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """New text. `tokens` is the number of completion tokens so far, this step's included.

    `logprobs`, when asked for, are those of the tokens since the last Delta: a token whose text is held back
    waits for the next text. The last Delta may have entries and no text, of tokens that gave none (a think
    tag). The end token has no entry, nor have tokens after the last text when a stop string ended it.
    `last`: what was held back until the end; no step gave it.
    """

    content: str
    reasoning: str
    tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    last: bool = False


Event = Prefill | Delta


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. `completion_tokens` includes the end token, which has no text."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds from the start to the prompt's last logits, and from there to the end."""

    prompt_ms: float
    predicted_ms: float


@dataclass(frozen=True, slots=True)
class Finished:
    """How a generation ended: `reason` for clients, `cause` for everyone else."""

    reason: Literal["stop", "length"]
    cause: Literal["eos", "stop", "length", "cancelled"]
    usage: Usage
    timings: Timings
