# SPDX-License-Identifier: Apache-2.0
"""The HTTP parser without sockets. Expected statuses are those of RFC 9110 and RFC 9112."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.http.parser import ContinueWanted, Event, Limits, Parser, Refused, Request

LIMITS = Limits(request_line=256, head=1024, header_lines=10, body=64)
HOST = b"Host: localhost\r\n"


def get(path: bytes = b"/", *lines: bytes) -> bytes:
    return b"GET " + path + b" HTTP/1.1\r\n" + HOST + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def post(body: bytes, *lines: bytes) -> bytes:
    length = b"Content-Length: %d\r\n" % len(body)
    head = b"POST /p HTTP/1.1\r\n" + HOST + length + b"".join(line + b"\r\n" for line in lines)
    return head + b"\r\n" + body


def chunked(*lines: bytes, framing: bytes) -> bytes:
    head = b"POST /p HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n"
    return head + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + framing


# name -> (bytes, statuses of the answers in order; 200 stands for a request that was accepted)
CORPUS: dict[str, tuple[bytes, list[int]]] = {
    "get": (get(), [200]),
    "head": (b"HEAD / HTTP/1.1\r\n" + HOST + b"\r\n", [200]),
    "old": (b"GET / HTTP/1.0\r\n\r\n", [200]),
    "post": (post(b'{"a":1}'), [200]),
    "post without a length": (b"POST /p HTTP/1.1\r\n" + HOST + b"\r\n", [200]),
    "chunked": (chunked(framing=b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"), [200]),
    "chunk extension and trailer": (chunked(framing=b"3;x=y\r\nabc\r\n0\r\nT: v\r\n\r\n"), [200]),
    "pipelined": (get(b"/1") + post(b"two") + get(b"/3"), [200, 200, 200]),
    "pipelined up to close": (get(b"/1", b"Connection: close") + get(b"/2"), [200]),
    "get with a body": (get(b"/", b"Content-Length: 3") + b"abc" + get(b"/2"), [200, 200]),
    "absolute target": (b"GET http://localhost/x?y HTTP/1.1\r\n" + HOST + b"\r\n", [200]),
    "options star": (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", [200]),
    "upgrade offer is ignored": (post(b"x", b"Connection: Upgrade", b"Upgrade: h2c"), [200]),
    "latin-1 header value": (get(b"/", b"X-Name: caf\xe9"), [200]),
    "equal lengths": (post(b"abc", b"Content-Length: 3"), [200]),
    "good, then rubbish": (get() + b"\x16\x03\x01", [200, 400]),
    "tls hello": (b"\x16\x03\x01\x02\x00\x01\x00", [400]),
    "leading blank line": (b"\r\n" + get(), [400]),
    "bare line feeds": (b"GET / HTTP/1.1\nHost: localhost\n\n", [400]),
    "one bare line feed": (b"GET / HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n", [400]),
    "blank line with a bare line feed": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\n", [400]),
    "folded line": (get(b"/", b"X: a", b" b"), [400]),
    "space before colon": (get(b"/", b"X : a"), [400]),
    "nul in a value": (get(b"/", b"X: a\x00b"), [400]),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", [400]),
    "two hosts": (b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n", [400]),
    "empty host": (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", [400]),
    "target without a slash": (b"GET nowhere HTTP/1.1\r\n" + HOST + b"\r\n", [400]),
    "space in the target": (b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n", [400]),
    "two framings": (chunked(b"Content-Length: 3", framing=b"3\r\nabc\r\n0\r\n\r\n"), [400]),
    "different lengths": (post(b"abc", b"Content-Length: 4"), [400]),
    "signed length": (b"POST /p HTTP/1.1\r\n" + HOST + b"Content-Length: +3\r\n\r\nabc", [400]),
    "underscore length": (b"POST /p HTTP/1.1\r\n" + HOST + b"Content-Length: 1_0\r\n\r\nabc", [400]),
    "chunked in 1.0": (b"POST /p HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", [400]),
    "other coding": (b"POST /p HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip\r\n\r\n", [501]),
    "malformed chunk size": (chunked(framing=b"zz\r\nabc\r\n0\r\n\r\n"), [400]),
    "malformed chunk end": (chunked(framing=b"3\r\nabcX\r\n0\r\n\r\n"), [400]),
    "connect": (b"CONNECT a:1 HTTP/1.1\r\n" + HOST + b"\r\n", [405]),
    "long body": (post(b"x" * 65), [413]),
    "huge length": (b"POST /p HTTP/1.1\r\n" + HOST + b"Content-Length: 9999999999999999999\r\n\r\n", [413]),
    "long chunked body": (
        chunked(framing=b"28\r\n" + b"x" * 40 + b"\r\n28\r\n" + b"x" * 40 + b"\r\n"),
        [413],
    ),
    "longest body": (post(b"x" * 64), [200]),
    "long target": (get(b"/" + b"a" * 256), [414]),
    "other expectation": (post(b"abc", b"Expect: miracles"), [417]),
    "big head": (get(b"/", *(b"X%d: " % n + b"v" * 200 for n in range(6))), [431]),
    "many headers": (get(b"/", *(b"X%d: v" % n for n in range(10))), [431]),
    "most headers": (get(b"/", *(b"X%d: v" % n for n in range(9))), [200]),
    "version 2.0": (b"GET / HTTP/2.0\r\n" + HOST + b"\r\n", [505]),
    "h2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [505]),
}


@dataclass
class Exchanges:
    """A server reduced to its parser: answers every request with what it saw of it."""

    parser: Parser = field(default_factory=lambda: Parser(LIMITS))
    wire: bytearray = field(default_factory=bytearray)
    statuses: list[int] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def feed(self, data: bytes) -> None:
        self._take(self.parser.feed(data))

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, ContinueWanted):
                self.parser.send_continue()
            elif isinstance(event, Refused):
                self._answer(event.error.status, event.error.body())
                return
            else:
                self.requests.append(event)
                close = self.parser.must_close
                self._answer(200, repr(event).encode())
                if close:
                    return
                self._take(self.parser.next_cycle())

    def _answer(self, status: int, body: bytes) -> None:
        close = b"close" if self.parser.must_close else b"keep-alive"
        headers = [(b"Content-Length", b"%d" % len(body)), (b"Connection", close)]
        self.wire += self.parser.send_head(status, headers) + self.parser.send_body(body)
        self.wire += self.parser.send_end()
        self.statuses.append(status)


def answers(*pieces: bytes) -> Exchanges:
    server = Exchanges()
    for piece in pieces:
        server.feed(piece)
    return server


@pytest.mark.parametrize("name", CORPUS)
def test_statuses(name: str) -> None:
    data, statuses = CORPUS[name]
    assert answers(data).statuses == statuses


@pytest.mark.parametrize("name", CORPUS)
def test_answers_do_not_depend_on_how_bytes_are_cut(name: str) -> None:
    data, _ = CORPUS[name]
    whole = answers(data).wire
    assert answers(*(data[at : at + 1] for at in range(len(data)))).wire == whole
    for cut in range(1, len(data)):
        assert answers(data[:cut], data[cut:]).wire == whole, cut


def test_a_request_is_delivered_as_sent() -> None:
    (request,) = answers(post(b"abc", b"X-A: 1", b"x-a: 2", b"X-B: caf\xe9")).requests
    assert (request.method, request.path, request.query, request.body) == ("POST", "/p", "", b"abc")
    assert request.headers["x-a"] == "1, 2"
    assert request.headers["x-b"] == "caf\u00e9"
    assert request.framed
    assert not answers(b"POST /p HTTP/1.1\r\n" + HOST + b"\r\n").requests[0].framed


def test_chunks_are_joined() -> None:
    data, _ = CORPUS["chunked"]
    assert answers(data).requests[0].body == b"abcde"


def test_an_absolute_target_overrides_the_host_header() -> None:
    (request,) = answers(b"GET http://evil.example/x?y=1 HTTP/1.1\r\n" + HOST + b"\r\n").requests
    assert (request.authority, request.path, request.query) == ("evil.example", "/x", "y=1")


def test_continue_is_wanted_only_after_the_head_has_passed() -> None:
    head = b"POST /p HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    good, bad = Parser(LIMITS), Parser(LIMITS)
    assert good.feed(head % 3) == [ContinueWanted()]
    assert good.send_continue() == b"HTTP/1.1 100 Continue\r\n\r\n"
    (refused,) = bad.feed(head % 65)
    assert isinstance(refused, Refused)
    assert refused.error.status == 413


def test_nothing_is_parsed_while_an_answer_is_due() -> None:
    parser = Parser(LIMITS)
    assert len(parser.feed(get(b"/1"))) == 1
    assert parser.feed(get(b"/2")) == []
    assert parser.held == len(get(b"/2"))


def test_a_head_answer_has_no_body() -> None:
    wire = bytes(answers(CORPUS["head"][0]).wire)
    assert wire.endswith(b"\r\n\r\n")
    assert b"Content-Length: 0" not in wire


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(CORPUS)), st.data())
def test_damaged_requests_are_parsed_or_refused_however_they_are_cut(name: str, data: st.DataObject) -> None:
    damaged = bytearray(CORPUS[name][0])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        if not damaged:
            return
    cut = data.draw(st.integers(0, len(damaged)))
    whole = answers(bytes(damaged)).wire
    assert answers(bytes(damaged[:cut]), bytes(damaged[cut:])).wire == whole
    assert answers(*(bytes(damaged[at : at + 1]) for at in range(len(damaged)))).wire == whole
