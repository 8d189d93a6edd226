# SPDX-License-Identifier: Apache-2.0
"""One run from a prompt to its end, which can be interrupted between any two steps and gone on with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cecilia.arch.base import Hints
from cecilia.engine.job import Delta, Event, Finished, Prefill, Prompt, Timings, TokenLogprob, Usage
from cecilia.engine.runner import Runner
from cecilia.errors import CeciliaError
from cecilia.sampler import Sampler
from cecilia.text.stream import Piece, TextStream
from cecilia.text.tokenizer import Tokenizer

Emit = Callable[[Event], None]
Cancelled = Callable[[], bool]
Cause = Literal["eos", "stop", "length", "cancelled"]


class Generation:
    """A prompt at work. `cancelled` is asked between steps and may keep the engine waiting there.

    Sampler and text are functions of the tokens so far: to go on with a generation, these are played again.
    """

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
        self.session, self.chunk, self.window = runner.session, runner.chunk, runner.context
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
        self.generated: list[int] = []
        self.logits: NDArray[np.float32] | None = None  # after the last token, when it is evaluated
        self.cached = self.reasoning = 0
        self._replay()
        self.entries = list(prompt.waiting)  # of tokens whose text is held back

    def run(self) -> Finished:
        """Prefill and decode to the end."""
        started = self.clock()
        logits = self._prefill()
        prefilled = self.clock()
        cause: Cause = "cancelled" if logits is None else self._decode(logits)
        self._emit_text(self.text.flush(), last=True)
        usage = Usage(len(self.prompt.tokens), len(self.generated), self.cached, self.reasoning)
        timings = Timings(1e3 * (prefilled - started), 1e3 * (self.clock() - prefilled))
        return Finished("length" if cause == "length" else "stop", cause, usage, timings)

    def interrupted(self) -> Prompt:
        """What it takes to go on from here, to be asked while `cancelled` or `emit` keeps the engine."""
        return replace(
            self.prompt,
            generated=tuple(self.generated),
            waiting=tuple(self.entries),
            logits=None if self.logits is None else self.logits.copy(),
        )

    def _replay(self) -> None:
        for token in self.prompt.generated:
            self.generated.append(token)
            self.sampler.accept(token)
            self.reasoning += bool(self.text.push(self.tokenizer.token_bytes(token)).reasoning)
        if not self.prompt.request.sampling.greedy:
            self.sampler.step = len(self.generated)

    def _prefill(self) -> NDArray[np.float32] | None:
        """Logits [V] after the prompt, and after what was generated before; None when cancelled."""
        prompt, request = self.prompt, self.prompt.request
        tokens = prompt.tokens + prompt.generated
        # What is sought never includes the last token, for its logits are wanted: here they may be at hand.
        sought = tokens if prompt.logits is None else (*tokens, -1)
        held = self.session.sync(sought, salt=request.cache_salt, name=request.session_id)
        self.cached = min(held, len(prompt.tokens))
        logits = prompt.logits
        for end in self._ends(held, len(tokens)):
            if self.cancelled():
                return None
            logits = self._evaluate(tokens[len(self.session.tokens) : end])
            if end in self._stops:
                self.session.checkpoint()
            self.emit(Prefill(end, len(tokens)))
        return logits

    def _ends(self, first: int, end: int) -> Iterator[int]:
        """Where the chunks from `first` to `end` end: a chunk long, or earlier at a place to keep."""
        self._stops: set[int] = set()
        if self.session.recurrent:
            spacing = max(self.session.spacing(self.window), self.chunk)
            self._stops = {*self.prompt.marks, *range(spacing, end, spacing)}
        while first < end:
            stops = (stop for stop in self._stops if first < stop)
            first = min(first + self.chunk, end, min(stops, default=end))
            yield first

    def _decode(self, logits: NDArray[np.float32]) -> Cause:
        self.logits = logits
        while not self.cancelled():
            token = self.sampler.sample(logits)
            self.generated.append(token)
            self.logits = None
            if token in self.tokenizer.eos_ids:
                return "eos"
            if self.prompt.request.logprobs is not None:
                self.entries.append(self._entry(logits, token, self.prompt.request.logprobs))
            if self._emit_text(self.text.push(self.tokenizer.token_bytes(token))):
                return "stop"
            if len(self.generated) >= self.prompt.max_tokens:
                return "length"
            self.logits = logits = self._evaluate((token,))
        return "cancelled"

    def _evaluate(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after `tokens` of all ids that mean something: rows of the head behind the vocabulary are
        padding. Bad ones mean bad keys and values too: the sequence is then forgotten."""
        logits: NDArray[np.float32] = self.session.evaluate(tokens)[-1]
        if not np.isfinite(logits).all():
            position = len(self.session.tokens) - 1
            self.session.drop()
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
            entries = tuple(self.entries)
            self.entries.clear()
            self.emit(Delta(piece.content, piece.reasoning, len(self.generated), entries, last))
        return piece.stopped
