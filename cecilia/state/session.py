# SPDX-License-Identifier: Apache-2.0
"""A session: one timeline of evaluated tokens and the state that belongs to exactly these tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cecilia._kernels.buffer import Fixed
from cecilia._kernels.threads import begin_step
from cecilia.state.pages import PagePool, PageTable
from cecilia.state.state import State


class Forward(Protocol):
    """What a session needs of a model."""

    def forward(
        self, tokens: Sequence[int], state: State, first: int, *, last_only: bool
    ) -> NDArray[np.float32]: ...


class Session:
    """`tokens` are those whose state is held, at positions 0, 1, 2 ...

    An error leaves them as they were; with `state_bytes`, a state of fixed size that cannot be taken back, an
    error in the model leaves none.
    """

    def __init__(self, model: Forward, pool: PagePool, state_bytes: int = 0) -> None:
        self.tokens: list[int] = []
        self._model = model
        self._pages = PageTable(pool)
        self._state = State(self._pages.pages, Fixed(state_bytes))

    def reusable(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` need not be evaluated again. Never the last one: its logits are wanted."""
        common = 0
        for held, wanted in zip(self.tokens, tokens[:-1], strict=False):
            if held != wanted:
                break
            common += 1
        if self._state.fixed.nbytes and common < len(self.tokens):
            return 0
        return self._pages.reusable(common, len(self.tokens))

    def sync(self, tokens: Sequence[int]) -> int:
        """Forget what does not belong to `tokens`; return how many are held. The rest is to be evaluated."""
        reused = self.reusable(tokens)
        self._truncate(reused)
        return reused

    def evaluate(self, tokens: Sequence[int], *, last_only: bool = True) -> NDArray[np.float32]:
        """Append `tokens` [T]; logits f32 [T, V], or [1, V] with `last_only`, valid until the next call.

        Raises MemoryLimitError `insufficient_memory`.
        """
        first = len(self.tokens)
        self._pages.reserve(first + len(tokens))
        begin_step()
        try:
            logits = self._model.forward(tokens, self._state, first, last_only=last_only)
        except BaseException:
            self._truncate(0 if self._state.fixed.nbytes else first)
            raise
        self.tokens.extend(tokens)
        return logits

    def clear(self) -> None:
        """Forget everything and return the memory to the pool."""
        self._truncate(0)

    def _truncate(self, count: int) -> None:
        if count == 0:
            self._state.fixed.clear()
        del self.tokens[count:]
        self._pages.truncate(count)
