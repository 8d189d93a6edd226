# SPDX-License-Identifier: Apache-2.0
"""Routing against its definition; experts against plain linear layers, one token and expert at a time."""

from __future__ import annotations

import numpy as np
import pytest

from cecilia._kernels import isa, threads
from cecilia._kernels.buffer import Activations, Matrix, Vector
from cecilia._kernels.experts import ExpertBuffers, Experts, Grouped, GroupRouter, Routes
from cecilia._kernels.linear import Linear, Weight
from cecilia._kernels.pointwise import swiglu
from cecilia.formats import quant
from tests.kernels.test_pointwise import matrix, values
from tests.reference import ling3

FORMATS = ("f32", "bf16", "q8_32", "q4_32", "q4a_32")
D, F, SHARED = (
    96,
    40,
    64,
)  # 40 rows are two and a half tiles; K of `down` must be a multiple of 32 when quantised
CONFIG = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5}


def weight(rng: np.random.Generator, rows: int, cols: int, fmt: str) -> Weight:
    values = rng.standard_normal((rows, cols)).astype(np.float32) / cols**0.5
    packed = quant.pack(quant.quantise(values, fmt)).view(np.uint8).reshape(-1)
    room = np.zeros(packed.size + 64, np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + packed.size] = packed
    return Weight(room[start : start + packed.size], fmt, rows, cols)


