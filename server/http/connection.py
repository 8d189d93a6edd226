# SPDX-License-Identifier: Apache-2.0
"""The asyncio side of one connection: timers, back-pressure and the life of the task that answers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from server import log
from server.clock import Clock, Timer
from server.errors import ApiError, internal_error
from server.http.exchange import Exchange
from server.http.parser import ContinueWanted, Event, Limits, Parser, Phase, Refused, Request
from server.http.responses import Headers, build_headers, error_response

Handler = Callable[[Exchange], Awaitable[None]]

HIGH_WATER = 64 * 1024
LOW_WATER = 16 * 1024
# Pipelined bytes kept while an answer is in work; beyond this the socket is not read.
READ_AHEAD = 64 * 1024
LINGER_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds. Absolute ones are not moved by single bytes, or a slow sender would live for ever."""

    head: float = 10.0
    body_idle: float = 15.0
    body: float = 120.0
    keep_alive: float = 75.0
    write_stall: float = 60.0
    linger: float = 1.0


class Connections:
    """The live connections of a server."""

    def __init__(self) -> None:
        self._open: set[Connection] = set()
        self._none = asyncio.Event()
        self._none.set()

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._open))

    def add(self, connection: Connection) -> None:
        """A client has come."""
        self._open.add(connection)
        self._none.clear()

    def discard(self, connection: Connection) -> None:
        """A client has gone."""
        self._open.discard(connection)
        if not self._open:
            self._none.set()

    async def all_gone(self) -> None:
        """Wait until none is left."""
        await self._none.wait()


