# SPDX-License-Identifier: Apache-2.0
"""Both forms of latent attention against the formulas in float64; chunks and threads change no byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cecilia._kernels import isa, threads
from cecilia._kernels.attention import page_bytes
from cecilia._kernels.buffer import Activations, Matrix
from cecilia._kernels.mla import ExpandedAttention, LatentAttention, latent_page_bytes
from cecilia.layers.rope import Rope
from cecilia.state.pages import PagePool, PageTable
from tests.kernels.test_pointwise import matrix, values

BASE = 10000.0
# The recipe's own rounding: bf16 keeps 8 bits of each key and value, int8 7 bits of the largest of a row.
TOLERANCE = {"f32": 2e-5, "bf16": 2e-2, "int8": 6e-2}
HEADS, NOPE, ROPE, VALUE = 3, 32, 16, 48
COLUMN = 5  # where the shared key starts


def inputs(tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(tokens)
    widths = HEADS * (NOPE + ROPE), HEADS * (NOPE + VALUE), COLUMN + ROPE + 2
    q, kv, compressed = (rng.standard_normal((tokens, n)).astype(np.float32) for n in widths)
    return q, kv, compressed


def layer(kv: str, capacity: int) -> ExpandedAttention:
    return ExpandedAttention(
        heads=HEADS, nope_dim=NOPE, rope_dim=ROPE, value_dim=VALUE, kv=kv, offset=0, capacity=capacity
    )


def run(kv: str, parts: Sequence[np.ndarray], chunks: Sequence[int]) -> np.ndarray:
    attention, rope = layer(kv, max(chunks)), Rope(ROPE, BASE, max(chunks))
    table = PageTable(PagePool(attention.page_bytes, 1 << 24))
    out, at = [], 0
    for n in chunks:
        rope.fill(at, n)
        table.reserve(at + n)
        acts = Activations(n, HEADS * VALUE, ints=False)
        q, own, compressed = (matrix(part[at : at + n]) for part in parts)
        attention(q, own, compressed, COLUMN, rope.cos, rope.sin, table.pages, at, n, acts)
        out.append(values(acts))
        at += n
    return np.concatenate(out)


def rotate(x: np.ndarray) -> np.ndarray:
    """x [T, heads, R] by pairs (2i, 2i + 1)."""
    angles = np.outer(np.arange(len(x)), BASE ** (-np.arange(0, ROPE, 2) / ROPE))[:, None, :]
    a, b = x[..., 0::2], x[..., 1::2]
    c, s = np.cos(angles), np.sin(angles)
    return np.stack([a * c - b * s, b * c + a * s], axis=-1).reshape(x.shape)


def expected(parts: Sequence[np.ndarray]) -> np.ndarray:
    q, own, compressed = (part.astype(np.float64) for part in parts)
    n = len(q)
    q = q.reshape(n, HEADS, -1)
    q = np.concatenate([q[..., :NOPE], rotate(q[..., NOPE:])], axis=-1)
    shared = rotate(compressed[:, None, COLUMN : COLUMN + ROPE]).repeat(HEADS, axis=1)
    k = np.concatenate([own[:, : HEADS * NOPE].reshape(n, HEADS, NOPE), shared], axis=-1)
    v = own[:, HEADS * NOPE :].reshape(n, HEADS, VALUE)
    scores = np.einsum("thk,shk->hts", q, k) * (NOPE + ROPE) ** -0.5
    scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hts,shv->thv", weights, v).reshape(n, -1)


RANK = 144  # parts of 16: its greatest divisor that is a power of two
LATENT_TOLERANCE = {"latent-f32": 3e-5, "latent-bf16": 2e-2, "latent-int8": 6e-2}


def latent_inputs(tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """absorbed queries, q of which the ends count, latent vectors, and rows that hold the shared key."""
    rng = np.random.default_rng(tokens)
    widths = HEADS * RANK, HEADS * (NOPE + ROPE), RANK, COLUMN + ROPE + 2
    absorbed, q, latent, compressed = (rng.standard_normal((tokens, n)).astype(np.float32) for n in widths)
    return absorbed * np.float32((NOPE / RANK) ** 0.5), q, latent, compressed  # scores of the usual size


def latent_layer(kv: str, capacity: int) -> LatentAttention:
    return LatentAttention(
        heads=HEADS, rank=RANK, nope_dim=NOPE, rope_dim=ROPE, kv=kv, offset=0, capacity=capacity
    )


def acts_of(x: np.ndarray) -> Activations:
    made = Activations(*x.shape, ints=False)
    made.load(np.ascontiguousarray(x))
    return made


def run_latent(kv: str, parts: Sequence[np.ndarray], chunks: Sequence[int]) -> np.ndarray:
    """Contexts [T, heads, RANK]."""
    attention, rope = latent_layer(kv, max(chunks)), Rope(ROPE, BASE, max(chunks))
    table = PageTable(PagePool(attention.page_bytes, 1 << 24))
    out, at = [], 0
    for n in chunks:
        rope.fill(at, n)
        table.reserve(at + n)
        acts = Activations(HEADS * n, RANK, ints=False)
        absorbed, q, latent, compressed = (part[at : at + n] for part in parts)
        attention(
            acts_of(absorbed),
            matrix(q),
            acts_of(latent),
            matrix(compressed),
            COLUMN,
            rope.cos,
            rope.sin,
            table.pages,
            at,
            n,
            acts,
        )
        out.append(values(acts).reshape(HEADS, n, RANK).transpose(1, 0, 2))
        at += n
    return np.concatenate(out)


def expected_latent(parts: Sequence[np.ndarray]) -> np.ndarray:
    absorbed, q, latent, compressed = (part.astype(np.float64) for part in parts)
    n = len(q)
    turning = rotate(q.reshape(n, HEADS, -1)[..., NOPE:])
    shared = rotate(compressed[:, None, COLUMN : COLUMN + ROPE])[:, 0]
    scores = np.einsum("thc,sc->hts", absorbed.reshape(n, HEADS, RANK), latent)
    scores = (scores + np.einsum("thr,sr->hts", turning, shared)) * (NOPE + ROPE) ** -0.5
    scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hts,sc->thc", weights, latent)


@pytest.mark.parametrize("name", isa.available())
@pytest.mark.parametrize("kv", LATENT_TOLERANCE)
def test_the_latent_formulas(name: str, kv: str) -> None:
    isa.use(name)
    parts = latent_inputs(140)
    found = run_latent(kv, parts, [140])
    np.testing.assert_allclose(found, expected_latent(parts), rtol=0, atol=LATENT_TOLERANCE[kv])


@pytest.mark.parametrize("name", isa.available())
@pytest.mark.parametrize("kv", LATENT_TOLERANCE)
def test_chunks_and_threads_change_no_byte_of_the_latent_form(name: str, kv: str) -> None:
    isa.use(name)
    parts = latent_inputs(140)
    whole = run_latent(kv, parts, [140])
    for size in (1, 3, 16, 17, 100):
        chunks = [min(size, 140 - at) for at in range(0, 140, size)]
        for count in (1, 2):
            threads.set_threads(count)
            assert run_latent(kv, parts, chunks).tobytes() == whole.tobytes(), (size, count)


def test_integers_are_the_same_on_every_instruction_set() -> None:
    parts = latent_inputs(100)
    found = set()
    for name in isa.available():
        isa.use(name)
        found.add(run_latent("latent-int8", parts, [100]).tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("name", isa.available())
@pytest.mark.parametrize("kv", TOLERANCE)
def test_the_formulas(name: str, kv: str) -> None:
    isa.use(name)
    parts = inputs(140)
    np.testing.assert_allclose(run(kv, parts, [140]), expected(parts), rtol=0, atol=TOLERANCE[kv])


@pytest.mark.parametrize("name", isa.available())
@pytest.mark.parametrize("kv", TOLERANCE)
def test_chunks_and_threads_change_no_byte(name: str, kv: str) -> None:
    isa.use(name)
    parts = inputs(140)
    whole = run(kv, parts, [140])
    for size in (1, 3, 16, 17, 100):
        chunks = [min(size, 140 - at) for at in range(0, 140, size)]
        for count in (1, 2):
            threads.set_threads(count)
            assert run(kv, parts, chunks).tobytes() == whole.tobytes(), (size, count)


def test_bytes_of_a_page() -> None:
    """64 positions: keys of 192, values of 128 a head; int8 with a scale, f32, for each."""
    assert page_bytes("bf16", 16, 192, 128) == 64 * 16 * (192 + 128) * 2
    assert page_bytes("f32", 16, 192, 128) == 64 * 16 * (192 + 128) * 4
    assert page_bytes("int8", 16, 192, 128) == 64 * 16 * (192 + 4 + 128 + 4)
    assert latent_page_bytes("latent-bf16", 512, 64) == 64 * 576 * 2
    assert latent_page_bytes("latent-int8", 512, 64) == 64 * (576 + 5 * 4)  # a scale for each 128, and R
    assert latent_page_bytes("latent-int8", 32, 16) == 64 * (48 + 2 * 4)
    assert latent_layer("latent-int8", 1).page_bytes == latent_page_bytes("latent-int8", RANK, ROPE)
    assert layer("int8", 1).page_bytes == page_bytes("int8", HEADS, NOPE + ROPE, VALUE)


def test_wrong_operands() -> None:
    good, rope = layer("f32", 4), Rope(ROPE, BASE, 4)
    table = PageTable(PagePool(good.page_bytes, 1 << 24))
    table.reserve(4)
    q, own, compressed = (matrix(part) for part in inputs(4))
    out = Activations(4, HEADS * VALUE, ints=False)

    def call(**changes: Any) -> None:
        wanted = {"q": q, "kv": own, "compressed": compressed, "column": COLUMN, "first": 0, "tokens": 4}
        given = wanted | {"out": out} | changes
        good(
            given["q"],
            given["kv"],
            given["compressed"],
            given["column"],
            rope.cos,
            rope.sin,
            table.pages,
            given["first"],
            given["tokens"],
            given["out"],
        )

    call()
    for changes, fact in (
        ({"tokens": 5}, "5 tokens"),
        ({"q": Matrix(4, 8)}, "heads from 8"),
        ({"kv": Matrix(3, own.cols)}, "4 tokens of 4, 3"),
        ({"column": 8}, "columns 8 to 24 of 23"),
        ({"first": 61}, "positions 61 to 65"),
        ({"out": Activations(4, 16, ints=False)}, "into 4 x 16"),
    ):
        with pytest.raises(ValueError, match=fact):
            call(**changes)
    with pytest.raises(TypeError, match="typo"):
        ExpandedAttention(
            heads=1, nope_dim=16, rope_dim=16, value_dim=16, kv="f32", offset=0, capacity=1, typo=2
        )  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="head width 40"):
        ExpandedAttention(heads=1, nope_dim=24, rope_dim=16, value_dim=16, kv="f32", offset=0, capacity=1)
    with pytest.raises(ValueError, match="there are: f32 bf16 int8"):
        layer("fp4", 1)


def test_wrong_latent_operands() -> None:
    good, rope = latent_layer("latent-f32", 4), Rope(ROPE, BASE, 4)
    table = PageTable(PagePool(good.page_bytes, 1 << 24))
    table.reserve(4)
    absorbed, q, latent, compressed = latent_inputs(4)
    given: list[Any] = [acts_of(absorbed), matrix(q), acts_of(latent), matrix(compressed), COLUMN, rope.cos]
    given += [rope.sin, table.pages, 0, 4, Activations(4 * HEADS, RANK, ints=False)]
    good(*given)
    for place, wrong, fact in (
        (0, Activations(4, 8, ints=False), "heads from 8"),
        (1, Matrix(3, q.shape[1]), "4 tokens of 4, 3"),
        (2, Activations(4, 128, ints=False), "latent vector of 128"),
        (4, 8, "columns 8 to 24 of 23"),
        (8, 61, "positions 61 to 65"),
        (9, 5, "5 tokens, capacity 4"),
        (10, Activations(4 * HEADS - 1, RANK, ints=False), "3 x 4 rows of 144 into 11 x 144"),
    ):
        with pytest.raises(ValueError, match=fact):
            good(*given[:place], wrong, *given[place + 1 :])
    with pytest.raises(ValueError, match="there are: latent-f32 latent-bf16 latent-int8"):
        latent_layer("f32", 1)
    with pytest.raises(ValueError, match="heads of 18 parts, at most 17"):
        LatentAttention(heads=1, rank=272, nope_dim=16, rope_dim=16, kv="latent-f32", offset=0, capacity=1)
