# SPDX-License-Identifier: Apache-2.0
"""The scale search against rounding, and against a grid of scales far finer than its own."""

from __future__ import annotations

import numpy as np
import pytest

from cecilia.errors import ModelFileError
from cecilia.formats.quant import dequantise, pack, quantise, unpack
from tools.convert.search import SEARCHED, search

LIMITS = {"q4_32": (-8, 7), "q8_32": (-127, 127)}


def sample(kind: str, rows: int = 64, cols: int = 128) -> np.ndarray:
    rng = np.random.default_rng(5)
    shape = (rows, cols)
    values = {
        "normal": lambda: rng.normal(0, 0.02, shape),
        "heavy tails": lambda: rng.standard_t(3, shape) * 0.02,
        "uniform": lambda: rng.uniform(-1, 1, shape),
        "one sided": lambda: rng.exponential(0.1, shape),
    }
    return values[kind]().astype(np.float32)


def weighted_error(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of every block, as the module defines it: f64 [blocks]."""
    x, y = (a.astype(np.float64).reshape(-1, 32) for a in (x, y))
    weights = np.abs(x) + np.sqrt((x * x).mean(axis=1, keepdims=True))
    return (weights * (x - y) ** 2).sum(axis=1)


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "uniform", "one sided"])
@pytest.mark.parametrize("fmt", SEARCHED)
def test_it_beats_rounding(fmt: str, kind: str) -> None:
    """Where one value of a block is far from all others, as heavy tails make it, there is least to choose."""
    x = sample(kind)
    gain = 0.98 if kind == "heavy tails" else 0.95
    ours = weighted_error(x, dequantise(search(x, fmt))).sum()
    assert ours < gain * weighted_error(x, dequantise(quantise(x, fmt))).sum()


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "one sided"])
@pytest.mark.parametrize("fmt", SEARCHED)
def test_a_far_finer_grid_finds_little_more(fmt: str, kind: str) -> None:
    x = sample(kind, rows=16)
    low, high = LIMITS[fmt]
    blocks = x.reshape(-1, 32).astype(np.float64)
    top = np.abs(blocks).max(axis=1, keepdims=True)
    best = np.full(len(blocks), np.inf)
    for factor in np.linspace(0.7, 1.3, 1201):
        for sign in (1, -1):
            d = sign * factor * top / -low
            rounded = np.clip(np.rint(blocks / d), low, high) * d
            best = np.minimum(best, weighted_error(blocks, rounded))
    assert (
        weighted_error(x, dequantise(search(x, fmt))).sum() < (1.06 if fmt == "q4_32" else 1.15) * best.sum()
    )


@pytest.mark.parametrize("fmt", SEARCHED)
def test_zeros_single_values_and_tiny_ones_stay_what_they_can_be(fmt: str) -> None:
    x = np.zeros((4, 32), np.float32)
    x[1, 7], x[2, :], x[3, 0] = -0.5, 1e-9, 3e-39
    found = dequantise(search(x, fmt))
    assert not found[0].any()
    np.testing.assert_allclose(found[1], x[1], rtol=2**-10)
    assert np.abs(found[2:] - x[2:]).max() <= 1e-9


@pytest.mark.parametrize("fmt", SEARCHED)
def test_what_is_found_fits_the_format(fmt: str) -> None:
    blocks = search(sample("heavy tails"), fmt)
    again = unpack(pack(blocks), fmt, blocks.rows, blocks.cols)
    np.testing.assert_array_equal(again.q, blocks.q)
    np.testing.assert_array_equal(again.d, blocks.d)
    quants = blocks.q.astype(int) - (8 if fmt == "q4_32" else 0)
    assert LIMITS[fmt][0] <= quants.min()
    assert quants.max() <= LIMITS[fmt][1]


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_values_without_a_scale_are_refused(value: float) -> None:
    x = np.ones((1, 32), np.float32)
    x[0, 3] = value
    with pytest.raises(ModelFileError, match="bad_weights"):
        search(x, "q8_32")
