# SPDX-License-Identifier: Apache-2.0
"""A clock that only moves when told to, and a transport that keeps what is written."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import h11


@dataclass(order=True)
class FakeTimer:
    due: float
    order: int
    callback: Callable[[], object] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.cancelled = True


class FakeClock:
    """Seconds from 0; `advance` runs what falls due, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[FakeTimer] = []
        self._order = itertools.count()

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], object], /) -> FakeTimer:
        timer = FakeTimer(self.now + delay, next(self._order), callback)
        self.timers.append(timer)
        return timer

    @property
    def pending(self) -> int:
        return sum(not timer.cancelled for timer in self.timers)

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            self.timers = [timer for timer in self.timers if not timer.cancelled]
            due = min(self.timers, default=None)
            if due is None or due.due > end:
                break
            self.timers.remove(due)
            self.now = due.due
            due.callback()
        self.now = end


class FakeTransport(asyncio.Transport):
    """Takes everything at once, unless `stuck`; then the test plays the kernel with `take`."""

    def __init__(self, protocol: Any) -> None:
        super().__init__()
        self.protocol = protocol
        self.written = bytearray()
        self.stuck = False
        self.unsent = 0
        self.high = self.low = 0
        self.reading = True
        self.wrote_eof = False
        self.closed = self.lost = False
        self.aborted = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high, self.low = high or 0, low or 0

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def write(self, data: Any) -> None:
        self.written += data
        if self.stuck:
            before, self.unsent = self.unsent, self.unsent + len(data)
            if before <= self.high < self.unsent:
                self.protocol.pause_writing()

    def take(self, count: int) -> None:
        """The peer reads `count` bytes."""
        before, self.unsent = self.unsent, self.unsent - count
        if before > self.low >= self.unsent:
            self.protocol.resume_writing()
        if self.closed and self.unsent == 0:
            self._lose()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.wrote_eof = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def close(self) -> None:
        self.closed = True
        if self.unsent == 0:
            self._lose()

    def abort(self) -> None:
        self.closed = self.aborted = True
        self._lose()

    def _lose(self) -> None:
        if not self.lost:
            self.lost = True
            self.protocol.connection_lost(None)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool


def read_answers(wire: bytes, *methods: str) -> list[Answer]:
    """The answers in `wire`, read by a client that is not ours."""
    client = h11.Connection(h11.CLIENT)
    client.receive_data(wire)
    answers: list[Answer] = []
    for method in methods or itertools.repeat("GET"):
        if not client.trailing_data[0] and answers:
            break
        client.send(h11.Request(method=method, target="/", headers=[("Host", "localhost")]))
        client.send(h11.EndOfMessage())
        answer = _read_one(client)
        answers.append(answer)
        if not answer.complete or client.our_state is not h11.DONE or client.their_state is not h11.DONE:
            break
        client.start_next_cycle()
    return answers


def _read_one(client: h11.Connection) -> Answer:
    answer = Answer(0, {}, b"", False)
    while True:
        event = client.next_event()
        if isinstance(event, h11.Response):
            answer.status = event.status_code
            answer.headers = {name.decode(): value.decode() for name, value in event.headers}
        elif isinstance(event, h11.Data):
            answer.body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            answer.complete = True
            return answer
        elif event in (h11.NEED_DATA, h11.PAUSED) or isinstance(event, h11.ConnectionClosed):
            return answer
