# SPDX-License-Identifier: Apache-2.0
"""Choosing the next token from logits: parameters, a counter-based random number per token, and the draw."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cecilia._kernels import sampling

_MASK32 = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen.

    `temperature` >= 0, `top_k` >= 0 (0: off), 0 <= `top_p` <= 1 (1: off); `seed` any 64-bit integer, signed
    or not. Temperature 0, top_k 1 and top_p 0 each mean greedy: the largest logit, the lowest id among
    equals. Otherwise top_k is applied to the logits first, then top_p to what is left.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0


class Sampler:
    """The sampler of one generation.

    The n-th draw uses the n-th number of the seed's sequence and nothing else, so `step`, the number of draws
    made, is its whole state: setting it resumes a generation. Greedy sampling draws nothing.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.step = 0
        self._ids: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._weights: npt.NDArray[np.float32] = np.empty(0, np.float32)

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        """Id of the next token for `logits` [V], C-contiguous f32.

        Raises CeciliaError `numeric_error` when a logit is NaN or +inf, or all are -inf.
        """
        params = self.params
        if params.greedy:
            return sampling.argmax(logits)
        if self._ids.size != logits.size:
            self._ids = np.empty(logits.size, np.int32)
            self._weights = np.empty(logits.size, np.float32)
        kept = sampling.keep(logits, params.temperature, params.top_k, params.top_p, self._ids, self._weights)
        token = int(self._ids[sampling.draw(self._weights, kept, uniform(params.seed, self.step))])
        self.step += 1
        return token


def uniform(seed: int, step: int) -> float:
    """The `step`-th number of a seed's sequence: in [0, 1), 53 random bits."""
    key = (seed & _MASK32, seed >> 32 & _MASK32)
    high, low, _, _ = philox4x32((step & _MASK32, step >> 32 & _MASK32, 0, 0), key)
    return ((high << 32 | low) >> 11) * 2.0**-53


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of Salmon, Moraes, Dror and Shaw (SC 2011): 128 random bits from a counter and a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0 = 0xD2511F53 * c0
        p1 = 0xCD9E8D57 * c2
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & _MASK32, p0 >> 32 ^ c3 ^ k1, p0 & _MASK32
        k0 = k0 + 0x9E3779B9 & _MASK32
        k1 = k1 + 0xBB67AE85 & _MASK32
    return c0, c1, c2, c3
