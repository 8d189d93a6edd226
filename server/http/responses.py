# SPDX-License-Identifier: Apache-2.0
"""Responses as values, and the one helper that builds header lists."""

from __future__ import annotations

from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

import orjson

from server.errors import ApiError

Headers = tuple[tuple[str, str], ...]
RawHeaders = list[tuple[bytes, bytes]]

JSON = ("Content-Type", "application/json")


@dataclass(frozen=True, slots=True)
class Response:
    """A complete answer; the body's length is known."""

    status: int
    body: bytes = b""
    headers: Headers = ()


def json_response(value: Any, *, status: int = 200, headers: Headers = ()) -> Response:
    """A JSON answer."""
    return Response(status, orjson.dumps(value), (JSON, *headers))


def error_response(error: ApiError) -> Response:
    """An OpenAI error object."""
    return Response(error.status, error.body(), (JSON, *error.headers))


def reason_phrase(status: int) -> bytes:
    """The standard phrase, e.g. b"Not Found"."""
    return HTTPStatus(status).phrase.encode("ascii")


def build_headers(headers: Headers, *, length: int | None, request_id: str, close: bool) -> RawHeaders:
    """The raw header list of an answer.

    `length` None means that the body's length is not known (h11 then picks chunked, or close on HTTP/1.0).
    Values come from us alone, never from a request, except those listed in `server.origin`, which have been
    checked; a stray control character would still be refused by h11 rather than sent.
    """
    fixed = [
        ("Date", formatdate(usegmt=True)),
        ("Server", "cecilia"),
        ("X-Request-Id", request_id),
        ("X-Content-Type-Options", "nosniff"),
        ("Connection", "close" if close else "keep-alive"),
    ]
    if length is not None:
        fixed.append(("Content-Length", str(length)))
    return [(name.encode("ascii"), value.encode("latin-1")) for name, value in (*fixed, *headers)]
