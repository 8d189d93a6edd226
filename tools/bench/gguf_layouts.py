# SPDX-License-Identifier: Apache-2.0
"""Where a model's tensors go in a GGUF file, and what its keys say, by architecture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cecilia.arch import ling3
from cecilia.arch.ling3 import CONV_WIDTH, Ling3Spec
from cecilia.formats.l3r import TensorEntry
from tools.convert import gguf_ling3
from tools.convert.gguf_dense import gguf_name

Entries = Mapping[str, TensorEntry]


@dataclass(frozen=True)
class Target:
    """A tensor of the GGUF file: `shape` outermost first, `entries` of ours that lie in it one by one."""

    name: str
    shape: tuple[int, ...]
    entries: list[TensorEntry]


class Layout(Protocol):
    """One architecture: its name in GGUF, and functions of a file's hyper-parameters and tensors."""

    name: str

    def keys(self, hyper: Mapping[str, Any]) -> dict[str, Any]:
        """Values by key, without the architecture's prefix; an int is written as u32, a float as f32."""

    def targets(self, hyper: Mapping[str, Any], entries: Entries) -> Iterator[Target]:
        """All tensors."""


class DenseLayout:
    """One tensor of ours is one of theirs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def keys(self, hyper: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "block_count": hyper["layers"],
            "context_length": hyper["context"],
            "embedding_length": hyper["width"],
            "feed_forward_length": hyper["ff"],
            "attention.head_count": hyper["heads"],
            "attention.head_count_kv": hyper["kv_heads"],
            "attention.key_length": hyper["head_dim"],
            "attention.value_length": hyper["head_dim"],
            "attention.layer_norm_rms_epsilon": hyper["norm_eps"],
            "rope.freq_base": hyper["rope_base"],
        }

    def targets(self, _hyper: Mapping[str, Any], entries: Entries) -> Iterator[Target]:
        for entry in entries.values():
            yield Target(gguf_name(entry.name), _shape(entry), [entry])


class Ling3Layout:
    """The experts of a layer are stacked; of the two key matrices only the transposed one is there."""

    name = gguf_ling3.GGUF_NAME

    def keys(self, hyper: Mapping[str, Any]) -> dict[str, Any]:
        spec = ling3.spec_from(hyper)
        return {
            "block_count": spec.layers,
            "context_length": spec.context,
            "embedding_length": spec.width,
            "feed_forward_length": spec.dense_ff,
            "vocab_size": spec.vocab,
            "attention.head_count": spec.heads,
            "attention.head_count_kv": [int(spec.is_mla(i)) for i in range(spec.layers)],  # the map of layers
            "attention.layer_norm_rms_epsilon": spec.norm_eps,
            **({"attention.q_lora_rank": spec.q_rank} if spec.q_rank else {}),
            "attention.kv_lora_rank": spec.kv_rank,
            "attention.key_length": spec.kv_rank + spec.rope_dim,
            "attention.value_length": spec.kv_rank,
            "attention.key_length_mla": spec.nope_dim + spec.rope_dim,
            "attention.value_length_mla": spec.v_dim,
            "rope.dimension_count": spec.rope_dim,
            "rope.freq_base": spec.rope_base,
            **_yarn_keys(spec),
            "ssm.conv_kernel": CONV_WIDTH,
            "kda.head_dim": spec.head_dim,
            "kda.safe_gate": True,
            "kda.gate_lower_bound": spec.gate_lower_bound,
            "leading_dense_block_count": spec.dense_layers,
            "expert_count": spec.experts,
            "expert_used_count": spec.experts_used,
            "expert_group_count": spec.expert_groups,
            "expert_group_used_count": spec.expert_groups_used,
            "expert_feed_forward_length": spec.expert_ff,
            "expert_shared_feed_forward_length": spec.shared_ff,
            "expert_shared_count": 1,
            "expert_gating_func": 2,  # sigmoid
            "expert_weights_scale": spec.route_scale,
            "expert_weights_norm": True,
        }

    def targets(self, hyper: Mapping[str, Any], entries: Entries) -> Iterator[Target]:
        spec = ling3.spec_from(hyper)
        stacks: dict[str, list[TensorEntry]] = {}
        for name, entry in entries.items():
            if not name.endswith(".k_b_proj.weight"):
                stacks.setdefault(gguf_ling3.gguf_name(spec, name), []).append(entry)
        for theirs, stack in stacks.items():
            yield Target(theirs, _ling3_shape(spec, theirs, stack), stack)


def _yarn_keys(spec: Ling3Spec) -> dict[str, Any]:
    if spec.yarn_factor == 1:
        return {}
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": spec.yarn_factor,
        "rope.scaling.original_context_length": spec.yarn_context,
    }


def _shape(entry: TensorEntry) -> tuple[int, ...]:
    return (entry.cols,) if entry.rank == 1 else (entry.rows, entry.cols)


def _ling3_shape(spec: Ling3Spec, name: str, stack: list[TensorEntry]) -> tuple[int, ...]:
    """The same values in the shape they have there."""
    entry = stack[0]
    if ".ssm_conv1d_" in name:
        return (1, entry.cols // CONV_WIDTH, 1, CONV_WIDTH)
    if name.endswith(".ssm_a"):
        return (entry.cols, 1)
    if name.endswith((".attn_k_b.weight", ".attn_v_b.weight")):
        return (spec.heads, entry.rows // spec.heads, entry.cols)
    return (len(stack), *_shape(entry)) if name.endswith("_exps.weight") else _shape(entry)


LAYOUTS: dict[str, Layout] = {
    "ling3": Ling3Layout(),
    "qwen2": DenseLayout("qwen2"),
    "qwen3": DenseLayout("qwen3"),
}
"""By architecture. GGUF keeps Q and K rows of the dense ones in our order, unlike llama's."""
