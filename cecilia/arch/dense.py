# SPDX-License-Identifier: Apache-2.0
"""What the dense decoders share: hyper-parameters, tensors and the forward pass.

Their recipes stand in the modules of their names; they differ in `Variant` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cecilia._kernels import attention
from cecilia._kernels.attention import Attention
from cecilia._kernels.buffer import Activations, Matrix
from cecilia._kernels.linear import Linear
from cecilia._kernels.paged import RECIPES as KV_RECIPES
from cecilia._kernels.pointwise import add_bias, rmsnorm, rmsnorm_heads, swiglu
from cecilia.arch.base import TensorSpec, bad_hyper, matrix, parse_hyper, vector
from cecilia.layers.head import Head
from cecilia.layers.rope import Rope
from cecilia.layers.weights import Weights
from cecilia.state.state import State

RECIPES = tuple(KV_RECIPES)

EMBED = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Variant:
    """What one dense decoder has and another has not."""

    qkv_bias: bool = False  # q, k and v get a bias
    qk_norm: bool = False  # each head of q and k is normed before it is rotated


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """Hyper-parameters, the keys of a file's `hyper`. width D, heads H, head_dim K."""

    layers: int
    width: int
    ff: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_eps: float
    rope_base: float
    tied: bool


def spec_from(hyper: Mapping[str, object]) -> DenseSpec:
    """The spec of a file's `hyper`. Raises ModelFileError `bad_hyper` naming the key."""
    spec = parse_hyper(DenseSpec, hyper)
    if spec.heads % spec.kv_heads:
        raise bad_hyper("kv_heads", f"is {spec.kv_heads}, which does not divide heads {spec.heads}")
    if spec.head_dim % 16:
        raise bad_hyper("head_dim", f"is {spec.head_dim}, expected a multiple of 16")
    if spec.norm_eps >= 1:
        raise bad_hyper("norm_eps", f"is {spec.norm_eps}, expected less than 1")
    if spec.layers > 1024:
        raise bad_hyper("layers", f"is {spec.layers}, expected at most 1024")
    return spec


def tensors(spec: DenseSpec, variant: Variant) -> dict[str, TensorSpec]:
    """All tensors of the file, by checkpoint name, in the order a forward pass reads them."""
    found = {EMBED: matrix(spec.vocab, spec.width)}
    for i in range(spec.layers):
        found.update(_layer_tensors(spec, variant, i))
    found[NORM] = vector(spec.width)
    if not spec.tied:
        found[HEAD] = matrix(spec.vocab, spec.width)
    return found


def _layer_tensors(spec: DenseSpec, variant: Variant, i: int) -> Iterator[tuple[str, TensorSpec]]:
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    attn, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
    projections = (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows))
    yield f"model.layers.{i}.input_layernorm.weight", vector(spec.width, i)
    for name, rows in projections:
        yield f"{attn}{name}.weight", matrix(rows, spec.width, i)
    if variant.qkv_bias:
        for name, rows in projections:
            yield f"{attn}{name}.bias", vector(rows, i)
    if variant.qk_norm:
        yield attn + "q_norm.weight", vector(spec.head_dim, i)
        yield attn + "k_norm.weight", vector(spec.head_dim, i)
    yield attn + "o_proj.weight", matrix(spec.width, q_rows, i)
    yield f"model.layers.{i}.post_attention_layernorm.weight", vector(spec.width, i)
    yield mlp + "gate_proj.weight", matrix(spec.ff, spec.width, i)
    yield mlp + "up_proj.weight", matrix(spec.ff, spec.width, i)
    yield mlp + "down_proj.weight", matrix(spec.width, spec.ff, i)


def looked_up(spec: DenseSpec) -> frozenset[str]:
    """The tensors of which a token reads one row and nothing else; a tied embedding is the head too."""
    return frozenset() if spec.tied else frozenset({EMBED})


def longest_window(spec: DenseSpec) -> int:
    """Most positions of a window: the native ones."""
    return spec.context


def for_window(spec: DenseSpec, _window: int) -> DenseSpec:
    """The spec for a window: RoPE is never stretched."""
    return spec


def rope_mode(_spec: DenseSpec) -> str:
    """Always "default"."""
    return "default"


def page_bytes(spec: DenseSpec, kv: str) -> int:
    """Bytes of a KV page: 64 positions of all layers."""
    return spec.layers * _layer_page_bytes(spec, kv)


def state_bytes(_spec: DenseSpec) -> int:
    """None: attention keeps everything in pages."""
    return 0


def _layer_page_bytes(spec: DenseSpec, kv: str) -> int:
    return attention.page_bytes(kv, spec.kv_heads, spec.head_dim, spec.head_dim)


