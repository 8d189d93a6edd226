# SPDX-License-Identifier: Apache-2.0
"""From the residual stream to logits: the last norm and the head."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cecilia._kernels.buffer import Activations, Matrix, Vector
from cecilia._kernels.linear import Linear
from cecilia._kernels.pointwise import rmsnorm

# Tokens whose logits are computed together: V is large, so they are never all held for a chunk.
ROWS = 16


class Head:
    """logits [T, V] = rmsnorm(x) W, where W has V rows; for models of at most `chunk` tokens a call."""

    def __init__(self, norm: Vector, linear: Linear, eps: float, *, chunk: int) -> None:
        rows = min(chunk, ROWS)
        self._norm, self._linear, self._eps = norm, linear, eps
        self._last = Activations(rows, linear.cols, ints=linear.ints)
        self._logits = Matrix(rows, linear.rows)
        self._view = np.asarray(self._logits)

    def __call__(self, x: Matrix, tokens: int, *, last_only: bool) -> NDArray[np.float32]:
        """Logits f32 [T, V] of the first `tokens` rows; `last_only`: [1, V], valid until the next call."""
        if last_only:
            return self._part(x, tokens - 1, tokens)
        logits = np.empty((tokens, self._logits.cols), np.float32)
        for first in range(0, tokens, self._last.rows):
            end = min(first + self._last.rows, tokens)
            logits[first:end] = self._part(x, first, end)
        return logits

    def _part(self, x: Matrix, first: int, end: int) -> NDArray[np.float32]:
        """Logits of rows first .. end of x, at most ROWS: a view."""
        rmsnorm(x, self._norm, self._eps, self._last, end - first, first=first)
        self._linear(self._last, end - first, self._logits)
        return self._view[: end - first]
