# SPDX-License-Identifier: Apache-2.0
"""Qwen2 (and 2.5) dense: as llama, with biases on q, k and v. x is the residual stream [T, D].

x = embed_tokens[tokens]
each layer:  h = rmsnorm(x);  q, k, v = h Wq + bq, h Wk + bk, h Wv + bv;  rotate q and k by halves
             x += attention(q, keys so far, values so far) Wo
             h = rmsnorm(x);  x += (silu(h Wgate) * (h Wup)) Wdown
logits = rmsnorm(x) Whead        Whead is embed_tokens when the file is tied
"""

from __future__ import annotations

from cecilia.arch import dense
from cecilia.arch.base import Hints, TensorSpec
from cecilia.layers.weights import Weights

HINTS = Hints()
RECIPES = dense.RECIPES
VARIANT = dense.Variant(qkv_bias=True)

spec_from = dense.spec_from
looked_up = dense.looked_up
longest_window = dense.longest_window
for_window = dense.for_window
rope_mode = dense.rope_mode
page_bytes = dense.page_bytes
state_bytes = dense.state_bytes


def tensors(spec: dense.DenseSpec) -> dict[str, TensorSpec]:
    """All tensors of the file, by checkpoint name."""
    return dense.tensors(spec, VARIANT)


def bind(spec: dense.DenseSpec, weights: Weights, *, kv: str, chunk: int) -> dense.Dense:
    """The model over checked weights, with a cache of recipe `kv`, one of RECIPES."""
    return dense.Dense(spec, VARIANT, weights, kv=kv, chunk=chunk)
