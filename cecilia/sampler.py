# SPDX-License-Identifier: Apache-2.0
"""Choosing the next token: parameters, penalties, a counter-based random number per token, the draw.

The steps, in llama.cpp's default order where both have them:

1. mask: tokens that are not allowed are out;
2. logit_bias: added to the logits;
3. repeat_penalty: logits of recent tokens, of prompt and answer alike, are divided by it (multiplied, when
   not positive), once however often the token occurs;
4. presence_penalty and frequency_penalty: taken off the logits of generated tokens, the first once, the
   second once per occurrence;
5. top_k, then top_p (of what top_k left), then min_p (relative to the likeliest), all at temperature 1;
6. temperature, and the draw.

Two things differ from llama.cpp: presence and frequency count the answer alone, as OpenAI defines them, and
ties are broken by the lowest id instead of by the order of a sort. DRY, XTC, typical and the like are not
there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cecilia._kernels import sampling
from cecilia.errors import UsageError

_MASK32 = 0xFFFF_FFFF

Logits = npt.NDArray[np.float32]

REPEAT_LAST_N = 64
"""How far back a repeat penalty reaches unless told otherwise, prompt included: llama.cpp's default."""

UNLIKELY = -9999.0
"""Stands for any log-probability below it: JSON has no minus infinity."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen; the defaults are greedy and change no logit.

    `temperature` >= 0, `top_k` >= 0 (0: off), 0 <= `top_p` <= 1 (1: off), 0 <= `min_p` <= 1 (0: off); `seed`
    any 64-bit integer, signed or not. Temperature 0, top_k 1 and top_p 0 each mean greedy: the largest logit,
    the lowest id among equals. `repeat_penalty` > 0 (1: off) reaches back `repeat_last_n` tokens (-1: all).
    `presence_penalty` and `frequency_penalty`: any finite number (0: off). `logit_bias`: (token id, what to
    add), each id once.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = REPEAT_LAST_N
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0


class Sampler:
    """The sampler of one generation, which follows `prompt`.

    The n-th draw uses the n-th number of the seed's sequence and nothing else. `step`, the number of draws
    made, and the tokens so far are the whole state: `accept` the tokens, set `step`, and a generation is
    resumed. Greedy sampling draws nothing.
    """

    def __init__(self, params: SamplingParams, prompt: Iterable[int] = ()) -> None:
        self.params = params
        self.step = 0
        self._ids: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._weights: Logits = np.empty(0, np.float32)
        self._reach = -math.log(params.min_p) if params.min_p > 0 else math.inf
        self._adjust = _Adjustment(params, prompt)

    def sample(self, logits: Logits, allowed: npt.NDArray[np.uint32] | None = None) -> int:
        """Id of the next token for `logits` [V], C-contiguous f32, which stay as they are; it is accepted.

        `allowed`: one bit per token, that of token i is bit i % 32 of word i // 32; None allows all.
        Raises CeciliaError `numeric_error` when a logit is NaN or +inf, or all are -inf or masked.
        """
        params = self.params
        logits = self._adjust(logits, allowed)
        if params.greedy:
            token = sampling.argmax(logits)
        else:
            kept = self._keep(logits, params.top_k, params.top_p, self._reach, params.temperature)
            place = sampling.draw(self._weights, kept, uniform(params.seed, self.step))
            token = int(self._ids[place])
            self.step += 1
        self.accept(token)
        return token

    def accept(self, token: int) -> None:
        """Count a token of the answer that was not sampled here: forced, or generated before a resumption."""
        self._adjust.accept(token)

    def logprobs(self, logits: Logits, token: int, top: int) -> list[tuple[int, float]]:
        """(id, natural log of its probability) of `token`, then of the `top` likeliest, likeliest first.

        The log-softmax, in f64, of the logits as the model gave them: no penalty, no temperature. Nothing is
        below UNLIKELY. Raises CeciliaError `numeric_error` as `sample` does.
        """
        kept = self._keep(logits, top, 1.0, math.inf, 1.0) if top else 0
        ids = self._ids[:kept]
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        largest = float(logits[sampling.argmax(logits)])
        normaliser = largest + math.log(float(np.exp(logits.astype(np.float64) - largest).sum()))
        return [(each, max(float(logits[each]) - normaliser, UNLIKELY)) for each in (token, *ids.tolist())]

    def _keep(self, logits: Logits, top_k: int, top_p: float, reach: float, temperature: float) -> int:
        if self._ids.size != logits.size:
            self._ids = np.empty(logits.size, np.int32)
            self._weights = np.empty(logits.size, np.float32)
        return sampling.keep(
            logits, self._ids, self._weights, top_k=top_k, top_p=top_p, reach=reach, temperature=temperature
        )


class _Adjustment:
    """What is done to the logits before the choice: mask, bias, penalties."""

    def __init__(self, params: SamplingParams, prompt: Iterable[int]) -> None:
        self._params = params
        self._bias_ids = np.array([token for token, _ in params.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in params.logit_bias], np.float32)
        repeats = params.repeat_penalty != 1
        window = params.repeat_last_n if repeats else 0
        self._recent = deque(prompt if repeats else (), maxlen=None if window < 0 else window)
        self._counting = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._counts: dict[int, int] = {}
        self._adjusted: Logits = np.empty(0, np.float32)

    def accept(self, token: int) -> None:
        self._recent.append(token)
        if self._counting:
            self._counts[token] = self._counts.get(token, 0) + 1

    def __call__(self, logits: Logits, allowed: npt.NDArray[np.uint32] | None) -> Logits:
        """`logits` themselves when nothing applies, or an adjusted copy that is valid until the next call."""
        if allowed is None and not (self._bias.size or self._recent or self._counts):
            return logits
        if self._adjusted.size != logits.size:
            self._adjusted = np.empty(logits.size, np.float32)
        adjusted = self._adjusted
        np.copyto(adjusted, logits)
        if allowed is not None:
            _mask(adjusted, allowed)
        adjusted[self._bias_ids] += self._bias
        self._penalise(adjusted)
        return adjusted

    def _penalise(self, logits: Logits) -> None:
        params = self._params
        if self._recent:
            ids = np.fromiter(self._recent, np.int64, len(self._recent))
            values = logits[ids]
            # An id that occurs twice is written twice, with the same value.
            logits[ids] = np.where(values > 0, values / params.repeat_penalty, values * params.repeat_penalty)
        if self._counts:
            ids = np.fromiter(self._counts, np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            logits[ids] -= counts * params.frequency_penalty + params.presence_penalty


def _mask(logits: Logits, allowed: npt.NDArray[np.uint32]) -> None:
    """Set the logits [V] whose bit in `allowed` is 0 to -inf."""
    if allowed.dtype != np.uint32 or allowed.size * 32 < logits.size:
        raise UsageError("invalid_mask", f"{allowed.size} words of {allowed.dtype} for {logits.size} logits")
    bits = np.unpackbits(allowed.view(np.uint8), count=logits.size, bitorder="little")
    np.copyto(logits, np.float32(-np.inf), where=bits == 0)


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
