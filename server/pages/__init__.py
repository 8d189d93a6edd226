# SPDX-License-Identifier: Apache-2.0
"""Web pages served by the server itself; they load nothing from outside."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files

from server.http.responses import Headers

_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Page:
    """One HTML file and its headers."""

    body: bytes
    headers: Headers


def load_page(name: str) -> Page:
    """Read a page of this package; its own inline script and style are all that its policy lets run."""
    body = files(__name__).joinpath(name).read_bytes()
    hashes: dict[bytes, list[str]] = {b"script": [], b"style": []}
    for tag, text in _INLINE.findall(body):
        digest = base64.b64encode(hashlib.sha256(text).digest()).decode("ascii")
        hashes[tag].append(f"'sha256-{digest}'")
    policy = "; ".join(
        [
            "default-src 'none'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            f"script-src {' '.join(hashes[b'script'])}",
            f"style-src {' '.join(hashes[b'style'])}",
        ]
    )
    headers = (
        ("Content-Type", "text/html; charset=utf-8"),
        ("Cache-Control", "no-cache"),
        ("Content-Security-Policy", policy),
    )
    return Page(body, headers)
