# SPDX-License-Identifier: Apache-2.0
"""Hyper-parameters of models to be made: the micro ones of each architecture, and published full sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cecilia.arch.published import LING3_TINY
from cecilia.errors import UsageError

_DENSE: dict[str, Any] = {
    "layers": 2,
    "width": 64,
    "ff": 160,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "vocab": 320,
    "context": 512,
    "norm_eps": 1e-5,
    "rope_base": 10000.0,
    "tied": False,  # a tied random model says the last token again and again
}

_LING3: dict[str, Any] = {
    "layers": 8,
    "width": 64,
    "heads": 4,
    "head_dim": 16,
    "q_rank": 24,
    "kv_rank": 32,
    "nope_dim": 16,
    "rope_dim": 16,
    "v_dim": 16,
    "group": 4,
    "dense_layers": 1,
    "dense_ff": 96,
    "experts": 16,
    "experts_used": 4,
    "expert_groups": 4,
    "expert_groups_used": 2,
    "expert_ff": 32,
    "shared_ff": 32,
    "route_scale": 2.5,
    "gate_lower_bound": -5.0,
    "vocab": 320,
    "context": 4096,
    "norm_eps": 1e-6,
    "rope_base": 6e6,
    "yarn_factor": 1.0,
}

MICRO: dict[str, dict[str, Any]] = {
    "llama": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "ling3": _LING3,
}
"""By architecture. `yarn_context`, where there is YaRN, follows from the window and the factor."""

FULL: dict[str, dict[str, Any]] = {"ling3": {**LING3_TINY, "context": 131072, "yarn_factor": 1.0}}
"""Sizes of published models, by architecture: Ling-3.0-tiny."""


def hyper(architecture: str, *, full: bool, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a model to be made. Raises UsageError for a full size nobody published."""
    table = FULL if full else MICRO
    if architecture not in table:
        raise UsageError("no_full_size", f"{architecture} has no full size here, only: {' '.join(FULL)}")
    found = table[architecture] | changes
    if "yarn_factor" in found:
        found.setdefault("yarn_context", round(found["context"] / found["yarn_factor"]))
    return found
