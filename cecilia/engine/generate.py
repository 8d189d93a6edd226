# SPDX-License-Identifier: Apache-2.0
"""The engine: a chat request becomes a prompt, a prompt becomes text, one token at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cecilia.arch.base import Hints
from cecilia.engine import memory
from cecilia.engine.job import (
    ChatRequest,
    Delta,
    Event,
    Finished,
    Prefill,
    Prompt,
    Timings,
    TokenLogprob,
    Usage,
)
from cecilia.engine.runner import Runner, chunks
from cecilia.errors import CeciliaError, RequestError
from cecilia.sampler import Sampler, SamplingParams
from cecilia.state.pages import POSITIONS
from cecilia.text.chat import ChatTemplate, Segment, encode_segments
from cecilia.text.stream import Piece, TextStream
from cecilia.text.tokenizer import Tokenizer

Emit = Callable[[Event], None]
Cancelled = Callable[[], bool]
Cause = Literal["eos", "stop", "length", "cancelled"]

SAMPLING_DEFAULTS = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}


class Engine:
    """A loaded model that chats; it keeps the state of the last generation. All calls on one thread."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        hints: Hints,
        info: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self.context = runner.context
        self.defaults: dict[str, Any] = SAMPLING_DEFAULTS | runner.file.metadata["sampling"]
        self._runner = runner
        self._tokenizer = tokenizer
        self._template = template
        self._hints = hints
        self._clock = clock

    def prepare(self, request: ChatRequest) -> Prompt:
        """Render, tokenise and check; nothing is evaluated.

        Raises RequestError (`context_length_exceeded` with facts n_prompt_tokens and n_ctx, `empty_prompt`,
        `invalid_value` for a biased token the model has not, those of the template) and MemoryLimitError
        `insufficient_memory`.
        """
        self._require_known(request.sampling)
        options = dict(request.template_kwargs)
        if request.enable_thinking is not None:
            options["enable_thinking"] = request.enable_thinking
        segments = self._template.render(request.messages, **options)
        texts = (segment.text.encode("utf-8", "surrogatepass") for segment in segments)
        least = self._tokenizer.least_tokens(sum(map(len, texts)))
        if least >= self.context:
            raise self._too_long(least, "at least ")
        tokens = tuple(encode_segments(self._tokenizer, segments))
        room = self.context - len(tokens)
        if not tokens:
            raise RequestError("empty_prompt", "the messages give an empty prompt", param="messages")
        if room < 1:
            raise self._too_long(len(tokens))
        max_tokens = room if request.max_tokens is None else min(request.max_tokens, room)
        self._require_pages(len(tokens) + max_tokens)
        reused = self._runner.session.reusable(tokens)
        return Prompt(tokens, request, max_tokens, reused, self._opens_in_think(segments[-1]))

    def _opens_in_think(self, last: Segment) -> bool:
        """Whether the template, whose word is the last of a prompt, left a think block open."""
        think = self._hints.think
        return think is not None and not last.is_user_text and last.text.rstrip().endswith(think[0])

    def _too_long(self, tokens: int, bound: str = "") -> RequestError:
        return RequestError(
            "context_length_exceeded",
            f"this model's maximum context length is {self.context} tokens and the prompt of "
            f"{bound}{tokens} tokens exceeds the context window",
            param="messages",
            facts={"n_prompt_tokens": tokens, "n_ctx": self.context},
        )

    def generate(self, prompt: Prompt, emit: Emit, cancelled: Cancelled) -> Finished:
        """Run a prepared prompt: `emit` each event as it happens, stop early once `cancelled()`.

        Whatever ends it, an exception of `emit` included, the session holds exactly the tokens it evaluated.
        Raises MemoryLimitError `insufficient_memory` and CeciliaError `numeric_error`.
        """
        return _Generation(
            self._runner, self._tokenizer, self._hints, self._clock, prompt, emit, cancelled
        ).run()

    def settle(self, *, steps: int | None = None) -> bool:
        """Move weights while there is nothing else to do; see `Runner.settle`."""
        return self._runner.settle(steps=steps)

    def close(self) -> None:
        """Release the memory and the file; the engine is of no use afterwards."""
        self._runner.close()

    def _require_known(self, sampling: SamplingParams) -> None:
        vocab = self._tokenizer.vocab_size
        for token, _ in sampling.logit_bias:
            if not 0 <= token < vocab:
                message = f"logit_bias names token {token}; this model has 0 to {vocab - 1}"
                raise RequestError("invalid_value", message, param="logit_bias")

    def _require_pages(self, positions: int) -> None:
        pool = self._runner.pool
        pages = -(-positions // POSITIONS)
        missing = max(0, pages - pool.allocated) * pool.page_bytes
        if missing:
            memory.require({f"KV cache for {positions} tokens, beyond what is held,": missing})


class _Generation:
    """One run of `Engine.generate`."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        hints: Hints,
        clock: Callable[[], float],
        prompt: Prompt,
        emit: Emit,
        cancelled: Cancelled,
    ) -> None:
        self.session, self.chunk = runner.session, runner.chunk
        self.tokenizer, self.clock = tokenizer, clock
        self.prompt, self.emit, self.cancelled = prompt, emit, cancelled
        request = prompt.request
        self.sampler = Sampler(request.sampling, prompt.tokens)
        self.text = TextStream(
            stops=request.stop,
            ends=hints.stops,
            think=hints.think,
            opens_in_think=prompt.opens_in_think,
        )
        self.entries: list[TokenLogprob] = []  # of tokens whose text is held back
        self.cached = self.completion = self.reasoning = 0

    def run(self) -> Finished:
        started = self.clock()
        logits = self._prefill()
        prefilled = self.clock()
        cause: Cause = "cancelled" if logits is None else self._decode(logits)
        self._emit_text(self.text.flush(), last=True)
        usage = Usage(len(self.prompt.tokens), self.completion, self.cached, self.reasoning)
        timings = Timings(1e3 * (prefilled - started), 1e3 * (self.clock() - prefilled))
        return Finished("length" if cause == "length" else "stop", cause, usage, timings)

    def _prefill(self) -> NDArray[np.float32] | None:
        """Logits [V] after the prompt; None when cancelled."""
        tokens = self.prompt.tokens
        self.cached = self.session.sync(tokens)
        for part in chunks(tokens[self.cached :], self.chunk):
            if self.cancelled():
                return None
            logits = self._evaluate(part)
            self.emit(Prefill(len(self.session.tokens), len(tokens)))
        return logits

    def _decode(self, logits: NDArray[np.float32]) -> Cause:
        while not self.cancelled():
            token = self.sampler.sample(logits)
            self.completion += 1
            if token in self.tokenizer.eos_ids:
                return "eos"
            if self.prompt.request.logprobs is not None:
                self.entries.append(self._entry(logits, token, self.prompt.request.logprobs))
            if self._emit_text(self.text.push(self.tokenizer.token_bytes(token))):
                return "stop"
            if self.completion >= self.prompt.max_tokens:
                return "length"
            logits = self._evaluate((token,))
        return "cancelled"

    def _evaluate(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after `tokens` of all ids that mean something: rows of the head behind the vocabulary are
        padding. Bad ones mean bad keys and values too: the session is then forgotten."""
        logits: NDArray[np.float32] = self.session.evaluate(tokens)[-1]
        if not np.isfinite(logits).all():
            position = len(self.session.tokens) - 1
            self.session.clear()
            raise CeciliaError("numeric_error", f"logits at position {position} are not finite")
        return logits[: self.tokenizer.vocab_size]

    def _entry(self, logits: NDArray[np.float32], token: int, top: int) -> TokenLogprob:
        first, *others = [
            TokenLogprob(each, self.tokenizer.token_bytes(each), logprob)
            for each, logprob in self.sampler.logprobs(logits, token, top)
        ]
        return replace(first, top=tuple(others))

    def _emit_text(self, piece: Piece, *, last: bool = False) -> bool:
        """Emit what became certain, with the entries waiting for text; whether a stop string was reached."""
        self.reasoning += bool(piece.reasoning)
        if piece.content or piece.reasoning or (last and self.entries and not piece.stopped):
            self.emit(Delta(piece.content, piece.reasoning, self.completion, tuple(self.entries)))
            self.entries.clear()
        return piece.stopped
