# SPDX-License-Identifier: Apache-2.0
"""A Ling-3.0 checkpoint of the official layout as a model file, written down without the converter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cecilia.arch import ling3
from cecilia.formats.l3r_layout import PlannedTensor
from cecilia.formats.l3r_write import ModelWriter
from cecilia.formats.quant import pack, quantise


def hyper_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a config.json."""
    scaling = config["rope_scaling"] or {}
    window = config["max_position_embeddings"]
    return {
        "layers": config["num_hidden_layers"],
        "width": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "head_dim": config["head_dim"],
        "q_rank": config["q_lora_rank"] or 0,
        "kv_rank": config["kv_lora_rank"],
        "nope_dim": config["qk_nope_head_dim"],
        "rope_dim": config["qk_rope_head_dim"],
        "v_dim": config["v_head_dim"],
        "group": config["layer_group_size"],
        "dense_layers": config["first_k_dense_replace"],
        "dense_ff": config["intermediate_size"],
        "experts": config["num_experts"],
        "experts_used": config["num_experts_per_tok"],
        "expert_groups": config["n_group"],
        "expert_groups_used": config["topk_group"],
        "expert_ff": config["moe_intermediate_size"],
        "shared_ff": config["moe_shared_expert_intermediate_size"],
        "route_scale": config["routed_scaling_factor"],
        "gate_lower_bound": config["kda_lower_bound"],
        "vocab": config["vocab_size"],
        "context": window,
        "norm_eps": config["rms_norm_eps"],
        "rope_base": config["rope_theta"],
        "yarn_factor": scaling.get("factor", 1.0),
        "yarn_context": scaling.get("original_max_position_embeddings", window),
    }


def value_of(name: str, weights: Mapping[str, np.ndarray], spec: ling3.Ling3Spec) -> np.ndarray:
    """The tensor `name` of a model file, f32."""
    head, _, last = name.rpartition("attention.")
    if last == "A":
        return np.exp(weights[f"{head}attention.A_log"].astype(np.float64))
    if last in ("k_b_proj.weight", "k_b_proj_t.weight", "v_b_proj.weight"):
        both = weights[f"{head}attention.kv_b_proj.weight"].reshape(spec.heads, -1, spec.kv_rank)
        part = both[:, : spec.nope_dim] if last[0] == "k" else both[:, spec.nope_dim :]
        if last == "k_b_proj_t.weight":
            return np.ascontiguousarray(part.transpose(0, 2, 1)).reshape(-1, spec.nope_dim)
        return np.ascontiguousarray(part).reshape(-1, spec.kv_rank)
    return weights[name]


def write(
    path: Path, config: Mapping[str, Any], weights: Mapping[str, np.ndarray], quant: str = "f32"
) -> Path:
    """Write the model file; matrices that may be quantised are in `quant`."""
    hyper = hyper_of(config)
    spec = ling3.spec_from(hyper)
    plan = []
    for name, t in ling3.tensors(spec).items():
        fmt = "f32" if t.rank == 1 or quant not in t.formats else quant
        plan.append(PlannedTensor(name, fmt, t.rank, t.rows, t.cols, t.layer))
    metadata = {
        "architecture": "ling3",
        "hyper": hyper,
        "name": "fixture",
        "weights": "random",
        "license": "Apache-2.0",
        "provenance": {"source": "fixture", "converter": "test", "quant": quant},
        "text": {"bos_id": None, "add_bos": False, "eos_ids": [1], "pad_id": 0},
        "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0},
    }
    with ModelWriter(path, metadata=metadata, tokenizer=None, chat_template=None, tensors=plan) as writer:
        for planned in plan:
            value = value_of(planned.name, weights, spec).astype(np.float32)
            writer.write(
                planned.name,
                value.reshape(-1) if planned.rank == 1 else pack(quantise(value, planned.format)),
            )
        writer.finish()
    return path
