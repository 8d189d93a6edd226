# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: the angles of a run of positions."""

from __future__ import annotations

import numpy as np

from cecilia._kernels.buffer import Matrix


class Rope:
    """cos and sin, f32 [T, D/2], of position * base ** (-2 i / D): computed in float64, rounded once."""

    def __init__(self, head_dim: int, base: float, tokens: int) -> None:
        self.cos = Matrix(tokens, head_dim // 2)
        self.sin = Matrix(tokens, head_dim // 2)
        self._cos = np.asarray(self.cos)
        self._sin = np.asarray(self.sin)
        self._frequencies = base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)

    def fill(self, first: int, tokens: int) -> None:
        """Make row t hold the angles of position first + t, for t < tokens."""
        positions = np.arange(first, first + tokens, dtype=np.float64)
        angles = positions[:, None] * self._frequencies  # [T, D/2]
        self._cos[:tokens] = np.cos(angles)
        self._sin[:tokens] = np.sin(angles)
