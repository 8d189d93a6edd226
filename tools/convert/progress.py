# SPDX-License-Identifier: Apache-2.0
"""Progress of one long phase: a bar on a terminal, elsewhere a line for every tenth of the way."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self, TextIO

QUIET_SECONDS = 1.0


class Progress:
    """Counts bytes of `total`; use as a context manager, which prints the seconds the phase took.

    A phase that ends within `QUIET_SECONDS` prints only that.
    """

    def __init__(self, phase: str, total: int, stream: TextIO | None = None) -> None:
        self._phase = phase
        self._total = max(total, 1)
        self._stream = stream or sys.stderr
        self._done = 0
        self._tenths = 0
        self._bar: Any = None

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        if self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._total, desc=self._phase, unit="B", unit_scale=True, file=self._stream, leave=False
            )
        return self

    def advance(self, count: int, label: str = "") -> None:
        """`count` more bytes are done; `label` says what they belong to."""
        self._done += count
        if self._bar is not None:
            self._bar.set_postfix_str(label, refresh=False)
            self._bar.update(count)
            return
        tenths = min(self._done, self._total) * 10 // self._total
        if tenths > self._tenths and time.monotonic() - self._start >= QUIET_SECONDS:
            self._tenths = tenths
            self._say(f"{tenths * 10:3d} %  {label}".rstrip())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if kind is None:
            self._say(f"done in {time.monotonic() - self._start:.1f} s")

    def _say(self, text: str) -> None:
        print(f"{self._phase}: {text}", file=self._stream, flush=True)
