# SPDX-License-Identifier: Apache-2.0
"""When a long prompt counts as taken; no speed is asserted."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tools.bench import long_prompt
from tools.soak import SoakError


@pytest.fixture
def server() -> Iterator[Any]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield SimpleNamespace(address=found.getsockname(), log=["request_refused\n"])


def test_a_prompt_is_taken_once_its_generation_is_there(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = [{}, {}, {"generation": {"prompt_left": 0, "completion": 0}}, {}]
    monkeypatch.setattr(long_prompt, "health", lambda _: told.pop(0))
    long_prompt.ask(server, 8, seed=1).close()
    assert told == [{}]


def test_a_prompt_that_is_not_taken_is_told_with_the_log(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_prompt, "health", lambda _: {})
    monkeypatch.setattr(long_prompt, "PATIENCE", 0.0)
    with pytest.raises(SoakError, match="did not take the prompt: request_refused"):
        long_prompt.ask(server, 8, seed=1)


def test_memory_is_told_beyond_what_is_kept() -> None:
    mib = 1 << 20
    samples = [long_prompt.Sample(8.0 * i, 100 * i, (500 + 7 * i) * mib, 5 * i * mib) for i in (4, 8)]
    assert long_prompt.table(samples, 800, 490 * mib)[2:] == [
        "| 400 | 32.0 | 12.5 | 528 | 20 | 18 |",
        "| 800 | 64.0 | 12.5 | 556 | 40 | 26 |",
    ]
