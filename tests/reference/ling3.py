# SPDX-License-Identifier: Apache-2.0
"""Ling-3.0 (BailingMoeV3) in plain numpy, written to be checked by eye: the yardstick for the engine.

It reads the official checkpoint: its config.json and its tensor names, matrices [out, in]. A whole sequence
is one call and nothing is cached; the delta rule is the plain recurrence, MLA is the expanded form.

Sources: Kimi Delta Attention (arXiv 2510.26692) with the bounded gate of this model, multi-head latent
attention (DeepSeek-V2, arXiv 2405.04434), group-limited sigmoid routing (DeepSeek-V3, arXiv 2412.19437), YaRN
(arXiv 2309.00071).
Letters: T tokens, D model width, H heads, K head width, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .llama import Array, mlp, rms_norm, softmax

Weight = Callable[[str], Array]
"""A tensor by the rest of its name."""


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def is_mla(layer: int, config: Mapping[str, Any]) -> bool:
    """The last layer of each group is MLA, and so are those behind the last whole group; others are KDA."""
    group, layers = config["layer_group_size"], config["num_hidden_layers"]
    return (layer + 1) % group == 0 or layer >= layers // group * group


# ---- KDA --------------------------------------------------------------------------------------------------


def short_conv(x: Array, taps: Array) -> Array:
    """silu(y), y[t, c] = sum over w of taps[c, 0, w] x[t - W + 1 + w, c], x [T, C]; zeros first."""
    width = taps.shape[-1]
    padded = np.concatenate([np.zeros((width - 1, x.shape[1]), x.dtype), x])
    y = sum(taps[:, 0, w] * padded[w : w + len(x)] for w in range(width))
    return y * sigmoid(y)


def l2(x: Array) -> Array:
    """x / sqrt(sum of its squares + 1e-6), over the last axis."""
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + x.dtype.type(1e-6))


def decay(f: Array, a_log: Array, dt_bias: Array, lower_bound: float) -> Array:
    """The bounded gate g in (lower_bound, 0): f [T, H, K], a_log [H], dt_bias [H, K]."""
    return lower_bound * sigmoid(np.exp(a_log)[:, None] * (f + dt_bias))


def delta_rule(q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, Array]:
    """o [T, H, V] and the last state [H, K, V]; q, k, g [T, H, K], v [T, H, V], beta [T, H]."""
    state = np.zeros((*k.shape[1:], v.shape[-1]), v.dtype)
    out = np.empty_like(v)
    for t in range(len(q)):
        state = np.exp(g[t])[:, :, None] * state
        u = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * u[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", state, q[t])
    return out, state


def kda(x: Array, w: Weight, config: Mapping[str, Any]) -> Array:
    """Kimi Delta Attention of normed x [T, D]."""
    heads, width = config["num_attention_heads"], config["head_dim"]

    def split(y: Array) -> Array:
        return y.reshape(len(x), heads, width)

    q, k, v = (split(short_conv(x @ w(f"{n}_proj.weight").T, w(f"{n}_conv1d.weight"))) for n in "qkv")
    f, z = (split(x @ w(f"{n}_proj.weight").T) for n in "fg")
    g = decay(f, w("A_log"), w("dt_bias").reshape(heads, width), x.dtype.type(config["kda_lower_bound"]))
    beta = sigmoid(x @ w("b_proj.weight").T)
    o, _ = delta_rule(l2(q) * x.dtype.type(width**-0.5), l2(k), v, g, beta)
    o = rms_norm(o, w("o_norm.weight"), x.dtype.type(config["rms_norm_eps"])) * sigmoid(z)
    return o.reshape(len(x), -1) @ w("o_proj.weight").T


# ---- MLA --------------------------------------------------------------------------------------------------


def frequencies(config: Mapping[str, Any]) -> tuple[Array, float]:
    """Angle per position of each pair, f64 [R/2], and the factor on cos and sin; YaRN if configured."""
    width, base, scaling = config["qk_rope_head_dim"], config["rope_theta"], config["rope_scaling"]
    plain = float(base) ** (-np.arange(0, width, 2) / width)
    if scaling is None:
        return plain, 1.0
    factor, window = scaling["factor"], scaling["original_max_position_embeddings"]

    def pair_of(rotations: float) -> float:
        """The pair that turns that often in the window."""
        return width * math.log(window / (2 * math.pi * rotations)) / (2 * math.log(base))

    low, high = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 0.001), 0, 1)
    return plain * (1 - ramp) + plain / factor * ramp, 0.1 * math.log(factor) + 1


def rope(x: Array, config: Mapping[str, Any]) -> Array:
    """Rotate x [T, heads, R]: the pair (2i, 2i + 1) at position t by t times its frequency."""
    inverse, factor = frequencies(config)
    angles = np.outer(np.arange(len(x)), inverse)
    cos, sin = ((factor * f(angles)).astype(x.dtype)[:, None, :] for f in (np.cos, np.sin))
    a, b = x[..., 0::2], x[..., 1::2]
    return np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)


def mla(x: Array, w: Weight, config: Mapping[str, Any]) -> Array:
    """Multi-head latent attention of normed x [T, D], with its gate for each head."""
    heads, rank, nope = config["num_attention_heads"], config["kv_lora_rank"], config["qk_nope_head_dim"]
    eps = x.dtype.type(config["rms_norm_eps"])
    if config["q_lora_rank"] is None:
        q = x @ w("q_proj.weight").T
    else:
        q = rms_norm(x @ w("q_a_proj.weight").T, w("q_a_layernorm.weight"), eps) @ w("q_b_proj.weight").T
    q = q.reshape(len(x), heads, -1)  # [T, H, nope + rope]
    compressed = x @ w("kv_a_proj_with_mqa.weight").T  # [T, rank + rope]
    latent = rms_norm(compressed[:, :rank], w("kv_a_layernorm.weight"), eps)
    kv = (latent @ w("kv_b_proj.weight").T).reshape(len(x), heads, -1)  # [T, H, nope + V]
    k_rope = np.repeat(rope(compressed[:, None, rank:], config), heads, axis=1)  # one for all heads
    q = np.concatenate([q[..., :nope], rope(q[..., nope:], config)], axis=-1)
    k = np.concatenate([kv[..., :nope], k_rope], axis=-1)
    scores = np.einsum("thk,shk->hts", q, k, optimize=True) * x.dtype.type(q.shape[-1] ** -0.5)
    future = np.triu(np.ones(scores.shape[1:], bool), 1)
    weights = softmax(np.where(future, -np.inf, scores))
    o = np.einsum("hts,shv->thv", weights, kv[..., nope:], optimize=True)
    o = o * sigmoid(x @ w("g_proj.weight").T)[:, :, None]
    return o.reshape(len(x), -1) @ w("dense.weight").T


# ---- experts ----------------------------------------------------------------------------------------------


def route(logits: Array, bias: Array, config: Mapping[str, Any]) -> tuple[Array, Array]:
    """Ids [k], ascending, and weights [k] of the experts of one token, from its router logits [E].

    The bias takes part in choosing alone. A group's score is the sum of its two best; equal ones: the first.
    """
    scores = sigmoid(logits)
    ranked = scores + bias
    grouped = ranked.reshape(config["n_group"], -1)
    best = np.argsort(-np.sort(grouped)[:, -2:].sum(axis=1), kind="stable")[: config["topk_group"]]
    allowed = np.full_like(grouped, -np.inf)
    allowed[best] = grouped[best]
    ids = np.sort(np.argsort(-allowed.reshape(-1), kind="stable")[: config["num_experts_per_tok"]])
    chosen = scores[ids]
    return ids, chosen / (chosen.sum() + 1e-20) * config["routed_scaling_factor"]


def experts(x: Array, w: Weight, config: Mapping[str, Any]) -> Array:
    """The chosen experts of each token of x [T, D], and the shared one."""

    def expert(rows: Array, name: str) -> Array:
        return mlp(rows, *(w(f"{name}.{part}_proj.weight") for part in ("gate", "up", "down")))

    out = expert(x, "shared_experts")
    for t, logits in enumerate(x @ w("gate.weight").T):
        for e, weight in zip(*route(logits, w("gate.expert_bias"), config), strict=True):
            out[t] += weight * expert(x[t : t + 1], f"experts.{e}")[0]
    return out


def forward(
    weights: Mapping[str, Array],
    config: Mapping[str, Any],
    ids: Sequence[int] | Array,
    dtype: Any = np.float32,
) -> Array:
    """Return the logits [T, V] of `ids` [T] from an empty context, computed in `dtype`."""

    def under(prefix: str) -> Weight:
        return lambda name: np.asarray(weights[prefix + name], dtype)

    top, eps = under(""), dtype(config["rms_norm_eps"])
    x = top("model.word_embeddings.weight")[np.asarray(ids)]  # [T, D]
    for layer in range(config["num_hidden_layers"]):
        w = under(f"model.layers.{layer}.")
        attend = mla if is_mla(layer, config) else kda
        h = rms_norm(x, w("input_layernorm.weight"), eps)
        x = x + attend(h, under(f"model.layers.{layer}.attention."), config)
        h = rms_norm(x, w("post_attention_layernorm.weight"), eps)
        inner = under(f"model.layers.{layer}.mlp.")
        if layer < config["first_k_dense_replace"]:
            x = x + mlp(h, *(inner(f"{name}_proj.weight") for name in ("gate", "up", "down")))
        else:
            x = x + experts(h, inner, config)
    return rms_norm(x, top("model.norm.weight"), eps) @ top("lm_head.weight").T
