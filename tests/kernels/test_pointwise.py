# SPDX-License-Identifier: Apache-2.0
"""Norm and activation kernels against float64; all instruction sets and thread counts give the same bytes."""

from __future__ import annotations

import numpy as np
import pytest

from cecilia._kernels import isa, threads
from cecilia._kernels.buffer import Activations, Matrix, Vector
from cecilia._kernels.linear import Linear, Weight
from cecilia._kernels.pointwise import rmsnorm, split_heads, swiglu
from cecilia.formats import quant

SIZES = [1, 15, 16, 17, 33, 576, 1535]
EPS = 1e-5


def matrix(data: np.ndarray) -> Matrix:
    m = Matrix(*data.shape)
    np.asarray(m)[:] = data
    return m


def identity(n: int, fmt: str) -> Linear:
    packed = quant.pack(quant.quantise(np.eye(n, dtype=np.float32), fmt)).view(np.uint8).reshape(-1)
    room = np.zeros(packed.size + 64, np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + packed.size] = packed
    return Linear([Weight(room[start : start + packed.size], fmt, n, n)])


def values(acts: Activations, fmt: str = "f32") -> np.ndarray:
    """The rows of activations, read through a layer that copies them."""
    y = Matrix(acts.rows, acts.cols)
    identity(acts.cols, fmt)(acts, acts.rows, y)
    return np.array(y)


def normed(x: np.ndarray, weight: np.ndarray, *, tokens: int, first: int = 0) -> np.ndarray:
    out = Activations(tokens, x.shape[1], ints=False)
    rmsnorm(matrix(x), Vector(weight), EPS, out, tokens, first=first)
    return values(out)


def gated(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    out = Activations(*gate.shape, ints=False)
    swiglu(matrix(np.concatenate([gate, up], 1)), out, len(gate))
    return values(out)


def random(rows: int, cols: int, scale: float = 1) -> np.ndarray:
    return (np.random.default_rng(cols).standard_normal((rows, cols)) * scale).astype(np.float32)


@pytest.mark.parametrize("name", isa.available())
@pytest.mark.parametrize("cols", SIZES)
@pytest.mark.parametrize("scale", [1e-6, 1, 1e6])
def test_rmsnorm(name: str, cols: int, scale: float) -> None:
    isa.use(name)
    x, weight = random(5, cols, scale), random(1, cols)[0]
    got = normed(x, weight, tokens=3, first=1)
    exact = x[1:4].astype(np.float64)
    want = exact / np.sqrt((exact**2).mean(1, keepdims=True) + np.float32(EPS)) * weight
    assert np.allclose(got, want, rtol=2e-6, atol=0)
    isa.use("scalar")
    assert normed(x, weight, tokens=3, first=1).tobytes() == got.tobytes()


@pytest.mark.parametrize("name", isa.available())
@pytest.mark.parametrize("cols", SIZES)
@pytest.mark.parametrize("scale", [1e-3, 1, 30])
def test_swiglu(name: str, cols: int, scale: float) -> None:
    isa.use(name)
    gate, up = random(4, cols, scale), random(4, cols)[::-1]
    got = gated(gate, up)
    exact = gate.astype(np.float64)
    want = exact / (1 + np.exp(-exact)) * up
    # Below -88.4 the exponential is taken as infinite, the result as zero.
    assert np.allclose(got, want, rtol=1e-6, atol=1e-35)
    isa.use("scalar")
    assert gated(gate, up).tobytes() == got.tobytes()


@pytest.mark.parametrize("name", isa.available())
def test_swiglu_far_out(name: str) -> None:
    isa.use(name)
    gate = np.array([[-3e38, -1000, -89, -0.0, 0, 89, 1000, 3e38]], np.float32)
    got = gated(gate, np.ones_like(gate))[0]
    assert not got[:5].any()
    assert got[5:].tolist() == gate[0, 5:].tolist()


@pytest.mark.parametrize("name", isa.available())
def test_zero_row_stays_zero(name: str) -> None:
    isa.use(name)
    zeros = np.zeros((2, 33), np.float32)
    assert not normed(zeros, np.ones(33, np.float32), tokens=2).any()
    assert not gated(zeros, zeros).any()


@pytest.mark.parametrize("name", isa.available())
def test_nan_is_not_hidden(name: str) -> None:
    isa.use(name)
    x = random(1, 40)
    x[0, 37] = np.nan
    assert np.isnan(normed(x, np.ones(40, np.float32), tokens=1)).all()
    assert np.isnan(gated(x, np.ones_like(x))).all()  # through the identity, one NaN reaches every column


@pytest.mark.parametrize("name", isa.available())
def test_any_thread_count(name: str) -> None:
    """Large enough that two threads are used."""
    isa.use(name)
    x, weight = random(64, 1536), random(1, 1536)[0]
    got = []
    for n in (1, 2):
        threads.set_threads(n)
        got.append(normed(x, weight, tokens=64).tobytes() + gated(x[:, :768], x[:, 768:]).tobytes())
    assert got[0] == got[1]


def test_rows_are_quantised() -> None:
    """With ints, out also holds int8 rows, equal to those of the same f32 values loaded."""
    x, weight = random(3, 64), random(1, 64)[0]
    for f32, write in (
        (normed(x, weight, tokens=3), lambda out: rmsnorm(matrix(x), Vector(weight), EPS, out, 3)),
        (gated(x, x), lambda out: swiglu(matrix(np.concatenate([x, x], 1)), out, 3)),
    ):
        out, loaded = Activations(3, 64, ints=True), Activations(3, 64, ints=True)
        write(out)
        loaded.load(f32)
        assert values(out, "q8_32").tobytes() == values(loaded, "q8_32").tobytes()


def test_wrong_shapes() -> None:
    x, out = Matrix(4, 32), Activations(3, 32, ints=False)
    weight = Vector(np.ones(32, np.float32))
    for norm, tokens, first in (
        (Vector(np.ones(31, np.float32)), 3, 0),
        (weight, 4, 0),
        (weight, 3, 2),
        (weight, -1, 0),
        (weight, 1, -1),
    ):
        with pytest.raises(ValueError, match=r"\d"):
            rmsnorm(x, norm, EPS, out, tokens, first=first)
    for bad in ((x, out, 3), (Matrix(4, 64), out, 4), (Matrix(2, 64), out, 3), (Matrix(4, 64), out, -1)):
        with pytest.raises(ValueError, match=r"\d"):
            swiglu(*bad)


def test_heads_split_into_rows() -> None:
    x = np.random.default_rng(3).standard_normal((5, 3 * 48)).astype(np.float32)
    out = Activations(3 * 4, 32, ints=True)
    split_heads(matrix(x), 4, out, heads=3)
    want = x[:4].reshape(4, 3, 48)[:, :, :32].transpose(1, 0, 2).reshape(12, 32)
    np.testing.assert_array_equal(values(out), want)
    with pytest.raises(ValueError, match="32 columns of each of 5 heads in 144"):
        split_heads(matrix(x), 4, out, heads=5)
    with pytest.raises(ValueError, match="3 x 5 rows of 5 into 12"):
        split_heads(matrix(x), 5, out, heads=3)
