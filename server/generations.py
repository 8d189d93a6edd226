# SPDX-License-Identifier: Apache-2.0
"""The generation at work and those that ended lately, by the id their clients know."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from server.ack import State
from server.errors import ApiError
from server.worker import Job

REMEMBERED = 64  # generations that ended, for acknowledgements still on their way


@dataclass(slots=True)
class Active:
    """The one at work. `on_ack` is told of every acknowledgement."""

    id: str
    job: Job
    started: float
    prompt_tokens: int = 0
    prefill_done: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token: float | None = None
    on_ack: Callable[[], None] = lambda: None

    @property
    def state(self) -> str:
        """prefill, decode, stalled, paused or cancelling."""
        state = self.job.flow.state
        if state is State.RUNNING:
            return "decode" if self.completion_tokens else "prefill"
        return str(state.value)


class Generations:
    """At most one is active. `now` gives monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.active: Active | None = None
        self._ended: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def begin(self, generation_id: str, job: Job) -> Active:
        """Make it the active one."""
        self.active = Active(generation_id, job, self._now())
        return self.active

    def end(self, active: Active) -> None:
        """It has ended, one way or another."""
        self._ended[active.id] = flow_of(active) | {"state": State.FINISHED.value}
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        if self.active is active:
            self.active = None

    def find(self, generation_id: str | None) -> Active:
        """The active one, by its id or without; raises ApiError 404 and 409."""
        if self.active is not None and generation_id in (None, self.active.id):
            return self.active
        if generation_id is None or generation_id in self._ended:
            raise conflict("no_active_generation", "no generation is at work")
        raise ApiError(404, "generation_not_found", f"there is no generation {generation_id[:100]!r}")

    def ended(self, generation_id: str) -> dict[str, Any] | None:
        """The flow of one that ended lately."""
        return self._ended.get(generation_id)

    def status(self) -> dict[str, Any]:
        """What /engine/v1/generation/status tells; the engine is not asked."""
        active = self.active
        if active is None:
            return {"state": "idle", "generation_id": None}
        first, now = active.first_token, self._now()
        seconds = None if first is None else max(now - first, 1e-9)
        return flow_of(active) | {
            "generation_id": active.id,
            "prompt_tokens": active.prompt_tokens,
            "prefill_done": active.prefill_done,
            "cached_tokens": active.cached_tokens,
            "completion_tokens": active.completion_tokens,
            "paused": active.job.flow.paused,
            "ttft_ms": None if first is None else 1000.0 * (first - active.started),
            "tokens_per_second": None if seconds is None else active.completion_tokens / seconds,
            "seconds": now - active.started,
        }

    def follow(self, active: Active, *, prefilled: int | None = None, produced: int | None = None) -> None:
        """Note its progress."""
        if prefilled is not None:
            active.prefill_done = prefilled
        if produced is not None:
            active.prefill_done = active.prompt_tokens
            active.completion_tokens = produced
            if active.first_token is None:
                active.first_token = self._now()


def flow_of(active: Active) -> dict[str, Any]:
    """The flow's figures; window and credit are null without acknowledgements."""
    flow = active.job.flow
    return {
        "state": active.state,
        "sent_seq": flow.sent,
        "acked_seq": flow.acked,
        "window": flow.window,
        "credit": flow.credit,
    }


def conflict(code: str, message: str, param: str | None = None) -> ApiError:
    """A 409, which no client should repeat by itself."""
    return ApiError(409, code, message, param=param, headers=(("x-should-retry", "false"),))
