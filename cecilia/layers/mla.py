# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention between its projections, in the form that the cache's recipe asks for.

Expanded: k, v = latent Wkb, latent Wvb are made and cached for every head.
Latent: attention(q, (k, r), v) = attention((q Wkb^T, q), (latent, r), latent) Wvb, so one latent vector is
cached for all heads; both forms store the shared, rotated part r of the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cecilia._kernels import attention, mla
from cecilia._kernels.buffer import Activations, Matrix, PageList
from cecilia._kernels.experts import Grouped
from cecilia._kernels.mla import LATENT_RECIPES, ExpandedAttention, LatentAttention
from cecilia._kernels.paged import RECIPES as EXPANDED_RECIPES
from cecilia._kernels.pointwise import split_heads
from cecilia.layers.rope import Rope
from cecilia.layers.weights import Weights, activations

RECIPES = (*EXPANDED_RECIPES, *LATENT_RECIPES)


@dataclass(frozen=True, slots=True)
class Dims:
    """heads H; a key is nope (N) of a head's own and rope (R) shared by all; values are v (V) wide, latent
    vectors rank."""

    heads: int
    rank: int
    nope: int
    rope: int
    v: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a layer attends with: q [T, H (N + R)], the normed latent [T, rank], and the shared keys [T, R],
    from `column` of `compressed` on; nothing is rotated yet. `rope` is filled for the tokens' positions."""

    q: Matrix
    latent: Activations
    compressed: Matrix
    column: int
    rope: Rope


class Attend(Protocol):
    """The attention of one layer."""

    def __call__(self, inputs: Inputs, pages: PageList, first: int, n: int, out: Activations) -> None:
        """out [T, H V] = attention of n tokens from position `first` on; only its f32 form counts."""


def can_hold(rank: int) -> bool:
    """Whether a cache can hold latent vectors of `rank`, a multiple of 16."""
    return rank <= mla.PARTS_MOST * mla.part_width(rank)


def page_bytes(dims: Dims, kv: str) -> int:
    """Bytes one layer takes in a KV page. Raises ValueError for an unknown recipe."""
    if kv in LATENT_RECIPES:
        return mla.latent_page_bytes(kv, dims.rank, dims.rope)
    return attention.page_bytes(kv, dims.heads, dims.nope + dims.rope, dims.v)


def form(dims: Dims, *, kv: str, chunk: int) -> Callable[[Weights, str, int], Attend]:
    """What makes the attention of a layer: from the weights, the prefix of their names, its place in a page.

    All layers that one form makes share their work buffers.
    """
    if kv in LATENT_RECIPES:
        buffers = _LatentBuffers(dims, chunk)
        return lambda weights, prefix, offset: _Latent(dims, weights, prefix, buffers, kv, offset, chunk)
    expanded = Matrix(chunk, dims.heads * (dims.nope + dims.v))
    return lambda weights, prefix, offset: _Expanded(dims, weights, prefix, expanded, kv, offset, chunk)


class _Expanded:
    def __init__(
        self, dims: Dims, weights: Weights, prefix: str, room: Matrix, kv: str, offset: int, chunk: int
    ) -> None:
        self._room = room  # [T, H N + H V]
        self._expand = weights.linear(prefix + "k_b_proj.weight", prefix + "v_b_proj.weight")
        self._attention = ExpandedAttention(
            heads=dims.heads,
            nope_dim=dims.nope,
            rope_dim=dims.rope,
            value_dim=dims.v,
            kv=kv,
            offset=offset,
            capacity=chunk,
        )

    def __call__(self, inputs: Inputs, pages: PageList, first: int, n: int, out: Activations) -> None:
        rope = inputs.rope
        self._expand(inputs.latent, n, self._room)
        self._attention(
            inputs.q,
            self._room,
            inputs.compressed,
            inputs.column,
            rope.cos,
            rope.sin,
            pages,
            first,
            n,
            out,
        )


class _LatentBuffers:
    """[H T] rows are the tokens of one head after another."""

    def __init__(self, dims: Dims, chunk: int) -> None:
        rows = dims.heads * chunk
        self.nope = activations(rows, dims.nope)
        self.absorbed = Activations(chunk, dims.heads * dims.rank, ints=False)
        self.context = activations(rows, dims.rank)


class _Latent:
    def __init__(
        self,
        dims: Dims,
        weights: Weights,
        prefix: str,
        buffers: _LatentBuffers,
        kv: str,
        offset: int,
        chunk: int,
    ) -> None:
        self._heads, self._buffers = dims.heads, buffers
        self._absorb = Grouped(weights.parts(prefix + "k_b_proj_t.weight", dims.heads))
        self._values = Grouped(weights.parts(prefix + "v_b_proj.weight", dims.heads))
        self._attention = LatentAttention(
            heads=dims.heads,
            rank=dims.rank,
            nope_dim=dims.nope,
            rope_dim=dims.rope,
            kv=kv,
            offset=offset,
            capacity=chunk,
        )

    def __call__(self, inputs: Inputs, pages: PageList, first: int, n: int, out: Activations) -> None:
        own, rope = self._buffers, inputs.rope
        split_heads(inputs.q, n, own.nope, heads=self._heads)
        self._absorb(own.nope, n, own.absorbed)
        self._attention(
            own.absorbed,
            inputs.q,
            inputs.latent,
            inputs.compressed,
            inputs.column,
            rope.cos,
            rope.sin,
            pages,
            first,
            n,
            own.context,
        )
        self._values(own.context, n, out)
