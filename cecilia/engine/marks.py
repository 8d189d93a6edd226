# SPDX-License-Identifier: Apache-2.0
"""Where later prompts are likely to part from this one: the places to keep a recurrent state of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from cecilia.errors import RequestError

Messages = list[dict[str, Any]]

_OTHER = {"role": "user", "content": "\u0001"}  # a turn no prompt has
_REPLY = {"role": "assistant", "content": "\u0001"}


def marks(
    encode: Callable[[Messages], Sequence[int]], messages: Messages, tokens: Sequence[int]
) -> tuple[int, ...]:
    """Positions within the prompt `tokens` of `messages`, in rising order, its end always among them.

    They are found by rendering what may come instead, which needs no knowledge of the template: another chat
    with the same system prompt, and the next turn of this one, where a template may leave out what it had put
    before the answer (a think tag). `encode`: messages to the tokens of their prompt.
    """
    system = [message for message in messages[:1] if message.get("role") in ("system", "developer")]
    others = [[*messages, _REPLY, _OTHER], *([[*system, _OTHER]] if system else [])]
    found = {len(tokens), *(_common(encode, other, tokens) for other in others)}
    return tuple(sorted(found - {0}))


def _common(encode: Callable[[Messages], Sequence[int]], other: Messages, tokens: Sequence[int]) -> int:
    try:
        pairs = zip(encode(other), tokens, strict=False)
    except RequestError:  # a template that refuses such a chat will not see it later either
        return 0
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
