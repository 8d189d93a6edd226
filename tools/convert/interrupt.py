# SPDX-License-Identifier: Apache-2.0
"""SIGTERM as an exception, so that a program told to stop cleans up as it does on Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class Terminated(BaseException):
    """SIGTERM arrived; not an Exception, so that nothing on the way out swallows it."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Within the body SIGTERM unwinds the main thread's stack."""

    def handler(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
