# SPDX-License-Identifier: Apache-2.0
"""An engine that says what a test tells it to: scripted steps, held by events instead of sleeps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
from cecilia.errors import RequestError

CONTEXT = 256
# Long enough for any loaded machine; only a broken test ever waits for it.
PATIENCE = 20.0


class Hold:
    """A place where the engine stops until the test lets it go on, and that tells when it is there."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()

    def wait(self, cancelled: Callable[[], bool]) -> None:
        self.reached.set()
        for _ in range(int(PATIENCE / 0.005)):
            if self.go.wait(0.005) or cancelled():
                return
        raise TimeoutError("the test never let the engine go on")


Step = str | tuple[str, str] | tuple[str, str, tuple[TokenLogprob, ...]] | Hold | Exception
"""Content, or (content, reasoning[, log-probabilities]), or a place to wait, or an error to raise."""


@dataclass
class FakeEngine:
    """One word is one token. Every call must come from the same thread."""

    script: list[Step] = field(default_factory=lambda: ["Hello", " world"])
    prefill_chunk: int = 4
    prefill_steps: list[Step] = field(default_factory=list)
    """Taken one per prefill chunk, before it."""
    prepare_step: Step | None = None
    cached: int = 0
    reason: str = "stop"
    context: int = CONTEXT
    defaults: dict[str, float] = field(
        default_factory=lambda: {"temperature": 0.7, "top_p": 0.9, "top_k": 40}
    )
    requests: list[ChatRequest] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    """What became of each generation: its cause, or the name of the exception."""
    idle_steps: list[Step] = field(default_factory=list)
    """What the engine puts off until nobody waits."""
    threads: set[int] = field(default_factory=set)
    closed: bool = False

    @property
    def info(self) -> dict[str, Any]:
        return {
            "id": "fake",
            "architecture": "fake",
            "weights": "random",
            "weights_in": "mmap",
            "context": self.context,
            "profile": "f32",
            "threads": 1,
            "isa": "scalar",
            "digest": "0123456789abcdef" * 4,
            "quantisation": "f32",
        }

    def prepare(self, request: ChatRequest) -> Prompt:
        self.threads.add(threading.get_ident())
        self.requests.append(request)
        if self.prepare_step is not None:
            self._act(self.prepare_step, lambda: False)
        tokens = tuple(range(sum(len(message["content"].split()) for message in request.messages)))
        if len(tokens) >= self.context:
            raise RequestError(
                "context_length_exceeded",
                f"this model's maximum context length is {self.context} tokens and the prompt of "
                f"{len(tokens)} tokens exceeds the context window",
                param="messages",
                facts={"n_prompt_tokens": len(tokens), "n_ctx": self.context},
            )
        room = self.context - len(tokens)
        return Prompt(tokens, request, min(request.max_tokens or room, room), self.cached)

    def generate(
        self, prompt: Prompt, emit: Callable[[Event], None], cancelled: Callable[[], bool]
    ) -> Finished:
        self.threads.add(threading.get_ident())
        try:
            finished = self._generate(prompt, emit, cancelled)
        except Exception as error:
            self.outcomes.append(type(error).__name__)
            raise
        self.outcomes.append(finished.cause)
        return finished

    def _generate(
        self, prompt: Prompt, emit: Callable[[Event], None], cancelled: Callable[[], bool]
    ) -> Finished:
        total = len(prompt.tokens)
        waits = list(self.prefill_steps)
        for start in range(prompt.cached_tokens, total, self.prefill_chunk):
            if waits:
                self._act(waits.pop(0), cancelled)
            if cancelled():
                return self._finish(prompt, 0, 0, "cancelled")
            emit(Prefill(min(start + self.prefill_chunk, total), total))
        tokens = reasoning = 0
        for step in self.script:
            if cancelled():
                return self._finish(prompt, tokens, reasoning, "cancelled")
            if isinstance(step, (Hold, Exception)):
                self._act(step, cancelled)
                continue
            if tokens == prompt.max_tokens:
                return self._finish(prompt, tokens, reasoning, "length")
            content, thought, *entries = (step, "") if isinstance(step, str) else step
            tokens += 1
            reasoning += bool(thought)
            emit(Delta(content, thought, tokens, *entries))
        return self._finish(prompt, tokens, reasoning, "eos")

    def _finish(self, prompt: Prompt, tokens: int, reasoning: int, cause: Any) -> Finished:
        usage = Usage(len(prompt.tokens), tokens, prompt.cached_tokens, reasoning)
        return Finished("length" if cause == "length" else "stop", cause, usage, Timings(20.0, 10.0 * tokens))

    def _act(self, step: Step, cancelled: Callable[[], bool]) -> None:
        if isinstance(step, Hold):
            step.wait(cancelled)
        elif isinstance(step, Exception):
            raise step

    def settle(self, *, steps: int | None = None) -> bool:
        for step in self.idle_steps[:steps]:
            self.idle_steps.remove(step)
            self._act(step, lambda: False)
        return not self.idle_steps

    def close(self) -> None:
        self.closed = True
