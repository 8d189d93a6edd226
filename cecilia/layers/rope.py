# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: the angles of a run of positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cecilia._kernels.buffer import Matrix

SLOW, FAST = 1, 32  # turns within the native window: pairs below are stretched, those above are not


@dataclass(frozen=True, slots=True)
class Yarn:
    """A window `factor` times the native one of `context` tokens (YaRN, arXiv 2309.00071), everywhere."""

    factor: float
    context: int

    @property
    def attention(self) -> float:
        """What cos and sin are multiplied by."""
        return 0.1 * math.log(self.factor) + 1

    def stretch(self, frequencies: NDArray[np.float64], base: float) -> NDArray[np.float64]:
        """The frequencies f64 [D/2] of the longer window."""
        pairs = len(frequencies)

        def pair_of(turns: float) -> float:
            return pairs * math.log(self.context / (2 * math.pi * turns)) / math.log(base)

        low, high = max(math.floor(pair_of(FAST)), 0), min(math.ceil(pair_of(SLOW)), 2 * pairs - 1)
        ramp = np.clip((np.arange(pairs) - low) / max(high - low, 0.001), 0, 1)
        return frequencies * (1 - ramp) + frequencies / self.factor * ramp


class Rope:
    """cos and sin, f32 [T, D/2], of position * base ** (-2 i / D): computed in float64, rounded once."""

    def __init__(self, head_dim: int, base: float, tokens: int, *, yarn: Yarn | None = None) -> None:
        self.cos = Matrix(tokens, head_dim // 2)
        self.sin = Matrix(tokens, head_dim // 2)
        self._cos = np.asarray(self.cos)
        self._sin = np.asarray(self.sin)
        self._frequencies = base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        self._factor = 1.0
        if yarn is not None:
            self._frequencies = yarn.stretch(self._frequencies, base)
            self._factor = yarn.attention

    def fill(self, first: int, tokens: int) -> None:
        """Make row t hold the angles of position first + t, for t < tokens."""
        positions = np.arange(first, first + tokens, dtype=np.float64)
        angles = positions[:, None] * self._frequencies  # [T, D/2]
        self._cos[:tokens] = self._factor * np.cos(angles)
        self._sin[:tokens] = self._factor * np.sin(angles)
