# SPDX-License-Identifier: Apache-2.0
"""The clock that deadlines are measured on. An asyncio event loop is one; tests bring their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A pending call."""

    def cancel(self) -> None:
        """Make the call not happen."""


class Clock(Protocol):
    """Monotonic seconds and calls at a later time. Never the wall clock: boards boot in 1970."""

    def time(self) -> float:
        """Seconds since some fixed moment."""

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Timer:
        """Call `callback` in `delay` seconds."""
