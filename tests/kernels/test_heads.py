# SPDX-License-Identifier: Apache-2.0
"""Norms of single heads and biases, against numpy in f64, on every instruction set and on two threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cecilia._kernels import isa, threads
from cecilia._kernels.buffer import Matrix, Vector
from cecilia._kernels.pointwise import add_bias, rmsnorm_heads

ROWS, COLS = 9, 176


@pytest.fixture(params=isa.available(), autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    before = isa.name()
    isa.use(request.param)
    yield
    isa.use(before)
    threads.set_threads(1)


def filled(seed: int) -> tuple[Matrix, np.ndarray]:
    """A matrix of normal values, one row of it zero, and a copy of them."""
    matrix = Matrix(ROWS, COLS)
    view = np.asarray(matrix)
    view[:] = np.random.default_rng(seed).standard_normal((ROWS, COLS))
    view[3] = 0
    return matrix, view.copy()


@pytest.mark.parametrize(("width", "first", "heads"), [(16, 0, 11), (16, 3, 2), (48, 1, 2), (176, 0, 1)])
def test_only_the_named_heads_are_normed(width: int, first: int, heads: int) -> None:
    weight = np.random.default_rng(1).uniform(0.5, 1.5, width).astype(np.float32)
    tokens, eps = ROWS - 1, 1e-6
    x, before = filled(2)
    rmsnorm_heads(x, Vector(weight), eps, tokens, first=first, heads=heads)
    want = before.astype(np.float64)
    part = want[:tokens, first * width : (first + heads) * width].reshape(tokens, heads, width)
    part = part / np.sqrt((part**2).mean(axis=-1, keepdims=True) + eps) * weight
    want[:tokens, first * width : (first + heads) * width] = part.reshape(tokens, -1)
    np.testing.assert_allclose(np.asarray(x), want, atol=2e-6, rtol=0)
    untouched = np.ones_like(before, bool)
    untouched[:tokens, first * width : (first + heads) * width] = False
    np.testing.assert_array_equal(np.asarray(x)[untouched], before[untouched])

    again, _ = filled(2)
    threads.set_threads(2)
    rmsnorm_heads(again, Vector(weight), eps, tokens, first=first, heads=heads)
    assert np.asarray(again).tobytes() == np.asarray(x).tobytes()


@pytest.mark.parametrize("size", [1, 33, COLS])
def test_a_bias_is_one_float_addition(size: int) -> None:
    bias = np.random.default_rng(3).standard_normal(size).astype(np.float32)
    x, before = filled(4)
    add_bias(x, Vector(bias), ROWS - 2)
    before[: ROWS - 2, :size] += bias
    np.testing.assert_array_equal(np.asarray(x), before)


def test_what_does_not_fit_is_refused() -> None:
    x, weight = Matrix(2, 64), Vector(np.ones(16, np.float32))
    for tokens, first, heads in ((3, 0, 1), (-1, 0, 1), (1, -1, 1), (1, 0, 0), (1, 2, 3)):
        with pytest.raises(ValueError, match="heads"):
            rmsnorm_heads(x, weight, 1e-6, tokens, first=first, heads=heads)
    for tokens, size in ((3, 16), (-1, 16), (1, 65)):
        with pytest.raises(ValueError, match="a bias of"):
            add_bias(x, Vector(np.ones(size, np.float32)), tokens)
