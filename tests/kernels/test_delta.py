# SPDX-License-Identifier: Apache-2.0
"""Delta attention against its formulas in float64; chunks, threads, instruction sets give the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cecilia._kernels import isa, threads
from cecilia._kernels.buffer import Activations, Fixed, Matrix, Vector
from cecilia._kernels.delta import Delta, state_bytes
from tests.kernels.test_pointwise import values
from tests.reference import ling3

EPS = 1e-6
LOWEST = -5.0


@dataclass
class Layer:
    """Random weights of one layer, distributed as in the checkpoints."""

    heads: int
    width: int
    seed: int = 0
    parts: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        p = self.heads * self.width
        made = {
            "conv": 0.5 * rng.standard_normal((3 * p, 4)),
            "a": 0.2 * rng.uniform(1, 16, self.heads),
            "dt_bias": 0.5 * rng.standard_normal(p) - 1,
            "norm": 1 + 0.1 * rng.standard_normal(self.width),
        }
        self.parts = {name: value.astype(np.float32) for name, value in made.items()}

    def inputs(self, tokens: int) -> np.ndarray:
        rng = np.random.default_rng(self.seed + 1)
        columns = 5 * self.heads * self.width + self.heads
        return rng.standard_normal((tokens, columns)).astype(np.float32)

    def bound(self, capacity: int, offset: int = 0) -> Delta:
        vectors = {
            name: Vector(np.ascontiguousarray(value).reshape(-1)) for name, value in self.parts.items()
        }
        return Delta(
            heads=self.heads,
            head_dim=self.width,
            eps=EPS,
            lower_bound=LOWEST,
            offset=offset,
            capacity=capacity,
            **vectors,
        )

    def run(self, x: np.ndarray, chunks: Sequence[int]) -> tuple[np.ndarray, bytes]:
        """Outputs [T, P] and the last state."""
        layer = self.bound(max(chunks))
        state = Fixed(layer.state_bytes)
        out, at = [], 0
        for n in chunks:
            rows, acts = Matrix(n, x.shape[1]), Activations(n, self.heads * self.width, ints=False)
            np.asarray(rows)[:] = x[at : at + n]
            layer(rows, state, n, acts)
            out.append(values(acts))
            at += n
        assert at == len(x)
        return np.concatenate(out), bytes(memoryview(state))

    def expected(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same in float64: outputs, and S [H, K, V]."""
        wide = x.astype(np.float64)
        p, shape = self.heads * self.width, (len(x), self.heads, self.width)
        conv = self.parts["conv"].astype(np.float64)[:, None, :]
        q, k, v = (
            ling3.short_conv(wide[:, i * p : (i + 1) * p], conv[i * p : (i + 1) * p]).reshape(shape)
            for i in range(3)
        )
        f, z = (wide[:, i * p : (i + 1) * p].reshape(shape) for i in (3, 4))
        g = ling3.decay(f, np.log(self.parts["a"]), self.parts["dt_bias"].reshape(shape[1:]), LOWEST)
        beta = ling3.sigmoid(wide[:, 5 * p :])
        o, state = ling3.delta_rule(ling3.l2(q) * self.width**-0.5, ling3.l2(k), v, g, beta)
        o = ling3.rms_norm(o, self.parts["norm"], EPS) * ling3.sigmoid(z)
        return o.reshape(len(x), p), state


def state_of(raw: bytes, heads: int, width: int) -> np.ndarray:
    """S [H, K, V] of a stored state."""
    s = np.frombuffer(raw, np.float32, heads * width * width).reshape(heads, width // 16, width, 16)
    return s.transpose(0, 2, 1, 3).reshape(heads, width, width)


@pytest.mark.parametrize("name", isa.available())
@pytest.mark.parametrize(("heads", "width"), [(1, 16), (4, 16), (3, 48), (2, 128)])
def test_the_formulas(name: str, heads: int, width: int) -> None:
    isa.use(name)
    layer = Layer(heads, width)
    x = layer.inputs(40)
    found, raw = layer.run(x, [40])
    want, state = layer.expected(x)
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-5)
    np.testing.assert_allclose(state_of(raw, heads, width), state, rtol=0, atol=2e-6)
    rows = np.frombuffer(raw, np.float32)[heads * width * width :][: 9 * heads * width]
    np.testing.assert_array_equal(rows.reshape(3, -1), x[-3:, : 3 * heads * width])


