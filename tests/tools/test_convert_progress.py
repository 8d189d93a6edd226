# SPDX-License-Identifier: Apache-2.0
"""Progress on a terminal and elsewhere, with a clock that the test moves."""

from __future__ import annotations

import io

import pytest

from tools.convert.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("tools.convert.progress.time.monotonic", found)
    return found


def test_a_line_for_every_tenth_once_it_takes_long(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress("convert", 1000, stream) as progress:
        for step in range(40):
            clock.now += 0.5
            progress.advance(25, f"tensor{step}")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "convert:  10 %  tensor3"
    assert len(lines) == 11
    assert lines[-2:] == ["convert: 100 %  tensor39", "convert: done in 20.0 s"]


def test_a_quick_phase_is_one_line(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress("hash source", 2, stream) as progress:
        progress.advance(2)
        clock.now = 0.25
    assert stream.getvalue() == "hash source: done in 0.2 s\n"


def test_a_failed_phase_does_not_say_done(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress("convert", 10, stream)
    progress.__enter__()
    clock.now = 5.0
    progress.__exit__(ValueError, ValueError("broken"), None)
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar() -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    with Progress("convert", 10, stream) as progress:
        progress.advance(10, "last")
    assert stream.getvalue().startswith("\rconvert:   0%|")
    assert stream.getvalue().count("\n") == 1  # the bar is wiped, the time stays
