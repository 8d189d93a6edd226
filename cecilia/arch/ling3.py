# SPDX-License-Identifier: Apache-2.0
"""Ling-3.0 (BailingMoeV3): delta attention and latent attention in turns, experts behind both.

x = word_embeddings[tokens]                                          x is the residual stream [T, D]
each layer:  h = rmsnorm(x)
   KDA  q, k, v, f, z, b = h Wq, h Wk, h Wv, h Wf, h Wg, h Wb;  x += delta(q, k, v, f, z, b) Wo
   MLA  q = rmsnorm(h Wqa) Wqb, or h Wq;  latent, r = h Wkva;  k, v = rmsnorm(latent) Wkb, Wvb
        rotate r and the last part of each head's q by pairs
        x += (attention(q, (k, r), v) * sigmoid(h Wg)) Wdense
   h = rmsnorm(x);  the first layers: x += (silu(h Wgate) * (h Wup)) Wdown
                    the others: x += chosen experts(h) + shared expert(h), chosen by the router from h Wrouter
logits = rmsnorm(x) Wlm_head
The last layer of each group is MLA, and those behind the last whole group; the others are KDA.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cecilia._kernels import delta
from cecilia._kernels.buffer import Matrix
from cecilia._kernels.delta import Delta
from cecilia._kernels.experts import ExpertBuffers, Experts, GroupRouter, Routes
from cecilia._kernels.pointwise import gate_heads, rmsnorm, swiglu
from cecilia.arch.base import Hints, TensorSpec, bad_hyper, matrix, parse_hyper, vector
from cecilia.layers import mla
from cecilia.layers.head import Head
from cecilia.layers.mla import Attend, Inputs
from cecilia.layers.rope import Rope, Yarn
from cecilia.layers.weights import Weights, activations
from cecilia.state.state import State

HINTS = Hints(think=("<think>", "</think>"), stops=("<|role_end|>",))
RECIPES = mla.RECIPES

CONV_WIDTH = 4
FLOATS = frozenset({"f32", "bf16"})

EMBED = "model.word_embeddings.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Ling3Spec:
    """Hyper-parameters, the keys of a file's `hyper`. width D, heads H, head_dim K of KDA; ranks of MLA.

    q_rank 0: queries come straight from h. yarn_factor 1: no YaRN.
    """

    layers: int
    width: int
    heads: int
    head_dim: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    group: int
    dense_layers: int
    dense_ff: int
    experts: int
    experts_used: int
    expert_groups: int
    expert_groups_used: int
    expert_ff: int
    shared_ff: int
    route_scale: float
    gate_lower_bound: float
    vocab: int
    context: int
    norm_eps: float
    rope_base: float
    yarn_factor: float
    yarn_context: int

    def is_mla(self, layer: int) -> bool:
        """Whether a layer is MLA, else KDA."""
        return (layer + 1) % self.group == 0 or layer >= self.layers // self.group * self.group


def spec_from(hyper: Mapping[str, object]) -> Ling3Spec:
    """The spec of a file's `hyper`. Raises ModelFileError `bad_hyper` naming the key."""
    spec = parse_hyper(Ling3Spec, hyper, zero=("q_rank", "dense_layers"), negative=("gate_lower_bound",))
    for key in ("head_dim", "kv_rank", "nope_dim", "rope_dim", "v_dim"):
        if getattr(spec, key) % 16:
            raise bad_hyper(key, f"is {getattr(spec, key)}, expected a multiple of 16")
    if not mla.can_hold(spec.kv_rank):
        raise bad_hyper("kv_rank", f"is {spec.kv_rank}, which takes too many parts")
    if spec.experts % spec.expert_groups or spec.experts // spec.expert_groups < 2:
        raise bad_hyper(
            "expert_groups", f"is {spec.expert_groups}, which leaves no two of {spec.experts} experts"
        )
    if spec.expert_groups_used > spec.expert_groups:
        raise bad_hyper("expert_groups_used", f"is {spec.expert_groups_used} of {spec.expert_groups}")
    if spec.experts_used > spec.expert_groups_used * (spec.experts // spec.expert_groups):
        raise bad_hyper("experts_used", f"is {spec.experts_used}, more than the chosen groups hold")
    if spec.norm_eps >= 1:
        raise bad_hyper("norm_eps", f"is {spec.norm_eps}, expected less than 1")
    if spec.layers > 1024:
        raise bad_hyper("layers", f"is {spec.layers}, expected at most 1024")
    if spec.yarn_factor < 1:
        raise bad_hyper("yarn_factor", f"is {spec.yarn_factor}, expected 1 or more")
    return spec


# ---- tensors ----------------------------------------------------------------------------------------------


def tensors(spec: Ling3Spec) -> dict[str, TensorSpec]:
    """All tensors of the file, by checkpoint name, in the order a forward pass reads them."""
    found = {EMBED: matrix(spec.vocab, spec.width)}
    for i in range(spec.layers):
        prefix = f"model.layers.{i}."
        found[prefix + "input_layernorm.weight"] = vector(spec.width, i)
        attention = _mla_tensors(spec, i) if spec.is_mla(i) else _kda_tensors(spec, i)
        found.update((f"{prefix}attention.{name}", tensor) for name, tensor in attention)
        found[prefix + "post_attention_layernorm.weight"] = vector(spec.width, i)
        inner = _dense_tensors(spec, i) if i < spec.dense_layers else _expert_tensors(spec, i)
        found.update((f"{prefix}mlp.{name}", tensor) for name, tensor in inner)
    found[NORM] = vector(spec.width)
    found[HEAD] = matrix(spec.vocab, spec.width)
    return found


def _floats(rows: int, cols: int, layer: int) -> TensorSpec:
    """A matrix that decides too much to be quantised."""
    return TensorSpec(2, rows, cols, layer, FLOATS)


def _kda_tensors(spec: Ling3Spec, i: int) -> Iterator[tuple[str, TensorSpec]]:
    inner = spec.heads * spec.head_dim
    for name in ("q", "k", "v", "f", "g"):
        yield f"{name}_proj.weight", matrix(inner, spec.width, i)
    yield "b_proj.weight", _floats(spec.heads, spec.width, i)
    for name in ("q", "k", "v"):
        yield f"{name}_conv1d.weight", vector(inner * CONV_WIDTH, i)
    yield "A", vector(spec.heads, i)
    yield "dt_bias", vector(inner, i)
    yield "o_norm.weight", vector(spec.head_dim, i)
    yield "o_proj.weight", matrix(spec.width, inner, i)


def _mla_tensors(spec: Ling3Spec, i: int) -> Iterator[tuple[str, TensorSpec]]:
    q_rows = spec.heads * (spec.nope_dim + spec.rope_dim)
    if spec.q_rank:
        yield "q_a_proj.weight", matrix(spec.q_rank, spec.width, i)
        yield "q_a_layernorm.weight", vector(spec.q_rank, i)
        yield "q_b_proj.weight", matrix(q_rows, spec.q_rank, i)
    else:
        yield "q_proj.weight", matrix(q_rows, spec.width, i)
    yield "kv_a_proj_with_mqa.weight", matrix(spec.kv_rank + spec.rope_dim, spec.width, i)
    yield "kv_a_layernorm.weight", vector(spec.kv_rank, i)
    # Expanded recipes make keys with the first; latent ones take queries to the latent space with the second,
    # each head's matrix transposed: a quantised matrix cannot be turned without changing its values.
    yield "k_b_proj.weight", matrix(spec.heads * spec.nope_dim, spec.kv_rank, i)
    yield "k_b_proj_t.weight", matrix(spec.heads * spec.kv_rank, spec.nope_dim, i)
    yield "v_b_proj.weight", matrix(spec.heads * spec.v_dim, spec.kv_rank, i)
    yield "g_proj.weight", _floats(spec.heads, spec.width, i)
    yield "dense.weight", matrix(spec.width, spec.heads * spec.v_dim, i)


def _swiglu_tensors(prefix: str, ff: int, spec: Ling3Spec, i: int) -> Iterator[tuple[str, TensorSpec]]:
    yield f"{prefix}gate_proj.weight", matrix(ff, spec.width, i)
    yield f"{prefix}up_proj.weight", matrix(ff, spec.width, i)
    yield f"{prefix}down_proj.weight", matrix(spec.width, ff, i)


def _dense_tensors(spec: Ling3Spec, i: int) -> Iterator[tuple[str, TensorSpec]]:
    return _swiglu_tensors("", spec.dense_ff, spec, i)


def _expert_tensors(spec: Ling3Spec, i: int) -> Iterator[tuple[str, TensorSpec]]:
    yield "gate.weight", _floats(spec.experts, spec.width, i)
    yield "gate.expert_bias", vector(spec.experts, i)
    for e in range(spec.experts):
        yield from _swiglu_tensors(f"experts.{e}.", spec.expert_ff, spec, i)
    yield from _swiglu_tensors("shared_experts.", spec.shared_ff, spec, i)


def looked_up(_spec: Ling3Spec) -> frozenset[str]:
    """The tensors of which a token reads one row and nothing else."""
    return frozenset({EMBED})


# ---- window ----------------------------------------------------------------------------------------------

STRETCH = 2.0  # YaRN's factor in the published settings for windows beyond the native one


def longest_window(spec: Ling3Spec) -> int:
    """Most positions of a window: twice the native ones with YaRN, unless the file has it already."""
    return int(spec.context * STRETCH) if spec.yarn_factor == 1 else spec.context


def for_window(spec: Ling3Spec, window: int) -> Ling3Spec:
    """The spec for a window: beyond the native one YaRN stretches it, from the first position on."""
    if window <= spec.context:
        return spec
    return replace(spec, yarn_factor=STRETCH, yarn_context=spec.context, context=longest_window(spec))


def rope_mode(spec: Ling3Spec) -> str:
    """ "default" or "yarn-" and the factor."""
    return "default" if spec.yarn_factor == 1 else f"yarn-{spec.yarn_factor:g}"


# ---- state ------------------------------------------------------------------------------------------------


def page_bytes(spec: Ling3Spec, kv: str) -> int:
    """Bytes of a KV page: 64 positions of the MLA layers."""
    return sum(spec.is_mla(i) for i in range(spec.layers)) * mla.page_bytes(_dims(spec), kv)


def _dims(spec: Ling3Spec) -> mla.Dims:
    return mla.Dims(spec.heads, spec.kv_rank, spec.nope_dim, spec.rope_dim, spec.v_dim)


def state_bytes(spec: Ling3Spec) -> int:
    """Bytes of the states of the KDA layers."""
    layers = sum(not spec.is_mla(i) for i in range(spec.layers))
    return layers * delta.state_bytes(spec.heads, spec.head_dim)


# ---- layers -----------------------------------------------------------------------------------------------


class _Buffers:
    """Work buffers of a forward pass, shared by all layers; activations quantised too where they can be."""

    def __init__(self, spec: Ling3Spec, chunk: int) -> None:
        inner = spec.heads * spec.head_dim
        self.x = Matrix(chunk, spec.width)
        self.h = activations(chunk, spec.width)
        self.kda = Matrix(chunk, 5 * inner + spec.heads)
        self.kda_out = activations(chunk, inner)
        self.compressed = Matrix(chunk, spec.q_rank + spec.kv_rank + spec.rope_dim + spec.heads)
        self.q_latent = activations(chunk, max(spec.q_rank, 1))
        self.kv_latent = activations(chunk, spec.kv_rank)
        self.q = Matrix(chunk, spec.heads * (spec.nope_dim + spec.rope_dim))
        self.mla_out = activations(chunk, spec.heads * spec.v_dim)
        self.gate_up = Matrix(chunk, 2 * spec.dense_ff)
        self.gated = activations(chunk, spec.dense_ff)
        self.router = Matrix(chunk, spec.experts)
        self.routes = Routes(experts=spec.experts, used=spec.experts_used, capacity=chunk)
        self.experts = ExpertBuffers(
            cols=spec.width,
            ff=spec.expert_ff,
            shared_ff=spec.shared_ff,
            used=spec.experts_used,
            capacity=chunk,
        )
        yarn = Yarn(spec.yarn_factor, spec.yarn_context) if spec.yarn_factor > 1 else None
        self.rope = Rope(spec.rope_dim, spec.rope_base, chunk, yarn=yarn)
        shared = spec.q_rank + spec.kv_rank
        self.attention = Inputs(self.q, self.kv_latent, self.compressed, shared, self.rope)


class _Kda:
    """Kimi Delta Attention of one layer; its state starts at `offset`."""

    def __init__(self, spec: Ling3Spec, weights: Weights, prefix: str, offset: int, chunk: int) -> None:
        names = [f"{prefix}{name}_proj.weight" for name in ("q", "k", "v", "f", "g", "b")]
        self._inputs = weights.linear(*names)
        self._delta = Delta(
            heads=spec.heads,
            head_dim=spec.head_dim,
            conv=weights.vector(*(f"{prefix}{name}_conv1d.weight" for name in ("q", "k", "v"))),
            a=weights.vector(prefix + "A"),
            dt_bias=weights.vector(prefix + "dt_bias"),
            norm=weights.vector(prefix + "o_norm.weight"),
            eps=spec.norm_eps,
            lower_bound=spec.gate_lower_bound,
            offset=offset,
            capacity=chunk,
        )
        self._o = weights.linear(prefix + "o_proj.weight")

    def __call__(self, b: _Buffers, state: State, _first: int, n: int) -> None:
        """x += KDA(h); a recurrence does not know where it is."""
        self._inputs(b.h, n, b.kda)
        self._delta(b.kda, state.fixed, n, b.kda_out)
        self._o(b.kda_out, n, b.x, add=True)


class _Mla:
    """Multi-head latent attention of one layer; `attend` is the form that the recipe asks for."""

    def __init__(self, spec: Ling3Spec, weights: Weights, prefix: str, attend: Attend) -> None:
        self._spec = spec
        inputs = ["kv_a_proj_with_mqa.weight", "g_proj.weight"]
        self._q_norm = None
        if spec.q_rank:
            inputs.insert(0, "q_a_proj.weight")
            self._q_norm = weights.vector(prefix + "q_a_layernorm.weight")
        self._inputs = weights.linear(*(prefix + name for name in inputs))
        self._q = weights.linear(prefix + ("q_b_proj.weight" if spec.q_rank else "q_proj.weight"))
        self._kv_norm = weights.vector(prefix + "kv_a_layernorm.weight")
        self._attend = attend
        self._o = weights.linear(prefix + "dense.weight")

    def __call__(self, b: _Buffers, state: State, first: int, n: int) -> None:
        """x += MLA(h)."""
        spec = self._spec
        latent = spec.q_rank  # columns of `compressed`: q latent, kv latent, shared key, gates
        shared = latent + spec.kv_rank
        self._inputs(b.h, n, b.compressed)
        if self._q_norm is None:
            self._q(b.h, n, b.q)
        else:
            rmsnorm(b.compressed, self._q_norm, spec.norm_eps, b.q_latent, n)
            self._q(b.q_latent, n, b.q)
        rmsnorm(b.compressed, self._kv_norm, spec.norm_eps, b.kv_latent, n, column=latent)
        self._attend(b.attention, state.pages, first, n, b.mla_out)
        gate_heads(b.mla_out, b.compressed, n, column=shared + spec.rope_dim, heads=spec.heads)
        self._o(b.mla_out, n, b.x, add=True)


class _DenseMlp:
    """The SwiGLU block of the first layers."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._gate_up = weights.linear(prefix + "gate_proj.weight", prefix + "up_proj.weight")
        self._down = weights.linear(prefix + "down_proj.weight")

    def __call__(self, b: _Buffers, n: int) -> None:
        """x += MLP(h)."""
        self._gate_up(b.h, n, b.gate_up)
        swiglu(b.gate_up, b.gated, n)
        self._down(b.gated, n, b.x, add=True)


class _Moe:
    """Router, experts and the shared expert."""

    def __init__(self, spec: Ling3Spec, weights: Weights, prefix: str, buffers: ExpertBuffers) -> None:
        self._logits = weights.linear(prefix + "gate.weight")
        self._router = GroupRouter(
            weights.vector(prefix + "gate.expert_bias"),
            groups=spec.expert_groups,
            groups_used=spec.expert_groups_used,
            scale=spec.route_scale,
        )
        parts = [
            [weights.weight(f"{prefix}experts.{e}.{part}_proj.weight") for e in range(spec.experts)]
            for part in ("gate", "up", "down")
        ]
        gate, up, down = (
            weights.weight(f"{prefix}shared_experts.{part}_proj.weight") for part in ("gate", "up", "down")
        )
        self._experts = Experts(*parts, shared=(gate, up, down), buffers=buffers)

    def __call__(self, b: _Buffers, n: int) -> None:
        """x += experts(h); the router reads h as f32."""
        self._logits(b.h, n, b.router)
        self._router(b.router, n, b.routes)
        self._experts(b.h, b.routes, b.x)


class _Layer:
    """Norms, attention and feed-forward block of one layer."""

    def __init__(
        self, spec: Ling3Spec, weights: Weights, index: int, attention: _Kda | _Mla, buffers: _Buffers
    ) -> None:
        prefix = f"model.layers.{index}."
        self.norm = weights.vector(prefix + "input_layernorm.weight")
        self.attention = attention
        self.mlp_norm = weights.vector(prefix + "post_attention_layernorm.weight")
        self.mlp: _DenseMlp | _Moe
        if index < spec.dense_layers:
            self.mlp = _DenseMlp(weights, prefix + "mlp.")
        else:
            self.mlp = _Moe(spec, weights, prefix + "mlp.", buffers.experts)


def _attentions(spec: Ling3Spec, weights: Weights, *, kv: str, chunk: int) -> Iterator[_Kda | _Mla]:
    """The attention of every layer; those of a kind lie one after another in its part of the state."""
    form = mla.form(_dims(spec), kv=kv, chunk=chunk)
    pages = states = 0  # where the next layer of a kind begins, in a page and in the fixed state
    for i in range(spec.layers):
        prefix = f"model.layers.{i}.attention."
        if spec.is_mla(i):
            yield _Mla(spec, weights, prefix, form(weights, prefix, pages))
            pages += mla.page_bytes(_dims(spec), kv)
        else:
            yield _Kda(spec, weights, prefix, states, chunk)
            states += delta.state_bytes(spec.heads, spec.head_dim)


class Ling3:
    """Weights and work buffers of a loaded model. Not for two threads at once."""

    def __init__(self, spec: Ling3Spec, weights: Weights, *, kv: str, chunk: int) -> None:
        self.chunk = chunk
        self._spec = spec
        self._embed = weights.weight(EMBED)
        self._buffers = _Buffers(spec, chunk)
        self._layers = [
            _Layer(spec, weights, i, attention, self._buffers)
            for i, attention in enumerate(_attentions(spec, weights, kv=kv, chunk=chunk))
        ]
        self._head = Head(weights.vector(NORM), weights.linear(HEAD), spec.norm_eps, chunk=chunk)

    def forward(
        self, tokens: Sequence[int], state: State, first: int, *, last_only: bool
    ) -> NDArray[np.float32]:
        """Logits f32 [T, V] of tokens [T] at positions first, first + 1 ...; see `base.Model`."""
        n, b, eps = len(tokens), self._buffers, self._spec.norm_eps
        self._embed.gather(tokens, b.x)
        b.rope.fill(first, n)
        for layer in self._layers:
            rmsnorm(b.x, layer.norm, eps, b.h, n)
            layer.attention(b, state, first, n)
            rmsnorm(b.x, layer.mlp_norm, eps, b.h, n)
            layer.mlp(b, n)
        return self._head(b.x, n, last_only=last_only)


def bind(spec: Ling3Spec, weights: Weights, *, kv: str, chunk: int) -> Ling3:
    """The model over checked weights, with a cache of recipe `kv`, one of RECIPES."""
    return Ling3(spec, weights, kv=kv, chunk=chunk)
