# SPDX-License-Identifier: Apache-2.0
"""Log lines: always one line, always taken apart again."""

from __future__ import annotations

import json

import pytest

from server import log


def test_plain_values_stand_as_they_are() -> None:
    assert log.line("ready", address="http://127.0.0.1:1", seconds=1.23456, threads=4) == (
        "ready address=http://127.0.0.1:1 seconds=1.23 threads=4"
    )


@pytest.mark.parametrize("value", ["a b", "", "a\nb", "\x1b[31m", 'a"b', "a=b", "caf\u00e9", "\u2028"])
def test_other_values_are_quoted(value: str) -> None:
    line = log.line("x", v=value)
    assert len(line.splitlines()) == 1
    assert line.isascii()
    assert json.loads(line.removeprefix("x v=")) == value
