# SPDX-License-Identifier: Apache-2.0
"""The objects of the OpenAI API that we send: completions, chunks, usage, models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cecilia.engine.job import Delta, Finished, Timings, TokenLogprob, Usage

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """What stays the same over all objects of one generation. `created` is in Unix seconds."""

    id: str
    created: int
    model: str
    fingerprint: str
    include_usage: bool = False
    include_logprobs: bool = False

    def role_chunk(self) -> Object:
        """The first chunk. Content is "", not null: both SDKs accept it and it is OpenAI's own."""
        return self._chunk({"role": "assistant", "content": ""}, None)

    def delta_chunk(self, event: Delta) -> Object:
        """A chunk of text. Log-probabilities without text come with an empty content: an empty delta is for
        the last chunk alone."""
        return self._chunk(_delta(event), None, event.logprobs)

    def last_chunks(self, finished: Finished, *, extra: Object, flush: Delta | None = None) -> list[Object]:
        """The finishing chunk and, if asked for, the usage chunk; the timings stand in the last of them.

        `flush`: text that rides on the finishing chunk.
        """
        delta = {} if flush is None else _delta(flush)
        finish = self._chunk(delta, finished.reason, () if flush is None else flush.logprobs)
        finish |= {"cecilia": extra}
        if not self.include_usage:
            return [finish | {"timings": timings(finished)}]
        return [finish, self._head([]) | {"usage": usage(finished.usage), "timings": timings(finished)}]

    def whole(self, deltas: list[Delta], finished: Finished, *, extra: Object) -> Object:
        """The answer that is not streamed."""
        content = "".join(delta.content for delta in deltas)
        message: Object = {"role": "assistant", "content": content, "refusal": None}
        if reasoning := "".join(delta.reasoning for delta in deltas):
            message["reasoning_content"] = reasoning
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs([entry for delta in deltas for entry in delta.logprobs]),
            "finish_reason": finished.reason,
        }
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
            "usage": usage(finished.usage),
            "system_fingerprint": self.fingerprint,
            "timings": timings(finished),
            "cecilia": extra,
        }

    def _chunk(
        self, delta: Object, finish_reason: str | None, entries: Sequence[TokenLogprob] = ()
    ) -> Object:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": self._logprobs(entries) if entries else None,
            "finish_reason": finish_reason,
        }
        head = self._head([choice])
        return head | {"usage": None} if self.include_usage else head

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Object | None:
        if not self.include_logprobs:
            return None
        content = [_logprob(entry) | {"top_logprobs": [*map(_logprob, entry.top)]} for entry in entries]
        return {"content": content, "refusal": None}

    def _head(self, choices: list[Object]) -> Object:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "system_fingerprint": self.fingerprint,
        }


def _delta(event: Delta) -> Object:
    delta = {}
    if event.reasoning:
        delta["reasoning_content"] = event.reasoning
    if event.content or not event.reasoning:
        delta["content"] = event.content
    return delta


def _logprob(entry: TokenLogprob) -> Object:
    """`bytes` are exact; `token` shows U+FFFD where they are only part of a character."""
    text = entry.bytes.decode("utf-8", "replace")
    return {"token": text, "bytes": list(entry.bytes), "logprob": entry.logprob}


def usage(counts: Usage) -> Object:
    """The usage object; total = prompt + completion."""
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
    }


def timings(finished: Finished) -> Object:
    """llama-server's names. Every value is finite: JSON has no other numbers."""
    counts, spent = finished.usage, finished.timings
    prompt_n = counts.prompt_tokens - counts.cached_tokens
    return {
        "cache_n": counts.cached_tokens,
        "prompt_n": prompt_n,
        "prompt_ms": spent.prompt_ms,
        "prompt_per_second": _per_second(prompt_n, spent.prompt_ms),
        "predicted_n": counts.completion_tokens,
        "predicted_ms": spent.predicted_ms,
        "predicted_per_second": _per_second(counts.completion_tokens, spent.predicted_ms),
    }


def _per_second(count: int, milliseconds: float) -> float:
    return count * 1000.0 / milliseconds if milliseconds > 0 else 0.0


def model(model_id: str, *, created: int, status: str, info: dict[str, object]) -> Object:
    """A model object; `status.value` is what Open WebUI reads, `meta` is ours."""
    return {
        "id": model_id,
        "object": "model",
        "created": created,
        "owned_by": "cecilia",
        "status": {"value": status},
        "meta": info,
    }


def model_list(models: list[Object]) -> Object:
    """An object, not a bare array: openai-python fails on the latter."""
    return {"object": "list", "data": models}


__all__ = ["Completion", "Timings", "model", "model_list", "timings", "usage"]
