# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen3 dense in plain numpy: the Llama forward with other projections.

Qwen2 (arXiv 2407.10671) adds a bias to q, k and v. Qwen3 (arXiv 2505.09388) norms every head of q and k over
its own width, with one weight for all heads, before the rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tests.reference import llama
from tests.reference.llama import Array


def biased(h: Array, w: Callable[[str], Array], hyper: Mapping[str, Any]) -> tuple[Array, Array, Array]:
    """The projections of Qwen2."""
    parts = zip("qkv", llama.projections(h, w, hyper), strict=True)
    q, k, v = (part + w(f"{name}_proj.bias").reshape(part.shape[1:]) for name, part in parts)
    return q, k, v


def normed(h: Array, w: Callable[[str], Array], hyper: Mapping[str, Any]) -> tuple[Array, Array, Array]:
    """The projections of Qwen3."""
    eps = h.dtype.type(hyper["norm_eps"])
    q, k, v = llama.projections(h, w, hyper)
    return llama.rms_norm(q, w("q_norm.weight"), eps), llama.rms_norm(k, w("k_norm.weight"), eps), v


PROJECTIONS = {"llama": llama.projections, "qwen2": biased, "qwen3": normed}


def forward(
    architecture: str,
    weights: Mapping[str, Array],
    hyper: Mapping[str, Any],
    ids: Sequence[int] | Array,
    dtype: Any = np.float32,
) -> Array:
    """Logits [T, V] by the dense decoder of that name; arguments as for `llama.forward`."""
    return llama.forward(weights, hyper, ids, dtype, project=PROJECTIONS[architecture])
