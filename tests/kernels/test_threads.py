# SPDX-License-Identifier: Apache-2.0
"""When threads are given up to other processes and asked back; times are given, nothing waits."""

from __future__ import annotations

import pytest

from cecilia._kernels.threads import MOST, Crew, set_threads
from cecilia.errors import UsageError

MS = 1_000_000
WINDOW = 5 * MS
GOOD, BAD = 70, 69  # percent of a window on a core: 30 % may be lost


class Clock:
    """Windows one after another."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.now = 0

    def window(self, percent: int) -> int:
        self.now += WINDOW
        self.crew.judge(self.now, WINDOW, WINDOW * percent // 100)
        return self.crew.size

    def until_return(self) -> int:
        """Nanoseconds until a thread is asked back, at one undisturbed window after another."""
        start, size = self.now, self.crew.size
        while self.window(100) == size:
            pass
        return self.now - start


def test_undisturbed_all_threads_are_used() -> None:
    clock = Clock(Crew(4))
    assert [clock.window(GOOD) for _ in range(3)] == [4, 4, 4]


def test_lost_windows_cost_a_thread_each_but_never_the_last() -> None:
    clock = Clock(Crew(3))
    assert [clock.window(BAD) for _ in range(4)] == [2, 1, 1, 1]


def test_a_thread_is_asked_back_after_a_pause_that_doubles_when_it_was_too_early() -> None:
    clock = Clock(Crew(2))
    pauses = []
    for _ in range(9):
        assert clock.window(BAD) == 1
        pauses.append(clock.until_return() // MS)
        assert clock.crew.size == 2
    assert pauses == [50, 100, 200, 400, 800, 1600, 3200, 3200, 3200]


def test_the_pause_is_short_again_after_a_good_return() -> None:
    clock = Clock(Crew(2))
    clock.window(BAD)
    clock.until_return()
    clock.window(BAD)
    assert clock.until_return() == 100 * MS
    assert clock.window(GOOD) == 2
    assert clock.window(BAD) == 1
    assert clock.until_return() == 50 * MS


def test_threads_come_back_one_by_one() -> None:
    clock = Clock(Crew(3))
    clock.window(BAD)
    clock.window(BAD)
    clock.until_return()
    assert clock.crew.size == 2
    assert clock.window(GOOD) == 3


@pytest.mark.parametrize("n", [0, -1, MOST + 1])
def test_numbers_of_threads_that_cannot_be(n: int) -> None:
    with pytest.raises(UsageError, match=f"1 to {MOST}, not {n}"):
        set_threads(n)