class _Layer:
    """One layer's operands; its part of each KV page starts at `offset`. What a variant lacks is None."""

    def __init__(
        self,
        spec: DenseSpec,
        variant: Variant,
        weights: Weights,
        index: int,
        *,
        kv: str,
        offset: int,
        chunk: int,
    ) -> None:
        p = f"model.layers.{index}."
        attn, mlp = p + "self_attn.", p + "mlp."
        q, k, v = (attn + name for name in ("q_proj", "k_proj", "v_proj"))
        self.input_norm = weights.vector(p + "input_layernorm.weight")
        self.qkv = weights.linear(q + ".weight", k + ".weight", v + ".weight")
        self.bias = weights.vector(q + ".bias", k + ".bias", v + ".bias") if variant.qkv_bias else None
        self.q_norm = weights.vector(attn + "q_norm.weight") if variant.qk_norm else None
        self.k_norm = weights.vector(attn + "k_norm.weight") if variant.qk_norm else None
        self.attention = Attention(
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            kv=kv,
            offset=offset,
            capacity=chunk,
        )
        self.o = weights.linear(attn + "o_proj.weight")
        self.mlp_norm = weights.vector(p + "post_attention_layernorm.weight")
        self.gate_up = weights.linear(mlp + "gate_proj.weight", mlp + "up_proj.weight")
        self.down = weights.linear(mlp + "down_proj.weight")


class Dense:
    """Weights and work buffers of a loaded model. Not for two threads at once."""

    def __init__(self, spec: DenseSpec, variant: Variant, weights: Weights, *, kv: str, chunk: int) -> None:
        self.chunk = chunk
        self._spec = spec
        self._embed = weights.weight(EMBED)
        self._layers: list[_Layer] = []
        for i in range(spec.layers):
            offset = i * _layer_page_bytes(spec, kv)
            self._layers.append(_Layer(spec, variant, weights, i, kv=kv, offset=offset, chunk=chunk))
        head = Linear([self._embed]) if spec.tied else weights.linear(HEAD)
        self._head = Head(weights.vector(NORM), head, spec.norm_eps, chunk=chunk)
        self._allocate(chunk)

    def _allocate(self, chunk: int) -> None:
        """The work buffers of a forward pass, shared by all layers."""
        spec, layers = self._spec, self._layers
        self._rope = Rope(spec.head_dim, spec.rope_base, chunk)
        self._x = Matrix(chunk, spec.width)
        inputs = any(layer.qkv.ints or layer.gate_up.ints for layer in layers)
        self._h = Activations(chunk, spec.width, ints=inputs)
        self._qkv = Matrix(chunk, (spec.heads + 2 * spec.kv_heads) * spec.head_dim)
        outputs = any(layer.o.ints for layer in layers)
        self._attended = Activations(chunk, spec.heads * spec.head_dim, ints=outputs)
        self._gate_up = Matrix(chunk, 2 * spec.ff)
        self._gated = Activations(chunk, spec.ff, ints=any(layer.down.ints for layer in layers))

    def forward(
        self, tokens: Sequence[int], state: State, first: int, *, last_only: bool
    ) -> NDArray[np.float32]:
        """Logits f32 [T, V] of tokens [T] at positions first, first + 1 ...; see `base.Model`."""
        n, x, eps, rope = len(tokens), self._x, self._spec.norm_eps, self._rope
        self._embed.gather(tokens, x)
        rope.fill(first, n)
        for layer in self._layers:
            rmsnorm(x, layer.input_norm, eps, self._h, n)
            layer.qkv(self._h, n, self._qkv)
            self._adjust_heads(layer, n)
            layer.attention(self._qkv, rope.cos, rope.sin, state.pages, first, n, self._attended)
            layer.o(self._attended, n, x, add=True)
            rmsnorm(x, layer.mlp_norm, eps, self._h, n)
            layer.gate_up(self._h, n, self._gate_up)
            swiglu(self._gate_up, self._gated, n)
            layer.down(self._gated, n, x, add=True)
        return self._head(x, n, last_only=last_only)

    def _adjust_heads(self, layer: _Layer, n: int) -> None:
        """What the variant does to q, k and v [T, (H + 2G) K] before they are rotated."""
        heads, kv_heads, eps = self._spec.heads, self._spec.kv_heads, self._spec.norm_eps
        if layer.bias is not None:
            add_bias(self._qkv, layer.bias, n)
        if layer.q_norm is not None and layer.k_norm is not None:
            rmsnorm_heads(self._qkv, layer.q_norm, eps, n, first=0, heads=heads)
            rmsnorm_heads(self._qkv, layer.k_norm, eps, n, first=heads, heads=kv_heads)
