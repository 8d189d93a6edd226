# SPDX-License-Identifier: Apache-2.0
"""Where later prompts are likely to part from this one: the places to keep a recurrent state of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from cecilia.errors import RequestError
from cecilia.text.chat import ChatTemplate, encode_segments
from cecilia.text.tokenizer import Tokenizer

_OTHER = {"role": "user", "content": "\u0001"}  # a turn no prompt has
_REPLY = {"role": "assistant", "content": "\u0001"}


def marks(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    options: dict[str, Any],
    tokens: Sequence[int],
) -> tuple[int, ...]:
    """Positions within the prompt `tokens` of `messages`, in rising order, its end always among them.

    They are found by rendering what may come instead, which needs no knowledge of the template: another chat
    with the same system prompt, and the next turn of this one, where a template may leave out what it had put
    before the answer (a think tag).
    """
    system = [message for message in messages[:1] if message.get("role") in ("system", "developer")]
    found = {len(tokens)}
    for other in (system and [*system, _OTHER], [*messages, _REPLY, _OTHER]):
        if other:
            found.add(_common(template, tokenizer, other, options, tokens))
    return tuple(sorted(found - {0}))


def _common(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    options: dict[str, Any],
    tokens: Sequence[int],
) -> int:
    try:
        segments = template.render(messages, **options)
    except RequestError:  # a template that refuses such a chat will not see it later either
        return 0
    pairs = zip(encode_segments(tokenizer, segments), tokens, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
