# SPDX-License-Identifier: Apache-2.0
"""One request and its answer, as the routes see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from server.http.parser import Request
from server.http.responses import Headers, Response


class Wire(Protocol):
    """What an exchange needs of its connection."""

    def send_head(self, status: int, headers: Headers, *, length: int | None, body: bytes, end: bool) -> None:
        """Send the status line and headers with the first piece of the body, or all of it."""

    def send_body(self, data: bytes, *, end: bool) -> None:
        """Send a piece of the body."""

    def send_interim(self) -> None:
        """Send `100 Continue`, which every HTTP/1.1 client skips; nothing on HTTP/1.0."""

    async def drained(self) -> None:
        """Wait until the peer has taken enough of what was sent."""


class Exchange:
    """Either `send` once, or `start_stream`, any number of `write`, and `finish`.

    When the peer is gone the task that serves the exchange is cancelled. `half_closed` says that the peer has
    ended its own sending, which may mean that it is gone; `on_half_close` is called when that happens.
    """

    def __init__(self, wire: Wire, request: Request, request_id: str) -> None:
        self.request = request
        self.request_id = request_id
        self.started = False
        self.finished = False
        self.half_closed = False
        self.on_half_close: Callable[[], None] | None = None
        self.extra_headers: Headers = ()
        self._wire = wire

    def send(self, response: Response) -> None:
        """Send a whole answer."""
        self.started = True
        headers = (*response.headers, *self.extra_headers)
        self.finished = True
        self._wire.send_head(response.status, headers, length=_length(response), body=response.body, end=True)

    def probe(self) -> None:
        """Put bytes on the wire before the answer: a peer that is gone answers them with a reset."""
        if not self.started:
            self._wire.send_interim()

    def start_stream(self, headers: Headers, first: bytes) -> None:
        """Send the head of an answer whose length is not known, and its first piece."""
        self.started = True
        self._wire.send_head(200, (*headers, *self.extra_headers), length=None, body=first, end=False)

    def write(self, data: bytes) -> None:
        """Send a piece of the stream. Does not wait; see `drained`."""
        if not self.finished:
            self._wire.send_body(data, end=False)

    async def drained(self) -> None:
        """Wait until the output buffer is below its mark: this is what holds a producer."""
        await self._wire.drained()

    def finish(self, last: bytes) -> None:
        """Send the last piece and the end together: clients wait for the end to reuse a connection."""
        self.finished = True
        self._wire.send_body(last, end=True)


def _length(response: Response) -> int | None:
    return None if response.status == 204 else len(response.body)
