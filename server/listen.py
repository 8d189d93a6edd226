# SPDX-License-Identifier: Apache-2.0
"""The listening sockets: bound before the model is loaded, so that /health can answer meanwhile."""

from __future__ import annotations

import errno
import socket

from cecilia.errors import PortError

BACKLOG = 128


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets on every address of `host` ("localhost" may have two); raises PortError.

    With port 0 the first address picks a free port and the others take the same one.
    """
    sockets: list[socket.socket] = []
    try:
        for family, address in _addresses(host, port):
            sockets.append(_listen(family, address, sockets[0].getsockname()[1] if sockets else port))
    except PortError:
        for opened in sockets:
            opened.close()
        raise
    return sockets


def url(sockets: list[socket.socket]) -> str:
    """The address to print: that of the first socket."""
    host, port = sockets[0].getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise PortError("address_unavailable", f"--host {host!r} is no address of this machine") from None
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def _listen(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind((address, port))
        opened.listen(BACKLOG)
        opened.setblocking(False)
    except OSError as error:
        opened.close()
        raise _port_error(address, port, error) from None
    return opened


def _port_error(address: str, port: int, error: OSError) -> PortError:
    if error.errno == errno.EADDRINUSE:
        who = f"`ss -ltnp 'sport = :{port}'` names the program"
        text = f"{address} port {port} is in use ({who}); choose another --port"
        return PortError("port_in_use", text)
    if error.errno in (errno.EACCES, errno.EPERM):
        return PortError("port_denied", f"port {port} needs privileges; choose a --port above 1023")
    return PortError("address_unavailable", f"cannot listen on {address} port {port}: {error.strerror}")
