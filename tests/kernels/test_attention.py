# SPDX-License-Identifier: Apache-2.0
"""Attention: each instruction set and recipe against float64, and byte equality however the work is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from cecilia._kernels import isa, threads
from cecilia._kernels.attention import Attention
from cecilia._kernels.buffer import Activations, Matrix
from cecilia._kernels.linear import Linear, Weight
from cecilia.formats import quant
from cecilia.state.pages import PagePool, PageTable

RECIPES = ("f32", "bf16", "int8")
HALF_STEPS = (
    64 / 2 / 16383
)  # int8: what rounding a page's 64 weights to 14 bits can cost, relative to the largest |v|


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim


def matrix(data: np.ndarray) -> Matrix:
    m = Matrix(*data.shape)
    np.asarray(m)[:] = data
    return m


def values(acts: Activations) -> np.ndarray:
    """The f32 rows of activations, read through a layer that copies them."""
    packed = quant.pack(quant.quantise(np.eye(acts.cols, dtype=np.float32), "f32")).view(np.uint8).reshape(-1)
    room = np.zeros(packed.size + 64, np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + packed.size] = packed
    y = Matrix(acts.rows, acts.cols)
    Linear([Weight(room[start : start + packed.size], "f32", acts.cols, acts.cols)])(acts, acts.rows, y)
    return np.array(y)


def angles(first: int, tokens: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    turns = np.arange(first, first + tokens)[:, None] * 10000.0 ** (-np.arange(dim // 2) / (dim // 2))
    return np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)


def random_qkv(shape: Shape, tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, shape.width)).astype(np.float32)


@dataclass
class OneLayer:
    """One layer with its own pages."""

    shape: Shape
    kv: str
    capacity: int
    offset: int = 0
    layer: Attention = field(init=False)
    table: PageTable = field(init=False)

    def __post_init__(self) -> None:
        s = self.shape
        self.layer = Attention(
            heads=s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.dim,
            kv=self.kv,
            offset=self.offset,
            capacity=self.capacity,
        )
        self.table = PageTable(PagePool(self.offset + self.layer.page_bytes, 1 << 30))

    def step(self, qkv: np.ndarray, first: int) -> np.ndarray:
        s, tokens = self.shape, len(qkv)
        cos, sin = angles(first, tokens, s.dim)
        out = Activations(tokens, s.heads * s.dim, ints=False)
        self.table.reserve(first + tokens)
        self.layer(matrix(qkv), matrix(cos), matrix(sin), self.table.pages, first, tokens, out)
        return values(out)

    def run(self, qkv: np.ndarray, chunks: Sequence[int]) -> np.ndarray:
        first, rows = 0, []
        for n in chunks:
            rows.append(self.step(qkv[first : first + n], first))
            first += n
        assert first == len(qkv)
        return np.concatenate(rows)


def chunks_of(n: int, tokens: int) -> list[int]:
    return [n] * (tokens // n) + ([tokens % n] if tokens % n else [])


# ---- the reference: definitions, in numpy ----


def rotate(x: np.ndarray) -> np.ndarray:
    """x f32 [T, heads, D], positions from 0: pairs (i, i + D/2)."""
    tokens, _, dim = x.shape
    cos, sin = (a[:, None, :] for a in angles(0, tokens, dim))
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def as_held(x: np.ndarray, kv: str, *, query: bool = False) -> np.ndarray:
    """float64 values of f32 rows after the recipe's rounding; queries are only rounded for int8."""
    if kv == "int8":
        scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
        q = np.clip(np.rint(np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)), -127, 127)
        return q.astype(np.float64) * scale.astype(np.float64)
    if kv == "bf16" and not query:
        bits = x.view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
        return bits.astype(np.uint32).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


