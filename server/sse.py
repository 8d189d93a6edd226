# SPDX-License-Identifier: Apache-2.0
"""Server-sent events: data lines and comments, nothing else (both official SDKs die on some of the rest)."""

from __future__ import annotations

from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"

HEADERS = (
    # Without a charset, readers built on `requests` decode the text as Latin-1.
    ("Content-Type", "text/event-stream; charset=utf-8"),
    ("Cache-Control", "no-cache, no-transform"),
    ("X-Accel-Buffering", "no"),
)

# str.splitlines() cuts at these, and line readers built on it would cut a data line in two. All three can
# only stand inside JSON strings, and their UTF-8 forms cannot begin in the middle of another character.
_LINE_BREAKS = (
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
    ("\u0085".encode(), b"\\u0085"),
)


def data(value: dict[str, Any]) -> bytes:
    """One `data:` event. `value` must hold finite numbers only (orjson would write null)."""
    text = orjson.dumps(value)
    for raw, escaped in _LINE_BREAKS:
        if raw in text:
            text = text.replace(raw, escaped)
    return b"data: " + text + b"\n\n"


def comment(text: str) -> bytes:
    """A comment block: ignored by clients, but bytes on the wire. `text` is one line of ASCII."""
    return f": {text}\n\n".encode("ascii")
