# SPDX-License-Identifier: Apache-2.0
"""One connection on a fake transport and a fake clock: deadlines, half-close, back-pressure, clean ends."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

import pytest

from server.errors import ApiError
from server.http.connection import READ_AHEAD, Connection, Connections, Deadlines
from server.http.exchange import Exchange
from server.http.responses import Response
from tests.server.fakes import FakeClock, FakeTransport, read_answers
from tests.server.test_http_parser import CORPUS, LIMITS

GET = b"GET /a HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST_HEAD = b"POST /a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n"
DEADLINES = Deadlines()


async def echo(exchange: Exchange) -> None:
    exchange.send(Response(200, repr(exchange.request).encode()))


class Peer:
    """A connection with everything around it faked."""

    def __init__(self, handler: Callable[[Exchange], Awaitable[None]] = echo) -> None:
        self.clock = FakeClock()
        self.open = Connections()
        self.connection = Connection(handler, clock=self.clock, open_connections=self.open, limits=LIMITS)
        self.transport = FakeTransport(self.connection)
        self.connection.connection_made(self.transport)

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.connection.data_received(piece)
            await settle()

    @property
    def wire(self) -> bytes:
        return bytes(self.transport.written)


async def settle() -> None:
    """Let every ready task run until nothing moves any more."""
    for _ in range(10):
        await asyncio.sleep(0)


def stable(wire: bytes) -> bytes:
    return re.sub(rb"Date: [^\r]*|X-Request-Id: [^\r]*", b"", wire)


@pytest.mark.parametrize("name", CORPUS)
async def test_whole_and_bytewise_are_answered_alike(name: str) -> None:
    data, statuses = CORPUS[name]
    whole, bytewise = Peer(), Peer()
    await whole.send(data)
    await bytewise.send(*(data[at : at + 1] for at in range(len(data))))
    method = data.split(b" ")[0].decode("latin-1") if name in ("head",) else "GET"
    assert [answer.status for answer in read_answers(whole.wire, *[method] * len(statuses))] == statuses
    assert stable(bytewise.wire) == stable(whole.wire)


async def test_every_answer_carries_the_common_headers() -> None:
    peer = Peer()
    await peer.send(GET, GET)
    first, second = read_answers(peer.wire)
    for answer in (first, second):
        assert {"date", "server", "x-request-id", "content-length"} <= set(answer.headers)
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert first.headers["connection"] == "keep-alive"


async def test_a_fault_of_ours_is_a_500_without_a_traceback() -> None:
    async def broken(_exchange: Exchange) -> None:
        raise ZeroDivisionError("secret")

    peer = Peer(broken)
    await peer.send(GET)
    (answer,) = read_answers(peer.wire)
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert answer.headers["x-request-id"].encode() in answer.body


async def test_an_api_error_is_sent_as_it_is() -> None:
    async def refuse(_exchange: Exchange) -> None:
        raise ApiError(429, "server_busy", "later", headers=(("Retry-After", "3"),))

    peer = Peer(refuse)
    await peer.send(GET, GET)
    assert [(each.status, each.headers["retry-after"]) for each in read_answers(peer.wire)] == [
        (429, "3")
    ] * 2


async def test_a_fault_in_a_begun_answer_cuts_it_off() -> None:
    async def broken(exchange: Exchange) -> None:
        exchange.start_stream((), b"x")
        raise ZeroDivisionError

    peer = Peer(broken)
    await peer.send(GET)
    assert peer.transport.aborted
    assert not read_answers(peer.wire)[0].complete


# -- deadlines --------------------------------------------------------------------------------------------


async def test_a_slow_head_is_refused_at_an_absolute_deadline() -> None:
    peer = Peer()
    for byte in b"GET / HTTP":
        await peer.send(bytes([byte]))
        peer.clock.advance(DEADLINES.head / 10 - 0.01)
    assert peer.wire == b""
    peer.clock.advance(0.2)
    (answer,) = read_answers(peer.wire)
    assert answer.status == 408
    assert answer.headers["connection"] == "close"
    peer.clock.advance(DEADLINES.linger)
    assert peer.transport.closed


async def test_a_silent_body_is_refused() -> None:
    peer = Peer()
    await peer.send(POST_HEAD, b"x")
    peer.clock.advance(DEADLINES.body_idle - 0.01)
    assert peer.wire == b""
    peer.clock.advance(0.02)
    assert read_answers(peer.wire)[0].status == 408


async def test_a_dripping_body_is_refused_at_an_absolute_deadline() -> None:
    peer = Peer()
    await peer.send(POST_HEAD)
    for _ in range(int(DEADLINES.body / 10)):
        peer.clock.advance(9.99)
        assert peer.wire == b""
        await peer.send(b"x")
    peer.clock.advance(1.0)
    assert read_answers(peer.wire)[0].status == 408


async def test_an_idle_connection_is_closed() -> None:
    fresh, used = Peer(), Peer()
    await used.send(GET)
    for peer in (fresh, used):
        peer.clock.advance(DEADLINES.keep_alive - 0.01)
        assert not peer.transport.closed
        peer.clock.advance(0.02)
        assert peer.transport.closed
        assert list(peer.open) == []


async def test_no_deadline_runs_while_an_answer_is_in_work() -> None:
    go = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await go.wait()
        await echo(exchange)

    peer = Peer(slow)
    await peer.send(GET)
    peer.clock.advance(3600)
    assert not peer.transport.closed
    go.set()
    await settle()
    assert read_answers(peer.wire)[0].status == 200


# -- refusals ---------------------------------------------------------------------------------------------


async def test_after_a_refusal_the_rest_is_read_so_that_the_answer_arrives() -> None:
    peer = Peer()
    await peer.send(b"\x00nonsense")
    assert peer.transport.wrote_eof
    await peer.send(b"x" * 60_000)
    assert not peer.transport.closed
    await peer.send(b"x" * 10_000)
    assert peer.transport.closed


# -- ends -------------------------------------------------------------------------------------------------


async def test_a_lost_connection_cancels_the_work() -> None:
    ended: list[str] = []

    async def endless(_exchange: Exchange) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    peer = Peer(endless)
    await peer.send(GET)
    assert peer.connection.busy
    peer.connection.connection_lost(ConnectionResetError())
    await settle()
    assert ended == ["ended"]
    assert not peer.connection.busy
    assert peer.clock.pending == 0


async def test_a_half_close_still_gets_its_answers() -> None:
    peer = Peer()
    peer.connection.data_received(GET + GET)
    assert peer.connection.eof_received()
    await settle()
    assert [answer.status for answer in read_answers(peer.wire)] == [200, 200]
    assert [answer.headers["connection"] for answer in read_answers(peer.wire)] == ["keep-alive", "close"]
    assert peer.transport.closed


async def test_a_half_close_in_the_middle_of_a_request_ends_the_connection() -> None:
    peer = Peer()
    await peer.send(POST_HEAD)
    assert not peer.connection.eof_received()


async def test_draining_closes_idle_connections_and_lets_answers_end() -> None:
    go = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await go.wait()
        await echo(exchange)

    idle, busy = Peer(), Peer(slow)
    await busy.send(GET)
    idle.connection.drain()
    busy.connection.drain()
    assert idle.transport.closed
    assert not busy.transport.closed
    go.set()
    await settle()
    assert read_answers(busy.wire)[0].headers["connection"] == "close"
    assert busy.transport.closed


# -- back-pressure ----------------------------------------------------------------------------------------


async def pour(exchange: Exchange) -> None:
    exchange.start_stream((), b"x")
    for _ in range(1000):
        exchange.write(b"x" * 1000)
        await exchange.drained()
    exchange.finish(b"x")


async def test_a_slow_reader_holds_the_producer() -> None:
    peer = Peer(pour)
    peer.transport.stuck = True
    await peer.send(GET)
    assert peer.transport.high < peer.transport.unsent < peer.transport.high + 2000
    peer.transport.take(peer.transport.unsent)
    await asyncio.sleep(0)
    await settle()
    assert peer.transport.unsent > 0


async def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    peer = Peer(pour)
    peer.transport.stuck = True
    await peer.send(GET)
    peer.clock.advance(DEADLINES.write_stall - 1)
    peer.transport.take(1)
    peer.clock.advance(DEADLINES.write_stall)
    assert not peer.transport.aborted  # one byte is a sign of life
    peer.clock.advance(DEADLINES.write_stall)
    assert peer.transport.aborted
    await settle()
    assert not peer.connection.busy
    assert peer.clock.pending == 0


async def test_a_reader_that_never_takes_the_end_is_cut_off() -> None:
    patient, dead = Peer(), Peer()
    for peer in (patient, dead):
        peer.transport.stuck = True
        await peer.send(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert peer.transport.closed
        assert not peer.transport.lost
    patient.transport.take(patient.transport.unsent)
    for peer in (patient, dead):
        peer.clock.advance(DEADLINES.write_stall)
        assert peer.transport.lost
        assert peer.clock.pending == 0
    assert (patient.transport.aborted, dead.transport.aborted) == (False, True)


async def test_pipelined_bytes_are_bounded() -> None:
    go = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await go.wait()
        await echo(exchange)

    peer = Peer(slow)
    await peer.send(GET)
    await peer.send(b"GET /b HTTP/1.1\r\n" + b"x" * READ_AHEAD)
    assert not peer.transport.reading
    go.set()
    await settle()
    assert [answer.status for answer in read_answers(peer.wire)] == [200, 431]