def reference(qkv: np.ndarray, shape: Shape, kv: str) -> tuple[np.ndarray, float]:
    """Causal attention of all tokens [T, heads * D], and the largest |v|."""
    tokens, group = len(qkv), shape.heads // shape.kv_heads
    rows = qkv.reshape(tokens, -1, shape.dim)
    q, k, v = np.split(rows, [shape.heads, shape.heads + shape.kv_heads], axis=1)
    q = as_held(rotate(q) * np.float32(1 / np.sqrt(shape.dim)), kv, query=True)
    k, v = as_held(np.ascontiguousarray(rotate(k)), kv), as_held(np.ascontiguousarray(v), kv)
    out = np.empty((tokens, shape.heads, shape.dim))
    for h in range(shape.heads):
        s = q[:, h] @ k[:, h // group].T
        s[np.triu_indices(tokens, 1)] = -np.inf
        w = np.exp(s - s.max(1, keepdims=True))
        out[:, h] = w / w.sum(1, keepdims=True) @ v[:, h // group]
    return out.reshape(tokens, -1), float(np.abs(v).max())


def tolerance(kv: str, largest: float) -> float:
    return largest * ((HALF_STEPS if kv == "int8" else 0) + 1e-5)


# ---- against the reference ----


@pytest.mark.parametrize("name", isa.available())
@pytest.mark.parametrize("kv", RECIPES)
@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        (Shape(2, 1, 16), 130),
        (Shape(3, 3, 48), 63),
        (Shape(9, 3, 64), 64),
        (Shape(4, 2, 80), 65),
        (Shape(7, 1, 128), 129),
        (Shape(2, 2, 256), 70),
    ],
    ids=str,
)
def test_against_float64(name: str, kv: str, shape: Shape, tokens: int) -> None:
    isa.use(name)
    qkv = random_qkv(shape, tokens)
    got = OneLayer(shape, kv, tokens, offset=192).run(qkv, [tokens])
    want, largest = reference(qkv, shape, kv)
    assert np.abs(got - want).max() < tolerance(kv, largest)


@pytest.mark.parametrize("name", isa.available())
@pytest.mark.parametrize("kv", RECIPES)
def test_sharp_scores_and_saturated_quants(name: str, kv: str) -> None:
    """Scores hundreds apart, elements all at +-max: one position wins, the others underflow to weight 0."""
    isa.use(name)
    shape = Shape(4, 2, 64)
    qkv = np.where(random_qkv(shape, 140) > 0, np.float32(30), np.float32(-30))
    got = OneLayer(shape, kv, 140).run(qkv, [140])
    want, largest = reference(qkv, shape, kv)
    # A score of 7200 carries an f32 rounding of 5e-4 where the reference has none.
    assert np.abs(got - want).max() < tolerance(kv, largest) + 5e-3 * largest


@pytest.mark.parametrize("name", isa.available())
@pytest.mark.parametrize("kv", RECIPES)
def test_zero_rows(name: str, kv: str) -> None:
    """Zero keys weigh all positions alike; zero values count as zeros."""
    isa.use(name)
    shape = Shape(2, 1, 32)
    qkv = random_qkv(shape, 66)
    qkv[:, 2 * 32 : 3 * 32] = 0
    qkv[10:20, 3 * 32 :] = 0
    got = OneLayer(shape, kv, 66).run(qkv, [66])
    means = as_held(np.ascontiguousarray(qkv[:, 3 * 32 :]), kv).cumsum(0) / np.arange(1, 67)[:, None]
    assert np.abs(got - np.tile(means, 2)).max() < tolerance(kv, float(np.abs(qkv[:, 3 * 32 :]).max()))
    assert not OneLayer(shape, kv, 66).run(np.zeros_like(qkv), [66]).any()


@pytest.mark.parametrize("name", isa.available())
@pytest.mark.parametrize("kv", RECIPES)
@pytest.mark.parametrize("size", [1e-25, 1e-37, 1e-42])
def test_tiny_values(name: str, kv: str, size: float) -> None:
    """Small values keep their precision; below 2^-100 int8 may take them for zeros."""
    isa.use(name)
    shape = Shape(2, 1, 32)
    qkv = random_qkv(shape, 66)
    qkv[:, 3 * 32 :] *= np.float32(size)
    got = OneLayer(shape, kv, 66).run(qkv, [66])
    want, largest = reference(qkv, shape, kv)
    assert np.abs(got - want).max() < max(tolerance(kv, largest), 2.0**-100 if kv == "int8" else 2.0**-140)