class Connection(asyncio.Protocol):
    """Serves one request at a time; `open_connections` holds it while it lives."""

    def __init__(
        self,
        handler: Handler,
        *,
        clock: Clock,
        open_connections: Connections,
        limits: Limits | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        self._handler = handler
        self._clock = clock
        self._all = open_connections
        self._deadlines = deadlines or Deadlines()
        self._parser = Parser(limits or Limits())
        self._transport: asyncio.Transport | None = None
        self._timer: Timer | None = None
        self._stall_timer: Timer | None = None
        self._body_deadline = 0.0
        self._task: asyncio.Task[None] | None = None
        self._exchange: Exchange | None = None
        self._resume: asyncio.Event = asyncio.Event()
        self._resume.set()
        self._read_closed = False
        self._draining = False
        self._lingering: int | None = None
        self._request_id = ""

    @property
    def busy(self) -> bool:
        """Whether an answer is in work."""
        return self._task is not None

    # -- called by asyncio --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        # uvloop's transports have the methods, but not the base class.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER, low=LOW_WATER)
        self._all.add(self)
        self._arm(self._deadlines.keep_alive, self.close)

    def data_received(self, data: bytes) -> None:
        """Bytes have come in."""
        if self._lingering is not None:
            self._lingering += len(data)
            if self._lingering > LINGER_BYTES:
                self.close()
            return
        before = self._parser.phase
        self._serve(self._parser.feed(data))
        self._watch_input(before)
        if self._parser.held > READ_AHEAD and self._transport is not None:
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """The peer has ended its sending. Legal in the middle of an exchange: the answer is still due."""
        self._read_closed = True
        if self._task is None or self._exchange is None:
            return False
        self._exchange.half_closed = True
        if self._exchange.on_half_close is not None:
            self._exchange.on_half_close()
        return True

    def connection_lost(self, _error: Exception | None) -> None:
        """The connection is gone: whatever is in work for it ends now."""
        self._all.discard(self)
        self._transport = None
        self._disarm()
        self._cancel_stall()
        self._resume.set()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        """The output buffer is over its high-water mark."""
        self._resume.clear()
        self._watch_stall(self._unsent())

    def resume_writing(self) -> None:
        """The output buffer is below its low-water mark."""
        self._cancel_stall()
        self._resume.set()

    # -- used by the server -------------------------------------------------------------------------------

    def drain(self) -> None:
        """The server is stopping: close when idle, or after the answer in work."""
        self._draining = True
        if self._task is None:
            self.close()

    def close(self) -> None:
        """Close once everything sent is taken, or the peer has taken nothing of it for too long."""
        if self._transport is not None:
            self._transport.close()
            if unsent := self._unsent():
                self._watch_stall(unsent)

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    # -- the wire of an exchange --------------------------------------------------------------------------

    def send_head(self, status: int, headers: Headers, *, length: int | None, body: bytes, end: bool) -> None:
        """Send the status line and headers with the first piece of the body, or all of it."""
        raw = build_headers(headers, length=length, request_id=self._request_id, close=self._must_close())
        self._write(self._parser.send_head(status, raw) + self._framed(body, end))

    def send_body(self, data: bytes, *, end: bool) -> None:
        """Send a piece of the body."""
        self._write(self._framed(data, end))

    def send_interim(self) -> None:
        """Send `100 Continue`, which every HTTP/1.1 client skips; nothing on HTTP/1.0."""
        if self._parser.interim_allowed:
            self._write(self._parser.send_continue())

    async def drained(self) -> None:
        """Wait until the output buffer is below its mark."""
        await self._resume.wait()

    # -- requests -----------------------------------------------------------------------------------------

    def _serve(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, ContinueWanted):
                self._write(self._parser.send_continue())
            elif isinstance(event, Refused):
                self._refuse(event.error)
            else:
                self._start(event)

    def _start(self, request: Request) -> None:
        self._disarm()
        self._request_id = f"req_{secrets.token_hex(12)}"
        self._exchange = Exchange(self, request, self._request_id)
        self._exchange.half_closed = self._read_closed
        self._task = asyncio.get_running_loop().create_task(self._run(self._exchange))

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._handler(exchange)
        except ApiError as error:
            self._fail(exchange, error)
        except Exception:  # noqa: BLE001 - one request's fault must not end the connection unanswered
            log.exception("request_failed", request=exchange.request_id)
            self._fail(exchange, internal_error(exchange.request_id))
        finally:
            self._task = None
            self._exchange = None
        self._after(exchange)

    def _fail(self, exchange: Exchange, error: ApiError) -> None:
        """Answer with the error; when the answer has begun it can only be cut off."""
        if not exchange.started:
            exchange.send(error_response(error))
        elif not exchange.finished:
            self.abort()

    def _after(self, exchange: Exchange) -> None:
        """The answer is complete: reuse the connection or close it."""
        if self._transport is None:
            return
        if not exchange.finished or self._must_close():
            self.close()
            return
        self._arm(self._deadlines.keep_alive, self.close)
        self._serve(self._parser.next_cycle())
        self._watch_input(Phase.IDLE)
        if self._read_closed:
            if self._task is None:
                self.close()
        elif self._parser.held <= READ_AHEAD:
            self._transport.resume_reading()

    def _refuse(self, error: ApiError) -> None:
        """Answer bytes that are no acceptable request, then close so that the answer arrives.

        Closing with unread input makes the kernel send a reset, which would overtake the answer: so end our
        side, and read on for a moment.
        """
        self._request_id = f"req_{secrets.token_hex(12)}"
        response = error_response(error)
        self.send_head(
            response.status, response.headers, length=len(response.body), body=response.body, end=True
        )
        self._lingering = 0
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()
        self._arm(self._deadlines.linger, self.close)

    def _must_close(self) -> bool:
        ended = self._read_closed and not self._parser.held
        return self._draining or ended or self._parser.must_close

    def _framed(self, data: bytes, end: bool) -> bytes:
        framed = self._parser.send_body(data) if data else b""
        return framed + self._parser.send_end() if end else framed

    def _write(self, data: bytes) -> None:
        if data and self._transport is not None:
            self._transport.write(data)

    # -- timers -------------------------------------------------------------------------------------------

    def _watch_input(self, before: Phase) -> None:
        """Keep the deadline that belongs to what is being received."""
        phase, deadlines = self._parser.phase, self._deadlines
        if phase is Phase.HEAD and before is not Phase.HEAD:
            self._arm(deadlines.head, self._too_slow)
        elif phase is Phase.BODY:
            now = self._clock.time()
            if before is not Phase.BODY:
                self._body_deadline = now + deadlines.body
            self._arm(min(deadlines.body_idle, self._body_deadline - now), self._too_slow)

    def _too_slow(self) -> None:
        part = "headers" if self._parser.phase is Phase.HEAD else "body"
        self._refuse(ApiError(408, "request_timeout", f"the request's {part} did not arrive in time"))

    def _watch_stall(self, unsent: int) -> None:
        """Abort when the peer takes no byte for `write_stall` seconds."""

        def check() -> None:
            left = self._unsent()
            if left >= unsent:
                self.abort()
            else:
                self._watch_stall(left)

        self._cancel_stall()
        self._stall_timer = self._clock.call_later(self._deadlines.write_stall, check)

    def _unsent(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def _cancel_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _arm(self, delay: float, action: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self._clock.call_later(max(delay, 0.0), action)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
