# SPDX-License-Identifier: Apache-2.0
"""The engine: a chat request becomes a prompt, a prompt becomes text, one token at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cecilia.arch.base import Hints
from cecilia.engine import memory
from cecilia.engine.generation import Cancelled, Emit, Generation
from cecilia.engine.job import ChatRequest, Finished, Prompt
from cecilia.engine.marks import marks
from cecilia.engine.runner import Runner
from cecilia.engine.sessions import Sessions
from cecilia.engine.snapshots import snapshot_key
from cecilia.errors import RequestError
from cecilia.sampler import SamplingParams
from cecilia.state.pages import POSITIONS
from cecilia.text.chat import ChatTemplate, Segment, encode_segments
from cecilia.text.tokenizer import Tokenizer

SAMPLING_DEFAULTS = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}


class Engine:
    """A loaded model that chats. All calls on one thread, but those that say otherwise.

    `sessions`: what it keeps of earlier requests.
    """

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
        self._generation: Generation | None = None
        key = snapshot_key(runner, str(info.get("profile")), template.source)
        self.sessions = Sessions(runner, key, self._interrupted)

    def prepare(self, request: ChatRequest) -> Prompt:
        """Render, tokenise and check; nothing is evaluated.

        Raises RequestError (`context_length_exceeded` with facts n_prompt_tokens and n_ctx, `empty_prompt`,
        `invalid_value` for a biased token the model has not, those of the template, `session_not_found` and
        `generation_not_resumable`) and MemoryLimitError `insufficient_memory`.
        """
        if request.continues:
            prompt = self.sessions.suspended(request.session_id or "")
            self._require_pages(len(prompt.tokens) + prompt.max_tokens, prompt.cached_tokens)
            return prompt
        self._require_known(request.sampling)
        segments, tokens = self._encode(request)
        room = self.context - len(tokens)
        if not tokens:
            raise RequestError("empty_prompt", "the messages give an empty prompt", param="messages")
        if room < 1:
            raise self._too_long(len(tokens))
        max_tokens = room if request.max_tokens is None else min(request.max_tokens, room)
        session = self._runner.session
        reused = session.reusable(tokens, salt=request.cache_salt, name=request.session_id)
        self._require_pages(len(tokens) + max_tokens, reused)
        prompt = Prompt(tokens, request, max_tokens, reused, self._opens_in_think(segments[-1]))
        return replace(prompt, marks=self._marks(request, tokens)) if session.recurrent else prompt

    def tokens(self, request: ChatRequest) -> tuple[int, ...]:
        """The prompt's token ids, from any thread. Raises RequestError as `prepare` does."""
        return self._encode(request)[1]

    def encode(self, text: str) -> list[int]:
        """The token ids of plain text, from any thread. Raises RequestError `invalid_value`."""
        return self._tokenizer.encode_text(text)

    def decode(self, tokens: Sequence[int]) -> tuple[str, list[bytes]]:
        """The text of token ids, and the bytes of each, from any thread; what is no character is U+FFFD.

        Raises RequestError `token_out_of_range`.
        """
        vocab = self._tokenizer.vocab_size
        for token in tokens:
            if not 0 <= token < vocab:
                message = f"token {token}; this model has 0 to {vocab - 1}"
                raise RequestError("token_out_of_range", message, param="tokens")
        pieces = [self._tokenizer.token_bytes(token) for token in tokens]
        return b"".join(pieces).decode("utf-8", "replace"), pieces

    def _encode(self, request: ChatRequest) -> tuple[list[Segment], tuple[int, ...]]:
        segments = self._template.render(request.messages, **_options(request))
        texts = (segment.text.encode("utf-8", "surrogatepass") for segment in segments)
        least = self._tokenizer.least_tokens(sum(map(len, texts)))
        if least >= self.context:
            raise self._too_long(least, "at least ")
        return segments, tuple(encode_segments(self._tokenizer, segments))

    def _marks(self, request: ChatRequest, tokens: tuple[int, ...]) -> tuple[int, ...]:
        def encode(messages: list[dict[str, Any]]) -> list[int]:
            return encode_segments(self._tokenizer, self._template.render(messages, **_options(request)))

        return marks(encode, request.messages, tokens)

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
        self._generation = Generation(
            self._runner, self._tokenizer, self._hints, self._clock, prompt, emit, cancelled
        )
        self.sessions.attached(prompt.request.session_id)
        try:
            return self._generation.run()
        finally:
            self._generation = None

    def _interrupted(self) -> Prompt | None:
        """What it takes to go on with the generation at work, if there is one."""
        return None if self._generation is None else self._generation.interrupted()

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

    def _require_pages(self, positions: int, reused: int) -> None:
        """Check that pages for `positions`, `reused` of which are held, can be had; idle ones need no memory,
        and sequences at rest give theirs."""
        pool, session = self._runner.pool, self._runner.session
        pages = -(-positions // POSITIONS) - reused // POSITIONS
        while missing := max(0, pages - (pool.allocated - pool.in_use)) * pool.page_bytes:
            if memory.fits(missing):
                return
            if not reused:
                session.rest()
            if not session.cache.evict():
                memory.require({f"KV cache for {positions} tokens, beyond what is held,": missing})
                return


def _options(request: ChatRequest) -> dict[str, Any]:
    """What the template is told besides the messages."""
    thinking = {} if request.enable_thinking is None else {"enable_thinking": request.enable_thinking}
    return request.template_kwargs | thinking