class Block:
    """A mixture of random experts, and the same computed expert by expert."""

    def __init__(
        self, fmt: str, *, experts: int = 12, used: int = 3, shared: bool = True, ff: int = 64
    ) -> None:
        rng = np.random.default_rng(3)
        self.experts, self.used, self.fmt = experts, used, fmt
        self.gate = [weight(rng, ff, D, fmt) for _ in range(experts)]
        self.up = [weight(rng, ff, D, fmt) for _ in range(experts)]
        self.down = [weight(rng, D, ff, fmt) for _ in range(experts)]
        self.shared = None
        if shared:
            self.shared = (
                weight(rng, SHARED, D, fmt),
                weight(rng, SHARED, D, fmt),
                weight(rng, D, SHARED, fmt),
            )

    @property
    def ints(self) -> bool:
        return self.fmt not in ("f32", "bf16")

    def acts(self, x: np.ndarray) -> Activations:
        found = Activations(*x.shape, ints=self.ints)
        found.load(x)
        return found

    def buffers(self, capacity: int) -> ExpertBuffers:
        ff, shared = self.gate[0].rows, SHARED if self.shared else 0
        return ExpertBuffers(cols=D, ff=ff, shared_ff=shared, used=self.used, capacity=capacity)

    def run(self, x: np.ndarray, logits: np.ndarray, chunk: int) -> np.ndarray:
        block = Experts(self.gate, self.up, self.down, shared=self.shared, buffers=self.buffers(chunk))
        router = GroupRouter(Vector(np.zeros(self.experts, np.float32)), groups=1, groups_used=1, scale=2.5)
        routes = Routes(experts=self.experts, used=self.used, capacity=chunk)
        out = []
        for at in range(0, len(x), chunk):
            part = x[at : at + chunk]
            y = matrix(np.full_like(part, 0.5))
            router(matrix(logits[at : at + chunk]), len(part), routes)
            block(self.acts(part), routes, y)
            out.append(np.array(y))
        return np.concatenate(out)

    def expected(self, x: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """One token and one expert at a time, through Linear."""
        y = np.full_like(x, 0.5)
        routes = Routes(experts=self.experts, used=self.used, capacity=1)
        router = GroupRouter(Vector(np.zeros(self.experts, np.float32)), groups=1, groups_used=1, scale=2.5)
        for t in range(len(x)):
            router(matrix(logits[t : t + 1]), 1, routes)
            total = matrix(y[t : t + 1])
            for e, share in routes.of(0):
                self.add(x[t : t + 1], self.gate[e], self.up[e], self.down[e], np.float32(share), total)
            if self.shared is not None:
                self.add(x[t : t + 1], *self.shared, np.float32(1), total)
            y[t] = np.array(total)[0]
        return y

    def add(
        self, x: np.ndarray, gate: Weight, up: Weight, down: Weight, share: np.float32, y: Matrix
    ) -> None:
        inner, hidden = Matrix(1, 2 * gate.rows), Activations(1, gate.rows, ints=False)
        Linear([gate, up])(self.acts(x), 1, inner)
        swiglu(inner, hidden, 1)
        Linear([down])(self.acts(values(hidden) * share), 1, y, add=True)


def case(tokens: int, experts: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(tokens)
    shapes = ((tokens, D), (tokens, experts))
    x, logits = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return x, logits


@pytest.mark.parametrize("name", isa.available())
@pytest.mark.parametrize("fmt", FORMATS)
def test_experts_are_linear_layers_added_in_order(name: str, fmt: str) -> None:
    isa.use(name)
    block = Block(fmt)
    x, logits = case(19, 12)
    want = block.expected(x, logits)
    for chunk in (1, 3, 16, 17, 19):
        for count in (1, 2):
            threads.set_threads(count)
            assert block.run(x, logits, chunk).tobytes() == want.tobytes(), (chunk, count)


@pytest.mark.parametrize(
    "settings", [{"shared": False}, {"experts": 2, "used": 1}, {"experts": 5, "used": 5}]
)
def test_corner_cases(settings: dict[str, int]) -> None:
    block = Block("q4_32", **settings)  # type: ignore[arg-type]
    x, logits = case(17, block.experts)
    want = block.expected(x, logits)
    assert block.run(x, logits, 17).tobytes() == want.tobytes()
    assert block.run(x, logits, 1).tobytes() == want.tobytes()


def test_an_inner_width_of_two_and_a_half_tiles() -> None:
    block = Block("f32", ff=F)
    x, logits = case(5, 12)
    assert block.run(x, logits, 5).tobytes() == block.expected(x, logits).tobytes()


def test_all_tokens_to_the_same_experts() -> None:
    block = Block("q8_32")
    x, logits = case(33, 12)
    logits[:] = logits[0]
    assert block.run(x, logits, 33).tobytes() == block.expected(x, logits).tobytes()


def test_against_float64() -> None:
    block = Block("f32", shared=False)
    rng = np.random.default_rng(3)
    made = [
        [rng.standard_normal(shape).astype(np.float32) / shape[1] ** 0.5 for _ in range(12)]
        for shape in ((64, D), (64, D), (D, 64))
    ]
    x, logits = case(7, 12)
    found = block.run(x, logits, 7)
    config = CONFIG | {"n_group": 1, "topk_group": 1}
    for t in range(7):
        want = np.full(D, 0.5)
        for e, share in zip(*ling3.route(logits[t].astype(np.float64), np.zeros(12), config), strict=True):
            want += share * ling3.mlp(x[t].astype(np.float64), *(part[e].astype(np.float64) for part in made))
        np.testing.assert_allclose(found[t], want, atol=2e-5)


def routed(logits: np.ndarray, bias: np.ndarray) -> list[list[tuple[int, float]]]:
    router = GroupRouter(Vector(bias.astype(np.float32)), groups=4, groups_used=2, scale=2.5)
    routes = Routes(experts=logits.shape[1], used=3, capacity=len(logits))
    router(matrix(logits.astype(np.float32)), len(logits), routes)
    return [routes.of(t) for t in range(len(logits))]


def test_a_worked_example() -> None:
    logits = np.array([[0.1, 0.9, -0.2, 0.4, 1.2, -1, 0.3, 0.2]])
    bias = np.array([0, -0.3, 0.5, 0, -0.6, 0, 0.1, 0.2], np.float32)
    router = GroupRouter(Vector(bias), groups=4, groups_used=2, scale=2.5)
    routes = Routes(experts=8, used=2, capacity=1)
    router(matrix(logits.astype(np.float32)), 1, routes)
    ((first, a), (second, b)) = routes.of(0)
    assert (first, second) == (2, 7)
    assert (a, b) == pytest.approx((1.12541501, 1.37458499), abs=1e-6)


@pytest.mark.parametrize("shift", [0.0, -1.5])
def test_routing_follows_the_definition(shift: float) -> None:
    rng = np.random.default_rng(8)
    logits, bias = rng.standard_normal((50, 16)), 0.2 * rng.standard_normal(16) + shift
    for row, found in zip(logits, routed(logits, bias), strict=True):
        ids, weights = ling3.route(row, bias, CONFIG)
        assert [e for e, _ in found] == ids.tolist()
        assert [w for _, w in found] == pytest.approx(weights.tolist(), rel=1e-5)


def test_of_equals_the_first() -> None:
    (found,) = routed(np.zeros((1, 16)), np.zeros(16))
    assert [e for e, _ in found] == [0, 1, 2]
    # groups 1, 2 and 3 tie: the first two stay; of 5, 6, 8 and 9, equal too, the first three
    logits = np.zeros((1, 16))
    logits[0, [5, 6, 8, 9, 14, 15]] = 1.0
    (found,) = routed(logits, np.zeros(16))
    assert [e for e, _ in found] == [5, 6, 8]


def test_values_that_are_no_numbers_give_valid_experts_and_no_numbers() -> None:
    (found,) = routed(np.full((1, 16), np.nan), np.zeros(16))
    ids = [e for e, _ in found]
    assert ids == sorted(set(ids))
    assert all(0 <= e < 16 and np.isnan(w) for e, w in found)


@pytest.mark.parametrize("name", isa.available())
@pytest.mark.parametrize("fmt", FORMATS)
def test_grouped_layers(name: str, fmt: str) -> None:
    isa.use(name)
    rng = np.random.default_rng(1)
    weights = [weight(rng, 24, 64, fmt) for _ in range(3)]
    x = rng.standard_normal((3 * 5, 64)).astype(np.float32)
    acts = Activations(15, 64, ints=fmt not in ("f32", "bf16"))
    acts.load(x)
    want = np.zeros((5, 72), np.float32)
    for g in range(3):
        part, y = Activations(5, 64, ints=fmt not in ("f32", "bf16")), Matrix(5, 24)
        part.load(x[5 * g : 5 * g + 5])
        Linear([weights[g]])(part, 5, y)
        want[:, 24 * g : 24 * g + 24] = np.array(y)
    for count in (1, 2):
        threads.set_threads(count)
        into = Activations(5, 72, ints=False)
        Grouped(weights)(acts, 5, into)
        np.testing.assert_array_equal(values(into), want)


def test_wrong_operands() -> None:
    block = Block("q4_32", shared=False)
    x, _ = case(4, 12)
    buffers = block.buffers(4)
    good = Experts(block.gate, block.up, block.down, buffers=buffers)
    routes = Routes(experts=12, used=2, capacity=4)
    with pytest.raises(ValueError, match="made for 3 of 12"):
        good(block.acts(x), routes, Matrix(4, D))
    routes = Routes(experts=12, used=3, capacity=4)
    with pytest.raises(ValueError, match="into 80 columns"):
        good(block.acts(x), routes, Matrix(4, 80))
    with pytest.raises(ValueError, match="expected 64"):
        Experts(block.gate, block.up, block.gate, buffers=buffers)
    many = ExpertBuffers(cols=D, ff=64, shared_ff=0, used=13, capacity=4)
    with pytest.raises(ValueError, match="13 of 12, 12 and 12 experts"):
        Experts(block.gate, block.up, block.down, buffers=many)
    with pytest.raises(ValueError, match="buffers of 96, 64 and 64"):
        Experts(block.gate, block.up, block.down, buffers=Block("q4_32").buffers(4))
    other = Block("q8_32")
    with pytest.raises(ValueError, match="beside others"):
        Experts([*block.gate[:-1], other.gate[-1]], block.up, block.down, buffers=buffers)
    for parts in (
        (block.gate, block.up[:-1], block.down),
        (block.gate, block.up, [*block.down] * 2),
        ([], [], []),
    ):
        with pytest.raises(ValueError, match="3 of "):
            Experts(*parts, buffers=buffers)
    with pytest.raises(ValueError, match="without weights"):
        Grouped([])
    with pytest.raises(ValueError, match="no two best"):
        GroupRouter(Vector(np.zeros(4, np.float32)), groups=4, groups_used=2, scale=1.0)
    with pytest.raises(ValueError, match="beside q4_32"):
        Grouped([block.gate[0], other.gate[0]])
    with pytest.raises(ValueError, match="3 x 5 rows of 14 x 64"):
        Grouped([weight(np.random.default_rng(0), 16, 64, "q4_32")] * 3)(
            Activations(14, 64, ints=True), 5, Activations(5, 48, ints=False)
        )
