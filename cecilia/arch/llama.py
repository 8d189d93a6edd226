# SPDX-License-Identifier: Apache-2.0
"""Llama (SmolLM2 and its kind): x is the residual stream [T, D]; heads share KV heads in groups.

x = embed_tokens[tokens]
each layer:  h = rmsnorm(x);  q, k, v = h Wq, h Wk, h Wv;  rotate q and k by halves;  keep k and v
             x += attention(q, keys so far, values so far) Wo
             h = rmsnorm(x);  x += (silu(h Wgate) * (h Wup)) Wdown
logits = rmsnorm(x) Whead        Whead is embed_tokens when the file is tied
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cecilia._kernels.attention import Attention
from cecilia._kernels.buffer import Activations, Matrix, PageList
from cecilia._kernels.linear import Linear
from cecilia._kernels.pointwise import rmsnorm, swiglu
from cecilia.arch.base import Hints, TensorSpec, bad_hyper, matrix, parse_hyper, vector
from cecilia.layers.rope import Rope
from cecilia.layers.weights import Weights

HINTS = Hints()

HEAD_ROWS = (
    16  # tokens whose logits are computed together: V is large, so they are never all held for a chunk
)

EMBED = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LlamaSpec:
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


def spec_from(hyper: Mapping[str, object]) -> LlamaSpec:
    """The spec of a file's `hyper`. Raises ModelFileError `bad_hyper` naming the key."""
    spec = parse_hyper(LlamaSpec, hyper)
    if spec.heads % spec.kv_heads:
        raise bad_hyper("kv_heads", f"is {spec.kv_heads}, which does not divide heads {spec.heads}")
    if spec.head_dim % 16:
        raise bad_hyper("head_dim", f"is {spec.head_dim}, expected a multiple of 16")
    if spec.norm_eps >= 1:
        raise bad_hyper("norm_eps", f"is {spec.norm_eps}, expected less than 1")
    if spec.layers > 1024:
        raise bad_hyper("layers", f"is {spec.layers}, expected at most 1024")
    return spec


def tensors(spec: LlamaSpec) -> dict[str, TensorSpec]:
    """All tensors of the file, by checkpoint name."""
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    found = {EMBED: matrix(spec.vocab, spec.width), NORM: vector(spec.width)}
    if not spec.tied:
        found[HEAD] = matrix(spec.vocab, spec.width)
    for i in range(spec.layers):
        p = f"model.layers.{i}."
        found[p + "input_layernorm.weight"] = vector(spec.width, i)
        found[p + "self_attn.q_proj.weight"] = matrix(q_rows, spec.width, i)
        found[p + "self_attn.k_proj.weight"] = matrix(kv_rows, spec.width, i)
        found[p + "self_attn.v_proj.weight"] = matrix(kv_rows, spec.width, i)
        found[p + "self_attn.o_proj.weight"] = matrix(spec.width, q_rows, i)
        found[p + "post_attention_layernorm.weight"] = vector(spec.width, i)
        found[p + "mlp.gate_proj.weight"] = matrix(spec.ff, spec.width, i)
        found[p + "mlp.up_proj.weight"] = matrix(spec.ff, spec.width, i)
        found[p + "mlp.down_proj.weight"] = matrix(spec.width, spec.ff, i)
    return found


def bind(spec: LlamaSpec, weights: Weights, *, kv: str, chunk: int) -> Llama:
    """The model over checked weights, with a KV cache of format `kv` (f32, bf16, int8)."""
    return Llama(spec, weights, kv, chunk)


class _Layer:
    """One layer's operands; its part of each KV page starts at `offset`."""

    """One layer's operands; its part of each KV page starts at `offset`."""

    def __init__(
        self, spec: LlamaSpec, weights: Weights, index: int, kv: str, offset: int, chunk: int
    ) -> None:
        p = f"model.layers.{index}."
        attn, mlp = p + "self_attn.", p + "mlp."
        self.input_norm = weights.vector(p + "input_layernorm.weight")
        self.qkv = weights.linear(attn + "q_proj.weight", attn + "k_proj.weight", attn + "v_proj.weight")
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


class Llama:
    """Weights and work buffers of a loaded model. Not for two threads at once."""

    def __init__(self, spec: LlamaSpec, weights: Weights, kv: str, chunk: int) -> None:
        self.chunk = chunk
        self.page_bytes = 0
        self._spec = spec
        self._embed = weights.weight(EMBED)
        self._layers: list[_Layer] = []
        for i in range(spec.layers):
            self._layers.append(_Layer(spec, weights, i, kv, self.page_bytes, chunk))
            self.page_bytes += self._layers[-1].attention.page_bytes
        self._norm = weights.vector(NORM)
        self._head = Linear([self._embed]) if spec.tied else weights.linear(HEAD)
        self._allocate(chunk)

    def _allocate(self, chunk: int) -> None:
        """The work buffers of a forward pass, shared by all layers."""
        spec, layers = self._spec, self._layers
        head_rows = min(chunk, HEAD_ROWS)
        self._rope = Rope(spec.head_dim, spec.rope_base, chunk)
        self._x = Matrix(chunk, spec.width)
        inputs = any(layer.qkv.ints or layer.gate_up.ints for layer in layers)
        self._h = Activations(chunk, spec.width, ints=inputs)
        self._qkv = Matrix(chunk, (spec.heads + 2 * spec.kv_heads) * spec.head_dim)
        outputs = any(layer.o.ints for layer in layers)
        self._attended = Activations(chunk, spec.heads * spec.head_dim, ints=outputs)
        self._gate_up = Matrix(chunk, 2 * spec.ff)
        self._gated = Activations(chunk, spec.ff, ints=any(layer.down.ints for layer in layers))
        self._last = Activations(head_rows, spec.width, ints=self._head.ints)
        self._logits = Matrix(head_rows, spec.vocab)
        self._logits_view = np.asarray(self._logits)

    def forward(
        self, tokens: Sequence[int], pages: PageList, first: int, *, last_only: bool
    ) -> NDArray[np.float32]:
        """Logits f32 [T, V] of tokens [T] at positions first, first + 1 ...; see `base.Model`."""
        n, x, eps, rope = len(tokens), self._x, self._spec.norm_eps, self._rope
        self._embed.gather(tokens, x)
        rope.fill(first, n)
        for layer in self._layers:
            rmsnorm(x, layer.input_norm, eps, self._h, n)
            layer.qkv(self._h, n, self._qkv)
            layer.attention(self._qkv, rope.cos, rope.sin, pages, first, n, self._attended)
            layer.o(self._attended, n, x, add=True)
            rmsnorm(x, layer.mlp_norm, eps, self._h, n)
            layer.gate_up(self._h, n, self._gate_up)
            swiglu(self._gate_up, self._gated, n)
            layer.down(self._gated, n, x, add=True)
        return self._logits_of(n - 1, n) if last_only else self._all_logits(n)

    def _logits_of(self, first: int, end: int) -> NDArray[np.float32]:
        """Logits of rows first .. end of x, at most HEAD_ROWS: a view."""
        n = end - first
        rmsnorm(self._x, self._norm, self._spec.norm_eps, self._last, n, first=first)
        self._head(self._last, n, self._logits)
        return self._logits_view[:n]

    def _all_logits(self, tokens: int) -> NDArray[np.float32]:
        logits = np.empty((tokens, self._spec.vocab), np.float32)
        step = self._last.rows
        for first in range(0, tokens, step):
            end = min(first + step, tokens)
            logits[first:end] = self._logits_of(first, end)
        return logits
