# SPDX-License-Identifier: Apache-2.0
"""tokenize and detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cecilia.errors import CeciliaError
from server.engine_v1.cache import tokens_of
from server.errors import ApiError, from_engine, invalid_value
from server.fields import Body, boolean, string
from server.openai.objects import Object
from server.worker import Engine

MAX_TEXT = 1 << 20  # characters
MAX_TOKENS = 1 << 20


async def tokenize(engine: Engine, body: Body) -> Object:
    """POST tokenize: `text`, or `messages` through the chat template."""
    text, with_pieces = string(body, "text"), boolean(body, "with_pieces") or False
    if text is not None and len(text) > MAX_TEXT:
        raise ApiError(413, "text_too_long", f"text may be at most {MAX_TEXT} characters long", "text")

    def work() -> Object:
        tokens = tokens_of(engine, body) if text is None else engine.encode(text)
        answer: Object = {"tokens": list(tokens), "count": len(tokens)}
        if with_pieces:
            _, pieces = engine.decode(tokens)
            answer["pieces"] = [piece.decode("utf-8", "replace") for piece in pieces]
        return answer

    return await _off_the_loop(work)


async def detokenize(engine: Engine, body: Body) -> Object:
    """POST detokenize."""
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise invalid_value("tokens must be a list of token ids", "tokens")
    if len(tokens) > MAX_TOKENS:
        raise ApiError(413, "too_many_tokens", f"at most {MAX_TOKENS} tokens", "tokens")
    return await _off_the_loop(lambda: {"text": engine.decode(tokens)[0]})


async def _off_the_loop(work: Callable[[], Object]) -> Object:
    try:
        return await asyncio.to_thread(work)
    except CeciliaError as error:
        raise from_engine(error) from error
