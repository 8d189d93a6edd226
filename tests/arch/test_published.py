# SPDX-License-Identifier: Apache-2.0
"""Which files are known by the name of a published model."""

from __future__ import annotations

from typing import Any

import pytest

from cecilia.arch.published import model_id
from tests.arch.ling3_file import hyper_of

# The published config.json, as far as it decides anything.
CONFIG = {
    "num_hidden_layers": 24,
    "hidden_size": 1536,
    "num_attention_heads": 16,
    "head_dim": 128,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "layer_group_size": 4,
    "first_k_dense_replace": 1,
    "intermediate_size": 4608,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "moe_intermediate_size": 512,
    "moe_shared_expert_intermediate_size": 512,
    "routed_scaling_factor": 2.5,
    "kda_lower_bound": -5,
    "vocab_size": 157184,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 6_000_000,
    "rope_scaling": None,
}
YARN = {
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 131072},
    "max_position_embeddings": 262144,
}


def metadata(weights: str = "official", architecture: str = "ling3", **change: Any) -> dict[str, Any]:
    return {"architecture": architecture, "weights": weights, "hyper": hyper_of(CONFIG | change)}


@pytest.mark.parametrize("change", [{}, YARN])
def test_the_published_model_has_its_name(change: dict[str, Any]) -> None:
    assert model_id(metadata(**change)) == "cecilia-ling3-tiny"


@pytest.mark.parametrize(
    "other",
    [
        metadata("random"),
        metadata("trained-here"),
        metadata(num_hidden_layers=8),
        metadata(rope_theta=10_000),
        metadata(architecture="llama"),
    ],
)
def test_nothing_else_has_it(other: dict[str, Any]) -> None:
    assert model_id(other) is None
