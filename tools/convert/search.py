# SPDX-License-Identifier: Apache-2.0
"""Quantise float weights better than rounding does: search each block's scale.

Rounding maps a block's largest value to the largest quant, though the other 31 values matter as much. Here
several scales are tried for each block; for each one's quants q, least squares gives the best scale
d = sum(w x q) / sum(w q^2), and the error it leaves is sum(w x^2) - sum(w x q)^2 / sum(w q^2). The scale with
the smallest error is taken and rounded to f16, and the values are rounded once more, by that scale.

The weights w = s + |x|, s the root mean square of the block, count large values more. The method is that of
ggml's make_qx_quants.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cecilia.formats.quant import BLOCK, Blocks, quantise

_PIECE_BLOCKS = 2048  # blocks searched at a time: their temporaries stay in the cache


@dataclass(frozen=True)
class _Range:
    """Quants from `low` to `high`; the value of largest magnitude is tried at each of `tops`."""

    low: int
    high: int
    tops: tuple[float, ...]


# q4_32 has one more quant below zero than above: the largest value goes there, whatever its sign. With q8_32
# nothing is to be gained by clipping, only by the place of the grid.
SEARCHED = {
    "q4_32": _Range(-8, 7, tuple(-8 + 0.1 * step for step in range(-9, 10))),
    "q8_32": _Range(-127, 127, tuple(-127 + 0.5 * step for step in range(-6, 7))),
}


def search(weights: np.ndarray, fmt: str) -> Blocks:
    """f32 [R, K] as blocks of `fmt`, one of SEARCHED. Raises ModelFileError as `quantise` does."""
    blocks = quantise(weights, fmt)  # checks the weights, and has the right shapes
    assert blocks.d is not None
    x = np.ascontiguousarray(weights, np.float32).reshape(-1, BLOCK)
    q, d = blocks.q.reshape(-1, BLOCK), blocks.d.reshape(-1)
    offset = 8 if fmt == "q4_32" else 0
    for start in range(0, len(x), _PIECE_BLOCKS):
        piece = slice(start, start + _PIECE_BLOCKS)
        quants, scales = _best(x[piece], SEARCHED[fmt])
        usable = np.isfinite(scales) & (scales != 0)  # else what rounding gave stays
        d[piece] = np.where(usable, scales, d[piece])
        q[piece] = np.where(usable[:, None], quants + offset, q[piece])
    return blocks


def _best(x: np.ndarray, r: _Range) -> tuple[np.ndarray, np.ndarray]:
    """Quants [B, 32] and f16 scales [B] of blocks x [B, 32]; a block of zeros has scale 0."""
    importance = _importance(x)
    wx = importance * x
    top = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    inverse = np.divide(1, top, out=np.zeros_like(top), where=np.abs(top) > np.finfo(np.float32).tiny)
    gain, scale = np.zeros(len(x), np.float32), np.zeros(len(x), np.float32)
    for at in r.tops:
        q = _rounded(x * (inverse * np.float32(at)), r)
        xq = np.einsum("bk,bk->b", wx, q)
        qq = np.einsum("bk,bk,bk->b", importance, q, q)
        ratio = np.divide(xq, qq, out=np.zeros_like(xq), where=qq > 0)
        better = xq * ratio > gain
        gain[better], scale[better] = (xq * ratio)[better], ratio[better]
    with np.errstate(over="ignore"):
        half = scale.astype(np.float16)
    wide = half.astype(np.float32)[:, None]
    inverse = np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)
    return _rounded(x * inverse, r), half


def _importance(x: np.ndarray) -> np.ndarray:
    """The weight w of every value of blocks x [B, 32]."""
    return np.abs(x) + np.sqrt(np.square(x).mean(axis=1, keepdims=True))


def _rounded(x: np.ndarray, r: _Range) -> np.ndarray:
    np.rint(x, out=x)
    return np.clip(x, r.low, r.high, out=x)
