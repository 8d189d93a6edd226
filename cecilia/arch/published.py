# SPDX-License-Identifier: Apache-2.0
"""Published models that have a name of their own here, and the sizes by which a file is known to be one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LING3_TINY: Mapping[str, int | float] = {
    "layers": 24,
    "width": 1536,
    "heads": 16,
    "head_dim": 128,
    "q_rank": 256,
    "kv_rank": 512,
    "nope_dim": 128,
    "rope_dim": 64,
    "v_dim": 128,
    "group": 4,
    "dense_layers": 1,
    "dense_ff": 4608,
    "experts": 128,
    "experts_used": 8,
    "expert_groups": 8,
    "expert_groups_used": 4,
    "expert_ff": 512,
    "shared_ff": 512,
    "route_scale": 2.5,
    "gate_lower_bound": -5.0,
    "vocab": 157184,
    "norm_eps": 1e-6,
    "rope_base": 6e6,
}
"""Ling-3.0-tiny; its window is 131072 tokens, or 262144 with YaRN."""

_NAMES = {"cecilia-ling3-tiny": ("ling3", LING3_TINY)}


def model_id(metadata: Mapping[str, Any]) -> str | None:
    """The name of the model a file holds, if its weights are official and its sizes those of one above.

    Random weights and weights trained here are nobody's model, whatever their sizes.
    """
    if metadata["weights"] != "official":
        return None
    hyper = metadata["hyper"]
    for name, (architecture, sizes) in _NAMES.items():
        if metadata["architecture"] == architecture and all(hyper.get(key) == sizes[key] for key in sizes):
            return name
    return None
