# SPDX-License-Identifier: Apache-2.0
"""Linear kernels: each instruction set against float64, and byte for byte against scalar."""

from __future__ import annotations

import numpy as np
import pytest

from cecilia._kernels import isa, threads
from cecilia._kernels.buffer import Activations, Matrix
from cecilia._kernels.linear import Linear, Weight
from cecilia.formats import quant

INTEGER = ("q8_32", "q4_32", "q4a_32")
FLOAT = ("f32", "bf16")
SHAPES = [(16, 32), (1, 64), (37, 96), (64, 608), (24, 1536)]


def aligned(data: np.ndarray) -> np.ndarray:
    room = np.zeros(data.size + 64, np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + data.size] = data.reshape(-1).view(np.uint8)
    return room[start : start + data.size]


def weight(rng: np.random.Generator, fmt: str, rows: int, cols: int) -> tuple[Weight, np.ndarray]:
    """A random weight and its exact float64 values."""
    blocks = quant.quantise(rng.standard_normal((rows, cols)).astype(np.float32), fmt)
    exact = quant.dequantise(blocks).astype(np.float64)
    return Weight(aligned(quant.pack(blocks)), fmt, rows, cols), exact


def apply(linear: Linear, x: np.ndarray, *, start: np.ndarray | None = None) -> np.ndarray:
    acts = Activations(len(x), linear.cols, ints=linear.ints)
    acts.load(np.ascontiguousarray(x))
    y = Matrix(len(x), linear.rows)
    if start is not None:
        np.asarray(y)[:] = start
    linear(acts, len(x), y, add=start is not None)
    return np.array(y)


def quantised(x: np.ndarray) -> np.ndarray:
    """What int8 activations stand for, by their definition, in float64."""
    blocks = x.reshape(len(x), -1, 32)
    top = np.abs(blocks).max(-1, keepdims=True).astype(np.float32)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    q = np.clip(np.rint(blocks * inverse), -127, 127)
    return (q.astype(np.float64) * (top / np.float32(127)).astype(np.float64)).reshape(x.shape)


@pytest.mark.parametrize("name", isa.available())
@pytest.mark.parametrize("fmt", INTEGER + FLOAT)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_product_is_that_of_the_dequantised_operands(name: str, fmt: str, rows: int, cols: int) -> None:
    rng = np.random.default_rng(rows * cols)
    isa.use(name)
    w, exact = weight(rng, fmt, rows, cols)
    x = rng.standard_normal((18, cols)).astype(np.float32)
    x[1] = 0
    x[2] *= 1e4
    want = (quantised(x) if fmt in INTEGER else x.astype(np.float64)) @ exact.T
    scale = np.abs(quantised(x)) @ np.abs(exact).T + 1e-30
    got = apply(Linear([w]), x)
    assert (np.abs(got - want) / scale).max() < 4e-7 * np.sqrt(cols)
    assert not got[1].any()


@pytest.mark.parametrize("fmt", INTEGER)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_integer_formats_give_the_bytes_of_scalar(fmt: str, rows: int, cols: int) -> None:
    rng = np.random.default_rng(7)
    w, _ = weight(rng, fmt, rows, cols)
    for tokens in (1, 15, 16, 21, 33):  # around the groups that kernels make
        x = rng.standard_normal((tokens, cols)).astype(np.float32) * 3
        results = {}
        for name in isa.available():
            isa.use(name)
            results[name] = apply(Linear([w]), x).tobytes()
        assert len(set(results.values())) == 1, (tokens, sorted(results))