# ---- the same bytes ----


@pytest.mark.parametrize("name", isa.available())
@pytest.mark.parametrize("kv", RECIPES)
@pytest.mark.parametrize("shape", [Shape(9, 3, 64), Shape(5, 1, 80)], ids=str)
def test_any_chunking(name: str, kv: str, shape: Shape) -> None:
    isa.use(name)
    tokens = 135
    qkv = random_qkv(shape, tokens)
    whole = OneLayer(shape, kv, tokens).run(qkv, [tokens])
    for n in (1, 7, 64):
        chunked = OneLayer(shape, kv, tokens).run(qkv, chunks_of(n, tokens))
        assert chunked.tobytes() == whole.tobytes(), f"chunks of {n}"


@pytest.mark.parametrize("name", isa.available())
@pytest.mark.parametrize("kv", RECIPES)
def test_any_thread_count(name: str, kv: str) -> None:
    """Large enough that two threads are used: tiles in the long chunks, pages in the single tokens."""
    isa.use(name)
    shape, chunks = Shape(8, 2, 128), [300, 1, 2, 1, 5, 64]
    qkv = random_qkv(shape, sum(chunks))
    got = []
    for n in (1, 2):
        threads.set_threads(n)
        got.append(OneLayer(shape, kv, 300).run(qkv, chunks))
    assert got[0].tobytes() == got[1].tobytes()


def test_more_pages_than_partials_held_at_once() -> None:
    shape, tokens = Shape(8, 1, 64), 2300
    qkv = random_qkv(shape, tokens + 3)
    got = []
    for n in (1, 2):
        threads.set_threads(n)
        got.append(OneLayer(shape, "int8", tokens).run(qkv, [tokens, 1, 2]))
    assert got[0].tobytes() == got[1].tobytes()


@pytest.mark.parametrize("name", isa.available())
def test_int8_is_the_same_on_every_instruction_set(name: str) -> None:
    shape, tokens = Shape(7, 1, 80), 200
    qkv = random_qkv(shape, tokens) * np.float32(3)
    isa.use("scalar")
    want = OneLayer(shape, "int8", tokens).run(qkv, [tokens])
    isa.use(name)
    assert OneLayer(shape, "int8", tokens).run(qkv, [tokens]).tobytes() == want.tobytes()


# ---- what must not matter ----


@pytest.mark.parametrize("name", isa.available())
@pytest.mark.parametrize("kv", RECIPES)
@pytest.mark.parametrize("kept", [3, 63, 64])
def test_what_pages_held_before_does_not_matter(name: str, kv: str, kept: int) -> None:
    """Positions are written with NaN, infinite or huge values, then the sequence is taken back."""
    isa.use(name)
    shape = Shape(6, 2, 48)
    qkv = random_qkv(shape, 70)
    clean = OneLayer(shape, kv, 128)
    want = clean.run(qkv, [kept, 70 - kept])
    for garbage in (np.nan, np.inf, 1e30):
        sequence = OneLayer(shape, kv, 128)
        head = sequence.step(qkv[:kept], 0)
        sequence.step(np.full((128 - kept, shape.width), garbage, np.float32), kept)
        got = np.concatenate([head, *(sequence.step(qkv[t : t + 1], t) for t in range(kept, 70))])
        assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("name", isa.available())
@pytest.mark.parametrize("kv", RECIPES)
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_nan_is_not_hidden(name: str, kv: str, which: str) -> None:
    isa.use(name)
    shape = Shape(1, 1, 32)
    qkv = random_qkv(shape, 3)
    qkv[2, ["query", "key", "value"].index(which) * 32 :][:32] = np.nan
    got = OneLayer(shape, kv, 3).run(qkv, [2, 1])
    assert np.isfinite(got[:2]).all()
    assert np.isnan(got[2]).all()


