# SPDX-License-Identifier: Apache-2.0
"""Flow of one generation: how far it may run ahead of its reader, and whether it is to stand still.

A pure state machine: no clock, no I/O, no threads. Receiver-driven credit as in HTTP/2 (RFC 9113, 5.2), with
cumulative acknowledgements: credit = acked + window - sent. Every engine step that gives text sends one
counted event; steps that give none, the role chunk, comments, and the last chunk, on which the final flush
rides, are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

MAX_WINDOW = 65536
MAX_SEQ = 2**53 - 1  # JavaScript has no integers beyond


class AckError(Exception):
    """An acknowledgement of something that was never sent."""


class State(Enum):
    """What the engine does for a generation."""

    RUNNING = "running"
    STALLED = "stalled"  # out of credit
    PAUSED = "paused"
    CANCELLING = "cancelling"
    FINISHED = "finished"


@dataclass(slots=True)
class Flow:
    """`window` None: the reader acknowledges nothing, and only its connection holds the engine.

    After any call: 0 <= acked <= sent, and unless the window was made smaller, sent - acked <= window.
    """

    window: int | None = None
    sent: int = 0
    acked: int = 0
    paused: bool = False
    cancelled: str | None = None
    """Why it was cancelled."""
    finished: bool = False

    @property
    def credit(self) -> int | None:
        """Counted events that may still be sent; negative after the window was made smaller."""
        return None if self.window is None else self.acked + self.window - self.sent

    @property
    def state(self) -> State:
        """The first of these that holds: finished, cancelling, paused, stalled, running."""
        if self.finished:
            return State.FINISHED
        if self.cancelled is not None:
            return State.CANCELLING
        if self.paused:
            return State.PAUSED
        credit = self.credit
        return State.RUNNING if credit is None or credit > 0 else State.STALLED

    @property
    def may_step(self) -> bool:
        """Whether the engine may make its next step, or is to end."""
        return self.state not in (State.PAUSED, State.STALLED)

    def count(self) -> int:
        """A counted event is sent; its number, 1, 2, 3 ..."""
        self.sent += 1
        return self.sent

    def ack(self, seq: int, window: int | None = None) -> bool:
        """Everything up to event `seq` has arrived; whether that is news. `window`: a new one.

        Raises AckError for an event not sent yet; then nothing has changed.
        """
        if seq > self.sent:
            raise AckError(f"event {seq} is acknowledged, {self.sent} were sent")
        advanced = seq > self.acked
        self.acked = max(self.acked, seq)
        if window is not None and self.window is not None:
            self.window = window
        return advanced

    def pause(self) -> bool:
        """Stand still at the next step; whether that is news."""
        changed = not self.paused and not self.finished and self.cancelled is None
        self.paused = self.paused or changed
        return changed

    def resume(self) -> bool:
        """Go on; whether that is news."""
        changed = self.paused and not self.finished
        self.paused = False
        return changed

    def cancel(self, reason: str) -> bool:
        """End at the next step; whether that is news. The first reason stays."""
        if self.finished or self.cancelled is not None:
            return False
        self.cancelled = reason
        return True

    def finish(self) -> None:
        """The generation has ended."""
        self.finished = True
