# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 without sockets: bytes in, requests out; answers in, bytes out.

h11 does the parsing. Around it stand the checks it leaves to its users: sizes, framing that two parsers could
read differently, versions. A head is collected here before h11 sees it, so that every verdict depends on the
bytes alone, never on how they were cut into packets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from urllib.parse import urlsplit

import h11

from server.errors import ApiError
from server.http.responses import RawHeaders, reason_phrase

_HEAD_END = re.compile(rb"\n\r?\n")
_TOKEN_START = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]")


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, and the number of header lines."""

    request_line: int = 8 * 1024
    head: int = 32 * 1024
    header_lines: int = 100
    body: int = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Request:
    """A whole request. Header names are lower case; repeated headers are joined with a comma."""

    method: str
    path: str
    query: str
    authority: str | None
    headers: dict[str, str]
    body: bytes
    framed: bool
    """Whether the request said how long its body is (a POST that did not is answered with 411)."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The bytes are no acceptable request: send the error, close the connection."""

    error: ApiError


@dataclass(frozen=True, slots=True)
class ContinueWanted:
    """The client waits for `100 Continue` before it sends its body."""


Event = Request | Refused | ContinueWanted


class Phase(Enum):
    """What the connection waits for."""

    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    ANSWER = auto()
    REFUSED = auto()


class Parser:
    """One connection's protocol state. After `Request` nothing is parsed until `next_cycle`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buffer = bytearray()
        self._reset()

    def _reset(self) -> None:
        # A new machine for each request: h11's own cycle would keep pipelined bytes to itself.
        self._machine = h11.Connection(h11.SERVER, max_incomplete_event_size=self._limits.head)
        self._head: h11.Request | None = None
        self._body = bytearray()
        self._keep_alive = False
        self.phase = Phase.IDLE

    # -- input ------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Bytes received that belong to a later request."""
        return len(self._buffer) if self.phase is Phase.ANSWER else 0

    def feed(self, data: bytes) -> list[Event]:
        """Take bytes from the wire; returns what they complete, in order."""
        if self.phase is Phase.REFUSED:
            return []
        self._buffer += data
        return self._advance()

    def next_cycle(self) -> list[Event]:
        """The answer is complete: go on with what was received meanwhile (pipelining)."""
        self._reset()
        return self._advance()

    def _advance(self) -> list[Event]:
        events: list[Event] = []
        try:
            if self.phase in (Phase.IDLE, Phase.HEAD) and self._buffer:
                self._advance_head(events)
            if self.phase is Phase.BODY:
                self._advance_body(events)
        except ApiError as error:
            self._refuse(error, events)
        except h11.RemoteProtocolError as error:
            status = 501 if error.error_status_hint == 501 else 400
            # h11's text about a body quotes the bytes at hand, which depend on how they were cut.
            what = f"malformed HTTP request: {error}" if self._head is None else "malformed request body"
            self._refuse(ApiError(status, "invalid_http", what), events)
        return events

    def _refuse(self, error: ApiError, events: list[Event]) -> None:
        self.phase = Phase.REFUSED
        self._buffer.clear()
        events.append(Refused(error))

    def _advance_head(self, events: list[Event]) -> None:
        self.phase = Phase.HEAD
        head = self._take_head()
        if head is None:
            return
        self._machine.receive_data(head)
        event = self._machine.next_event()
        if not isinstance(event, h11.Request):
            raise ApiError(400, "invalid_http", "malformed HTTP request")
        self._head = event
        _check_head(event, self._limits)
        self._keep_alive = _wants_keep_alive(event)
        self.phase = Phase.BODY
        if self._machine.they_are_waiting_for_100_continue and not self._buffer:
            events.append(ContinueWanted())

    def _take_head(self) -> bytes | None:
        """The bytes up to and with the blank line, or None when they are not all there."""
        buffer, limits = self._buffer, self._limits
        if not _TOKEN_START.match(buffer):
            raise ApiError(400, "invalid_http", "this is not an HTTP request")
        line_end = buffer.find(b"\n", 0, limits.request_line)
        if line_end < 0 and len(buffer) >= limits.request_line:
            raise ApiError(414, "uri_too_long", f"the request line is over {limits.request_line} bytes")
        end = _HEAD_END.search(buffer, 0, limits.head)
        if end is None:
            if len(buffer) >= limits.head:
                raise ApiError(431, "headers_too_large", f"the request head is over {limits.head} bytes")
            return None
        head = bytes(buffer[: end.end()])
        del buffer[: end.end()]
        _check_lines(head, limits)
        return head

    def _advance_body(self, events: list[Event]) -> None:
        if self._buffer:
            self._machine.receive_data(bytes(self._buffer))
            self._buffer.clear()
        while True:
            event = self._machine.next_event()
            if isinstance(event, h11.Data):
                self._body += event.data
                if len(self._body) > self._limits.body:
                    raise _body_too_large(self._limits)
            elif isinstance(event, h11.EndOfMessage):
                # What h11 has not consumed is the next request; take it back until this one is answered.
                self._buffer += self._machine.trailing_data[0]
                self.phase = Phase.ANSWER
                events.append(self._request())
                return
            else:
                return

    def _request(self) -> Request:
        assert self._head is not None
        headers: dict[str, str] = {}
        for raw_name, raw_value in self._head.headers:
            name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        authority, path, query = _split_target(self._head.target.decode("ascii"))
        framed = "content-length" in headers or "transfer-encoding" in headers
        return Request(
            method=self._head.method.decode("ascii"),
            path=path,
            query=query,
            authority=authority if authority is not None else headers.get("host"),
            headers=headers,
            body=bytes(self._body),
            framed=framed,
        )

    # -- output -----------------------------------------------------------------------------------------

    @property
    def must_close(self) -> bool:
        """Whether the connection cannot be used after the answer in work."""
        return self.phase is not Phase.ANSWER or not self._keep_alive

    @property
    def interim_allowed(self) -> bool:
        """Whether the client must understand 1xx answers: HTTP/1.0 has none (RFC 9110, 15.2)."""
        return self._head is not None and self._head.http_version == b"1.1"

    def send_continue(self) -> bytes:
        """`100 Continue`."""
        return self._send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))

    def send_head(self, status: int, headers: RawHeaders) -> bytes:
        """Status line and headers."""
        return self._send(h11.Response(status_code=status, headers=headers, reason=reason_phrase(status)))

    def send_body(self, data: bytes) -> bytes:
        """A piece of the body, framed; nothing for an answer to HEAD."""
        if self._head is not None and self._head.method == b"HEAD":
            return b""
        return self._send(h11.Data(data=data))

    def send_end(self) -> bytes:
        """The end of the answer."""
        return self._send(h11.EndOfMessage())

    def _send(self, event: h11.Event) -> bytes:
        return self._machine.send(event) or b""


