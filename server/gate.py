# SPDX-License-Identifier: Apache-2.0
"""Admission: one generation at a time, and an honest guess of when the next may start. No I/O, no threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum, auto

from cecilia.engine.job import Finished
from server.errors import ApiError

# Guesses until the first generation has been measured: a small model on a small board.
FIRST_PREFILL_RATE = 100.0  # tokens a second
FIRST_DECODE_RATE = 10.0
FIRST_ANSWER = 128.0  # tokens
# Weight of the newest measurement in the running averages.
NEWEST = 0.3
# openai-python ignores a longer Retry-After; openai-node would wait it out in silence.
LONGEST_WAIT = 60


class Phase(Enum):
    """Whether work is taken at all."""

    LOADING = auto()
    OPEN = auto()
    CLOSING = auto()


class Ticket:
    """The right to use the engine. `release` may be called any number of times, on any exit path."""

    def __init__(self, gate: Gate, started: float) -> None:
        self._gate = gate
        self.started = started
        self.prompt_left = 0
        self.produced = 0
        self.limit: int | None = None

    def release(self) -> None:
        """Give the slot back."""
        self._gate.leave(self)


class Gate:
    """A single slot. `now` gives monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._holder: Ticket | None = None
        self._prefill_rate = FIRST_PREFILL_RATE
        self._decode_rate = FIRST_DECODE_RATE
        self._answer = FIRST_ANSWER
        self._measured = False
        self.phase = Phase.LOADING

    def activity(self) -> dict[str, float] | None:
        """How far the running generation is: prompt tokens still to be read, tokens answered, seconds."""
        ticket = self._holder
        if ticket is None:
            return None
        seconds = round(self._now() - ticket.started, 1)
        return {"prompt_left": ticket.prompt_left, "completion": ticket.produced, "seconds": seconds}

    @property
    def busy(self) -> bool:
        """Whether the slot is taken."""
        return self._holder is not None

    def require_open(self) -> None:
        """Raise the 503 to answer with, unless work is taken; `OPEN` means that the engine is there."""
        if self.phase is Phase.LOADING:
            raise _refusal(503, "model_loading", "the model is still loading", 1.0)
        if self.phase is Phase.CLOSING:
            raise _refusal(503, "shutting_down", "the server is shutting down", 10.0)

    def enter(self) -> Ticket:
        """Take the slot, or raise the 503 or 429 to answer with."""
        self.require_open()
        if self._holder is not None:
            wait = self.remaining()
            raise _refusal(429, "server_busy", "another generation is running; one is served at a time", wait)
        self._holder = Ticket(self, self._now())
        return self._holder

    def leave(self, ticket: Ticket) -> None:
        """The holder is done; any other ticket has left before."""
        if self._holder is ticket:
            self._holder = None

    def remaining(self) -> float:
        """Seconds until the slot is likely to be free, from measured speeds and answer lengths."""
        ticket = self._holder
        if ticket is None:
            return 0.0
        # An answer already longer than usual is expected to go on for half as long again.
        expected = max(self._answer, ticket.produced * 1.5)
        tokens = (expected if ticket.limit is None else min(expected, ticket.limit)) - ticket.produced
        return ticket.prompt_left / self._prefill_rate + max(tokens, 0.0) / self._decode_rate

    def observe(self, finished: Finished) -> None:
        """Learn from a finished generation. A cancelled one tells speeds, but no answer length."""
        usage, timings = finished.usage, finished.timings
        computed = usage.prompt_tokens - usage.cached_tokens
        prefill = _rate(computed, timings.prompt_ms)
        decode = _rate(usage.completion_tokens, timings.predicted_ms)
        newest = NEWEST if self._measured else 1.0
        if prefill is not None:
            self._prefill_rate += newest * (prefill - self._prefill_rate)
        if decode is not None:
            self._decode_rate += newest * (decode - self._decode_rate)
            self._measured = True
        if finished.cause != "cancelled":
            self._answer += NEWEST * (usage.completion_tokens - self._answer)


def _rate(tokens: int, milliseconds: float) -> float | None:
    """Tokens a second, or None when too little was done to tell."""
    return tokens * 1000.0 / milliseconds if tokens > 0 and milliseconds > 0 else None


def _refusal(status: int, code: str, message: str, wait: float) -> ApiError:
    seconds = min(max(math.ceil(wait), 1), LONGEST_WAIT)
    headers = [("Retry-After", str(seconds))]
    if status == 429:
        milliseconds = min(max(math.ceil(wait * 1000), 100), LONGEST_WAIT * 1000)
        headers.append(("retry-after-ms", str(milliseconds)))
        if wait > LONGEST_WAIT:
            headers.append(("x-should-retry", "false"))
    return ApiError(status, code, message, headers=tuple(headers))
