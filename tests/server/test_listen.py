# SPDX-License-Identifier: Apache-2.0
"""Binding the address, and saying why it cannot be had."""

from __future__ import annotations

import errno
import socket
from unittest import mock

import pytest

from cecilia.errors import PortError
from server import listen


def refusal(host: str, port: int) -> PortError:
    with pytest.raises(PortError) as caught:
        listen.bind(host, port)
    assert caught.value.exit_code == 5
    return caught.value


def test_a_free_port_is_found_and_told() -> None:
    (opened,) = listen.bind("127.0.0.1", 0)
    with opened:
        port = opened.getsockname()[1]
        assert listen.url([opened]) == f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        assert refusal("127.0.0.1", port).code == "port_in_use"


def test_every_address_of_a_name_gets_the_same_port() -> None:
    opened = listen.bind("localhost", 0)
    assert len({each.getsockname()[1] for each in opened}) == 1
    for each in opened:
        each.close()


def test_a_version_6_address_stands_in_brackets() -> None:
    opened = mock.Mock(getsockname=lambda: ("::1", 9091, 0, 0))
    assert listen.url([opened]) == "http://[::1]:9091"


@pytest.mark.parametrize("host", ["no such host", "256.1.1.1", "a" * 70, "192.0.2.1"])
def test_foreign_addresses(host: str) -> None:
    """192.0.2.0/24 is for documentation (RFC 5737): no machine has it."""
    assert refusal(host, 0).code == "address_unavailable"


def test_a_privileged_port() -> None:
    with mock.patch.object(socket.socket, "bind", side_effect=OSError(errno.EACCES, "no")):
        assert refusal("127.0.0.1", 80).code == "port_denied"
