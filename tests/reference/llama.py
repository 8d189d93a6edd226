# SPDX-License-Identifier: Apache-2.0
"""The Llama architecture in plain numpy, written to be checked by eye: the yardstick for the engine.

It knows nothing of Cecilia's own code. A whole sequence is one call and nothing is cached, so that a cache, a
chunk or a page table cannot be wrong in the same way here and there.

Sources: the Hugging Face checkpoint layout (tensor names; rotate-half rotary embedding, RoFormer, arXiv
2104.09864), RMSNorm (arXiv 1910.07467), grouped-query attention (arXiv 2305.13245), SwiGLU (arXiv
2002.05202).
Letters: T tokens, D model width, H query heads, G key/value heads, K head width, F inner width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x [T, D] / sqrt(mean of its squares + eps) * weight [D]."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def rope(x: Array, base: float) -> Array:
    """Rotate x [T, heads, K]: pair (i, i + K/2) at position t by the angle t * base**(-2i/K)."""
    half = x.shape[-1] // 2
    angles = np.outer(np.arange(len(x)), float(base) ** (-np.arange(half) / half))  # [T, K/2], f64
    cos, sin = (f(angles).astype(x.dtype)[:, None, :] for f in (np.cos, np.sin))
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention(q: Array, k: Array, v: Array) -> Array:
    """Causal attention of q [T, H, K] over k, v [T, G, K]; query head h reads key/value head h // (H/G)."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(a, group, axis=1) for a in (k, v))  # [T, H, K]
    scores = np.einsum("thk,shk->hts", q, k, optimize=True) * q.dtype.type(q.shape[-1] ** -0.5)
    future = np.triu(np.ones(scores.shape[1:], bool), 1)
    return np.einsum("hts,shk->thk", softmax(np.where(future, -np.inf, scores)), v, optimize=True)


def mlp(x: Array, gate: Array, up: Array, down: Array) -> Array:
    """SwiGLU: down (silu(gate x) * (up x)); gate, up [F, D], down [D, F]."""
    g = x @ gate.T
    return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T


def projections(h: Array, w: Callable[[str], Array], hyper: Mapping[str, Any]) -> tuple[Array, Array, Array]:
    """q [T, H, K], k and v [T, G, K] of h [T, D]; `w` takes a name inside self_attn."""
    counts = {"q": hyper["heads"], "k": hyper["kv_heads"], "v": hyper["kv_heads"]}
    q, k, v = (
        (h @ w(f"{name}_proj.weight").T).reshape(-1, n, hyper["head_dim"]) for name, n in counts.items()
    )
    return q, k, v


def forward(
    weights: Mapping[str, Array],
    hyper: Mapping[str, Any],
    ids: Sequence[int] | Array,
    dtype: Any = np.float32,
    *,
    project: Callable[..., tuple[Array, Array, Array]] = projections,
) -> Array:
    """Return the logits [T, V] of `ids` [T] from an empty context, computed in `dtype`.

    `weights` holds float arrays under the checkpoint's names (matrices [out, in]); `hyper` holds layers,
    heads, kv_heads, head_dim, norm_eps, rope_base and tied. `project` makes q, k and v as `projections` does.
    """

    def w(name: str) -> Array:
        return np.asarray(weights[name], dtype)

    eps, base = dtype(hyper["norm_eps"]), hyper["rope_base"]
    x = w("model.embed_tokens.weight")[np.asarray(ids)]  # [T, D]
    for layer in range(hyper["layers"]):
        p = f"model.layers.{layer}."
        h = rms_norm(x, w(p + "input_layernorm.weight"), eps)
        q, k, v = project(h, lambda name, p=p: w(f"{p}self_attn.{name}"), hyper)
        o = attention(rope(q, base), rope(k, base), v)
        x = x + o.reshape(len(x), -1) @ w(p + "self_attn.o_proj.weight").T
        h = rms_norm(x, w(p + "post_attention_layernorm.weight"), eps)
        x = x + mlp(h, *(w(f"{p}mlp.{name}_proj.weight") for name in ("gate", "up", "down")))
    head = "model.embed_tokens.weight" if hyper["tied"] else "lm_head.weight"
    return rms_norm(x, w("model.norm.weight"), eps) @ w(head).T