def _check_lines(head: bytes, limits: Limits) -> None:
    """Rules on the raw lines: h11 would join folded lines, take bare line feeds and any number of headers."""
    lines = head.split(b"\n")[:-2]
    if not all(line.endswith(b"\r") for line in lines) or not head.endswith(b"\r\n\r\n"):
        raise ApiError(400, "invalid_http", "lines of the request head must end in CR LF")
    if any(line.startswith((b" ", b"\t")) for line in lines):
        raise ApiError(400, "invalid_http", "folded header lines are not accepted")
    if len(lines) - 1 > limits.header_lines:
        raise ApiError(431, "headers_too_large", f"more than {limits.header_lines} header lines")


def _check_head(request: h11.Request, limits: Limits) -> None:
    """Rules on the parsed head, before any of the body is read."""
    if request.http_version not in (b"1.0", b"1.1"):
        raise ApiError(505, "http_version_not_supported", "only HTTP/1.0 and HTTP/1.1 are spoken here")
    headers = dict(request.headers)
    if b"transfer-encoding" in headers:
        if b"content-length" in headers:
            raise ApiError(400, "invalid_http", "Content-Length together with Transfer-Encoding")
        if request.http_version == b"1.0":
            raise ApiError(400, "invalid_http", "Transfer-Encoding in an HTTP/1.0 request")
    if headers.get(b"host") == b"":
        raise ApiError(400, "invalid_http", "the Host header is empty")
    if headers.get(b"expect", b"100-continue").lower() != b"100-continue":
        raise ApiError(417, "expectation_failed", "only the expectation 100-continue can be met")
    if int(headers.get(b"content-length", b"0")) > limits.body:
        raise _body_too_large(limits)
    if request.method == b"CONNECT":
        allow = (("Allow", "GET, HEAD, POST, OPTIONS"),)
        raise ApiError(405, "method_not_allowed", "this is not a proxy", headers=allow)
    if not request.target.startswith((b"/", b"http://", b"https://")) and request.target != b"*":
        raise ApiError(400, "invalid_http", "the request target must begin with /")


def _wants_keep_alive(request: h11.Request) -> bool:
    options = [
        value.strip().lower()
        for name, line in request.headers
        if name == b"connection"
        for value in line.split(b",")
    ]
    return request.http_version == b"1.1" and b"close" not in options


def _body_too_large(limits: Limits) -> ApiError:
    return ApiError(413, "body_too_large", f"the request body is over {limits.body} bytes")


def _split_target(target: str) -> tuple[str | None, str, str]:
    """(authority of an absolute target or None, path, query); never fails on what h11 let through."""
    authority = None
    if not target.startswith("/") and target != "*":
        try:
            parts = urlsplit(target)
        except ValueError:
            return "", "/", ""
        authority = parts.netloc
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    path, _, query = target.partition("?")
    return authority, path, query
