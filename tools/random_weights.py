# SPDX-License-Identifier: Apache-2.0
"""Random weights for every kind of tensor, scaled to keep the size of what passes, in a file's own bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cecilia.formats.l3r_layout import PlannedTensor
from cecilia.formats.quant import BLOCK, FORMATS, TILE, Blocks, pack, quantise

Array = np.ndarray[Any, Any]
Draw = Callable[[np.random.Generator, int], Array]

# Vectors by the end of their name, the first that fits. Those of Ling-3.0 are spread as in its checkpoints,
# wide enough for a fault in any of them to show.
_LING3: tuple[tuple[str, Draw], ...] = (
    ("norm.weight", lambda rng, n: 1 + 0.1 * rng.standard_normal(n)),
    ("conv1d.weight", lambda rng, n: 0.5 * rng.standard_normal(n)),
    (".A", lambda rng, n: 0.2 * rng.uniform(1, 16, n)),
    (".dt_bias", lambda rng, n: 0.5 * rng.standard_normal(n) - 1),
    (".expert_bias", lambda rng, n: 0.2 * rng.standard_normal(n)),
)
_DENSE: tuple[tuple[str, Draw], ...] = (
    ("norm.weight", lambda rng, n: rng.uniform(0.5, 1.5, n)),
    (".bias", lambda rng, n: rng.uniform(-0.5, 0.5, n)),
)

# A head's key matrix and, right behind it, each head's part transposed: the same numbers, not other ones.
_KEYS, _KEYS_TURNED = ".k_b_proj.weight", ".k_b_proj_t.weight"

_SLAB_VALUES = 1 << 21  # a matrix is made in slabs of whole tiles of about this many values
# Of quants that are all equally likely: d * their root mean square is the size of the weights.
_UNIFORM = {"q8_32": 73.9, "q4_32": 4.637, "q4a_32": 4.610}


class RandomWeights:
    """The tensors of one model, to be asked for in the order of the file. The same seed gives the same.

    `noise`: quantised matrices are not rounded from normally distributed numbers but are random bits with
    random scales, which takes a tenth of the time.
    """

    def __init__(self, architecture: str, seed: int, *, noise: bool = False) -> None:
        self._rng = np.random.default_rng(seed)
        self._vectors = _LING3 if architecture == "ling3" else _DENSE
        self._noise = noise
        self._keys = np.empty((0, 0), np.float32)

    def parts(self, tensor: PlannedTensor) -> Iterator[Array]:
        """The bytes of a tensor, piece by piece."""
        if tensor.rank == 1:
            yield self._vector(tensor)
        elif tensor.name.endswith(_KEYS_TURNED):
            yield pack(quantise(_turned(self._keys, tensor.cols), tensor.format))
        elif tensor.name.endswith(_KEYS):
            self._keys = self._values(tensor.rows, tensor.cols)
            yield pack(quantise(self._keys, tensor.format))
        else:
            make = self._bits if self._noise and FORMATS[tensor.format].scales else self._rounded
            slab = max(_SLAB_VALUES // tensor.cols // TILE, 1) * TILE
            for start in range(0, tensor.rows, slab):
                yield pack(make(tensor.format, min(slab, tensor.rows - start), tensor.cols))

    def _vector(self, tensor: PlannedTensor) -> Array:
        draw = next(draw for end, draw in self._vectors if tensor.name.endswith(end))
        return draw(self._rng, tensor.cols).astype(np.float32)

    def _values(self, rows: int, cols: int) -> Array:
        values = self._rng.standard_normal((rows, cols), np.float32)
        values *= np.float32(cols**-0.5)
        return values

    def _rounded(self, fmt: str, rows: int, cols: int) -> Blocks:
        return quantise(self._values(rows, cols), fmt)

    def _bits(self, fmt: str, rows: int, cols: int) -> Blocks:
        """Quants that are all equally likely; scales of both signs, so that the mean weight is zero."""
        rng = self._rng
        bits = rng.integers(0, 1 << 64, rows * cols // 8, np.uint64).view(np.uint8).reshape(rows, cols)
        q = bits.view(np.int8) if fmt == "q8_32" else bits & np.uint8(15)
        d = rng.uniform(0.9, 1.1, (rows, cols // BLOCK)) * (cols**-0.5 / _UNIFORM[fmt])
        d = np.copysign(d, rng.random(d.shape) - 0.5).astype("<f2")
        m = (-7.5 * d.astype(np.float32)).astype("<f2") if fmt == "q4a_32" else None
        return Blocks(fmt, rows, cols, q, d, m)


def _turned(keys: Array, per_head: int) -> Array:
    """Each head's matrix of [H * per_head, R] transposed: [H * R, per_head]."""
    heads = keys.reshape(-1, per_head, keys.shape[1])
    return np.ascontiguousarray(heads.transpose(0, 2, 1)).reshape(-1, per_head)
