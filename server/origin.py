# SPDX-License-Identifier: Apache-2.0
"""Who may talk to the server: the Host check against DNS rebinding, the Origin check for browsers."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from server.errors import ApiError
from server.http.parser import Request
from server.http.responses import Headers

_ALLOW_HEADERS = "Authorization, Content-Type, X-Api-Key, X-Request-Id"
_EXPOSE_HEADERS = "X-Request-Id, X-Cecilia-Generation-Id, Retry-After, retry-after-ms"


class OriginPolicy:
    """The rules for one listening address. `loopback_only` turns the Host check on."""

    def __init__(self, *, loopback_only: bool, machine_name: str | None = None) -> None:
        self._loopback_only = loopback_only
        self._machine_name = (machine_name or socket.gethostname()).lower()

    def check(self, request: Request) -> Headers:
        """Raise 403, or return the CORS headers of the answer (none without an Origin)."""
        host = _host_name(request.authority)
        if self._loopback_only and request.authority is not None and not self._host_allowed(host):
            raise ApiError(403, "host_not_allowed", "this server answers to local host names only")
        origin = request.headers.get("origin")
        if origin is None:
            return ()
        if not self._origin_allowed(origin, request.authority):
            raise ApiError(403, "origin_not_allowed", "pages of other origins may not use this server")
        return (
            ("Access-Control-Allow-Origin", origin),
            ("Access-Control-Expose-Headers", _EXPOSE_HEADERS),
            ("Vary", "Origin"),
        )

    def preflight(self, request: Request, allow: str) -> Headers:
        """The further headers of an answer to OPTIONS; `check` has passed."""
        headers = [("Allow", allow)]
        if "origin" in request.headers:
            headers.append(("Access-Control-Allow-Methods", allow))
            headers.append(("Access-Control-Allow-Headers", _ALLOW_HEADERS))
            headers.append(("Access-Control-Max-Age", "600"))
            if "access-control-request-private-network" in request.headers:
                headers.append(("Access-Control-Allow-Private-Network", "true"))
        return tuple(headers)

    def _host_allowed(self, host: str | None) -> bool:
        if host is None:
            return False
        return is_loopback(host) or host == self._machine_name or host.endswith(".local")

    def _origin_allowed(self, origin: str, authority: str | None) -> bool:
        """A page of this server, or of any local one. "null" (files, sandboxed frames) is neither."""
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        if parts.scheme not in ("http", "https"):
            return False
        host = _host_name(parts.netloc)
        return host is not None and (is_loopback(host) or parts.netloc == authority)


def is_loopback(host: str) -> bool:
    """localhost, *.localhost, 127.0.0.0/8, ::1."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(authority: str | None) -> str | None:
    """The host of `host[:port]` in lower case without a final dot; None when it is none."""
    if not authority:
        return None
    try:
        host = urlsplit(f"//{authority}").hostname
    except ValueError:
        return None
    return host.rstrip(".") if host else None