def test_layers_share_pages() -> None:
    shape = Shape(2, 1, 32)
    first = Attention(heads=2, kv_heads=1, head_dim=32, kv="int8", offset=0, capacity=8)
    second = Attention(heads=2, kv_heads=1, head_dim=32, kv="int8", offset=first.page_bytes, capacity=8)
    table = PageTable(PagePool(2 * first.page_bytes, 1 << 20))
    table.reserve(8)
    cos, sin = (matrix(a) for a in angles(0, 8, 32))
    outs = [Activations(8, 64, ints=False) for _ in range(2)]
    inputs = [random_qkv(shape, 8, seed) for seed in (1, 2)]
    for t in range(8):
        turn = [matrix(np.asarray(a)[t : t + 1]) for a in (cos, sin)]
        for layer, out, qkv in zip((first, second), outs, inputs, strict=True):
            layer(matrix(qkv[t : t + 1]), turn[0], turn[1], table.pages, t, 1, out)
    for out, qkv in zip(outs, inputs, strict=True):
        want = OneLayer(shape, "int8", 8).run(qkv, [8])
        assert values(out)[0].tobytes() == want[7].tobytes()


def test_output_is_quantised() -> None:
    """With ints, out also holds int8 rows: a q8 layer reads those."""
    shape = Shape(2, 1, 32)
    qkv = random_qkv(shape, 5)
    want = OneLayer(shape, "int8", 5).run(qkv, [5])
    sequence = OneLayer(shape, "int8", 5)
    cos, sin = (matrix(a) for a in angles(0, 5, 32))
    out, loaded = Activations(5, 64, ints=True), Activations(5, 64, ints=True)
    sequence.table.reserve(5)
    sequence.layer(matrix(qkv), cos, sin, sequence.table.pages, 0, 5, out)
    loaded.load(want)
    packed = quant.pack(quant.quantise(np.eye(64, dtype=np.float32), "q8_32")).view(np.uint8).reshape(-1)
    room = np.zeros(packed.size + 64, np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + packed.size] = packed
    linear = Linear([Weight(room[start : start + packed.size], "q8_32", 64, 64)])
    got = []
    for acts in (out, loaded):
        y = Matrix(5, 64)
        linear(acts, 5, y)
        got.append(np.array(y).tobytes())
    assert got[0] == got[1]


# ---- errors ----


@pytest.mark.parametrize(
    "change",
    [
        {"kv": "f16"},
        {"heads": 5},
        {"kv_heads": 0},
        {"head_dim": 24},
        {"head_dim": 272},
        {"offset": 32},
        {"capacity": 0},
    ],
    ids=str,
)
def test_wrong_layer(change: dict[str, object]) -> None:
    arguments: dict[str, object] = {
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "kv": "int8",
        "offset": 0,
        "capacity": 8,
    }
    with pytest.raises(ValueError, match=str(next(iter(change.values())))):
        Attention(**{**arguments, **change})  # type: ignore[arg-type]


def test_wrong_call() -> None:
    layer = Attention(heads=2, kv_heads=1, head_dim=32, kv="bf16", offset=0, capacity=4)
    table = PageTable(PagePool(layer.page_bytes, 1 << 20))
    table.reserve(64)
    qkv, turn, out = Matrix(8, 128), Matrix(8, 16), Activations(8, 64, ints=False)
    layer(qkv, turn, turn, table.pages, 60, 4, out)
    layer(qkv, turn, turn, table.pages, 60, 0, out)
    for bad in (
        (qkv, turn, turn, table.pages, 0, 5, out),
        (qkv, turn, turn, table.pages, 61, 4, out),
        (qkv, turn, turn, table.pages, -1, 4, out),
        (Matrix(8, 127), turn, turn, table.pages, 0, 4, out),
        (Matrix(3, 128), turn, turn, table.pages, 0, 4, out),
        (qkv, Matrix(3, 16), turn, table.pages, 0, 4, out),
        (qkv, turn, Matrix(8, 32), table.pages, 0, 4, out),
        (qkv, turn, turn, table.pages, 0, 4, Activations(8, 96, ints=False)),
        (qkv, turn, turn, table.pages, 0, 4, Activations(3, 64, ints=False)),
    ):
        with pytest.raises(ValueError, match=r"\d"):
            layer(*bad)