@pytest.mark.parametrize("fmt", INTEGER)
@pytest.mark.parametrize("name", isa.available())
def test_extreme_quants_do_not_saturate(fmt: str, name: str) -> None:
    """Every weight and activation at its limit, signs alternating and equal: the sums are still exact."""
    isa.use(name)
    rows, cols = 16, 64
    top = {"q8_32": -128, "q4_32": 15, "q4a_32": 15}[fmt]
    q = np.full((rows, cols), top, np.int8 if fmt == "q8_32" else np.uint8)
    ones = np.ones((rows, cols // 32), np.float16)
    blocks = quant.Blocks(fmt, rows, cols, q, ones, ones if fmt == "q4a_32" else None)
    linear = Linear([Weight(aligned(quant.pack(blocks)), fmt, rows, cols)])
    x = np.full((20, cols), 127, np.float32)
    x[1::2] = -127
    value = {"q8_32": -128, "q4_32": 7, "q4a_32": 16}[fmt]
    want = (x[:, :1] * value * cols).repeat(rows, 1)
    np.testing.assert_array_equal(apply(linear, x), want)


@pytest.mark.parametrize("fmt", INTEGER + FLOAT)
@pytest.mark.parametrize("name", isa.available())
def test_bytes_do_not_depend_on_batch_or_threads(fmt: str, name: str) -> None:
    isa.use(name)
    rng = np.random.default_rng(3)
    linear = Linear([weight(rng, fmt, rows, 608)[0] for rows in (40, 3000, 16)])
    x = rng.standard_normal((29, 608)).astype(np.float32)
    whole = apply(linear, x)
    for step in (1, 2, 7, 13):
        parts = [apply(linear, x[t : t + step]) for t in range(0, len(x), step)]
        assert np.concatenate(parts).tobytes() == whole.tobytes(), step
    threads.set_threads(2)
    assert apply(linear, x).tobytes() == whole.tobytes()


@pytest.mark.parametrize("fmt", INTEGER + FLOAT)
@pytest.mark.parametrize("name", isa.available())
def test_weights_are_stacked_and_added(fmt: str, name: str) -> None:
    isa.use(name)
    rng = np.random.default_rng(4)
    weights = [weight(rng, fmt, rows, 96)[0] for rows in (5, 48, 17)]
    x = rng.standard_normal((21, 96)).astype(np.float32)
    alone = np.concatenate([apply(Linear([w]), x) for w in weights], axis=1)
    np.testing.assert_array_equal(apply(Linear(weights), x), alone)
    start = rng.standard_normal(alone.shape).astype(np.float32)
    np.testing.assert_array_equal(apply(Linear(weights), x, start=start), start + alone)


@pytest.mark.parametrize("fmt", INTEGER + FLOAT)
def test_gather_returns_the_dequantised_rows(fmt: str) -> None:
    rng = np.random.default_rng(5)
    w, exact = weight(rng, fmt, 50, 64)
    out = Matrix(4, 64)
    w.gather([49, 0, 16, 49], out)
    np.testing.assert_array_equal(np.asarray(out), exact[[49, 0, 16, 49]].astype(np.float32))
    with pytest.raises(IndexError, match="row 50 of 50"):
        w.gather([50], out)
    with pytest.raises(IndexError, match="row -1 of 50"):
        w.gather([-1], out)


@pytest.mark.parametrize("name", isa.available())
def test_vanishing_activations_count_as_zeros(name: str) -> None:
    """The factor 127 / max would overflow f32 and turn the zeros beside them into the largest value."""
    isa.use(name)
    w, exact = weight(np.random.default_rng(9), "q8_32", 16, 64)
    for top in (1e-29, 1e-31, 1e-38, 1e-45):
        x = np.zeros((1, 64), np.float32)
        x[0, 5] = top
        want = exact[:, 5] * float(x[0, 5]) if top > 1e-30 else np.zeros(16)
        np.testing.assert_allclose(apply(Linear([w]), x)[0], want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", isa.available())
def test_non_finite_activations_are_never_hidden(bad: float, name: str) -> None:
    isa.use(name)
    w, _ = weight(np.random.default_rng(6), "q8_32", 16, 64)
    x = np.ones((1, 64), np.float32)
    x[0, 33] = bad
    assert not np.isfinite(apply(Linear([w]), x)).any()


def test_shapes_that_do_not_fit_are_refused() -> None:
    rng = np.random.default_rng(8)
    w, _ = weight(rng, "q8_32", 16, 64)
    linear = Linear([w])
    acts = Activations(2, 64, ints=True)
    with pytest.raises(ValueError, match="3 tokens"):
        linear(acts, 3, Matrix(4, 16))
    with pytest.raises(ValueError, match="into 1 x 16"):
        linear(acts, 2, Matrix(1, 16))
    with pytest.raises(ValueError, match="quantised activations"):
        linear(Activations(1, 64, ints=False), 1, Matrix(1, 16))
    with pytest.raises(ValueError, match="64 and 96 columns"):
        Linear([w, weight(rng, "q8_32", 16, 96)[0]])
    with pytest.raises(ValueError, match="not 64-byte aligned"):
        Weight(aligned(np.zeros(1088 + 64, np.uint8))[32 : 32 + 1088], "q8_32", 16, 64)
    with pytest.raises(ValueError, match="which takes 1088"):
        Weight(aligned(np.zeros(1024, np.uint8)), "q8_32", 16, 64)


@pytest.mark.parametrize("fmt", INTEGER + FLOAT)
def test_a_part_is_the_rows_it_names(fmt: str) -> None:
    w, _ = weight(np.random.default_rng(5), fmt, 40, 64)
    x = np.random.default_rng(6).standard_normal((3, 64)).astype(np.float32)
    whole = apply(Linear([w]), x)
    for first, rows in ((0, 16), (16, 16), (16, 24), (32, 8), (0, 40)):
        np.testing.assert_array_equal(apply(Linear([w.part(first, rows)]), x), whole[:, first : first + rows])
    for first, rows in ((8, 16), (0, 8), (32, 16), (-16, 16), (0, 0)):
        with pytest.raises(ValueError, match=r"rows .* of 40"):
            w.part(first, rows)