@pytest.mark.parametrize("name", isa.available())
@pytest.mark.parametrize("width", [16, 128])
def test_chunks_and_threads_change_no_byte(name: str, width: int) -> None:
    isa.use(name)
    layer = Layer(4, width, seed=5)
    x = layer.inputs(103)
    threads.set_threads(1)
    whole = layer.run(x, [103])
    for size in (1, 3, 16, 17, 100):
        chunks = [min(size, 103 - at) for at in range(0, 103, size)]
        for count in (1, 2):
            threads.set_threads(count)
            found = layer.run(x, chunks)
            assert found[0].tobytes() == whole[0].tobytes(), (size, count)
            assert found[1] == whole[1], (size, count)


@pytest.mark.parametrize("name", [name for name in isa.available() if name != "scalar"])
def test_instruction_sets_agree_to_the_byte(name: str) -> None:
    layer = Layer(2, 48, seed=9)
    x = 3 * layer.inputs(37)
    isa.use("scalar")
    want = layer.run(x, [37])
    isa.use(name)
    found = layer.run(x, [37])
    assert found[0].tobytes() == want[0].tobytes()
    assert found[1] == want[1]


def test_gates_at_their_limits_stay_finite() -> None:
    layer = Layer(2, 16)
    x = layer.inputs(8)
    x[:, 3 * 32 :] = np.where(np.arange(x.shape[1] - 96) % 2, 1e30, -1e30)  # f, z and b
    found, raw = layer.run(x, [8])
    assert np.isfinite(found).all()
    assert np.isfinite(np.frombuffer(raw, np.float32)).all()


def test_a_value_that_is_no_number_is_not_hidden() -> None:
    layer = Layer(2, 16)
    x = layer.inputs(4)
    x[1, 32] = np.nan  # the first k of head 0, in the second token
    found, _ = layer.run(x, [4])
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1:, :16]).all()


def test_layers_keep_their_states_apart() -> None:
    layer = Layer(2, 16)
    x = layer.inputs(5)
    first, second = layer.bound(5), layer.bound(5, offset=state_bytes(2, 16))
    state = Fixed(2 * state_bytes(2, 16))
    rows, out = Matrix(*x.shape), Activations(5, 32, ints=False)
    np.asarray(rows)[:] = x
    first(rows, state, 5, out)
    raw = bytes(memoryview(state))
    assert any(raw[: first.state_bytes])
    assert not any(raw[first.state_bytes :])
    second(rows, state, 5, out)
    raw = bytes(memoryview(state))
    assert raw[first.state_bytes :] == raw[: first.state_bytes]
    state.clear()
    assert not any(bytes(memoryview(state)))


def test_wrong_operands() -> None:
    layer = Layer(2, 16)
    good = layer.bound(4)
    state, out = Fixed(good.state_bytes), Activations(4, 32, ints=False)
    for rows, room, n, target, fact in (
        (Matrix(4, 161), state, 4, out, "161 columns"),
        (Matrix(4, 162), state, 5, out, "5 tokens"),
        (Matrix(3, 162), state, 4, out, "3 rows"),
        (Matrix(4, 162), Fixed(64), 4, out, "a state of 64"),
        (Matrix(4, 162), state, 4, Activations(4, 48, ints=False), "into 48"),
    ):
        with pytest.raises(ValueError, match=fact):
            good(rows, room, n, target)
    for change, fact in (({"heads": 3}, "for 3 x 16"), ({"head_dim": 24}, "not a multiple of 16")):
        changed = Layer(2, 16)
        for name, value in change.items():
            setattr(changed, {"heads": "heads", "head_dim": "width"}[name], value)
        with pytest.raises(ValueError, match=fact):
            changed.bound(4)
