# SPDX-License-Identifier: Apache-2.0
"""Ling-3.0 as its Hugging Face checkpoints have it: envelope, hyper-parameters, tensors.

What the target has in another form: `kv_b_proj`, for each head k_nope rows and then v rows, is split into its
k and its v part, and the k part stands there a second time, each head's matrix transposed; `A_log` is stored
as its exponential; the taps of the short convolutions, [P, 1, W], become vectors.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from cecilia.arch import architecture
from cecilia.arch.base import TensorSpec
from cecilia.arch.ling3 import CONV_WIDTH
from cecilia.errors import ModelFileError

from .checkpoint import Mapped, check_shape, expect_shape, shown
from .hf_config import Envelope, invalid, number, positive, rope_settings
from .hf_source import HuggingFaceSource
from .views import Reordered, Transposed, rows_of_heads

_ENVELOPE = Envelope(
    read={
        "architectures",
        "first_k_dense_replace",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "kda_lower_bound",
        "kv_lora_rank",
        "layer_group_size",
        "max_position_embeddings",
        "moe_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "n_group",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
        "num_hidden_layers",
        "num_key_value_heads",
        "q_lora_rank",
        "qk_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "routed_scaling_factor",
        "topk_group",
        "v_head_dim",
        "vocab_size",
    },
    fixed={
        "expert_swiglu_limit_list": (None,),
        "gated_attention_proj_granularity_type": ("head_wise",),
        "hidden_act": ("silu",),
        "kda_safe_gate": (True,),
        "linear_attention": ("kda", None),
        "moe_router_enable_expert_bias": (True,),
        "no_kda_lora": (True,),
        "norm_head": (False, None),
        "norm_softmax": (False, None),
        "norm_topk_prob": (True,),
        "num_shared_experts": (1,),
        "rope_interleave": (True,),
        "router_dtype": ("fp32", None),
        "scale_router_input": (False, None),
        "score_function": ("sigmoid",),
        "scoring_func": ("sigmoid", None),
        "share_expert_swiglu_limit_list": (None,),
        "short_conv_kernel_size": (CONV_WIDTH,),
        "tie_word_embeddings": (False, None),
        "topk_method": ("noaux_tc", None),
        "up_proj_norm": (False, None),
        "use_bias": (False, None),
        "use_kda_lora": (False, None),
        "use_mla_nope": (False, None),
        "use_nGPT": (False, None),
        "use_qkv_bias": (False, None),
        "use_rmsnorm": (True, None),
        "use_sliding_window": (False, None),
        "value_norm": (False, None),
    },
    ignored={  # the network does not look at them, whatever they say; the first six describe other heads
        "mtp_loss_scaling_factor",
        "mtp_use_kda",
        "num_nextn_predict_layers",
        "output_router_logits",
        "router_aux_loss_coef",
        "seq_aux",
        "embedding_dropout",
        "group_norm_size",
        "linear_silu",
        "num_kv_heads_for_linear_attn",
        "output_dropout",
        "partial_rotary_factor",  # every column that may rotate does
        "rotary_dim",
        "use_qk_norm",  # the linear layers always norm, the others never do
    },
)
_YARN = {"rope_type": ("yarn",), "beta_fast": (32, None), "beta_slow": (1, None), "attention_factor": (None,)}
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_PREDICTION = "model.mtp."
_PACKED = (".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_shape", ".weight_zero_point")


def hyper(config: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters for the metadata; raises ModelFileError for anything outside the envelope."""
    _ENVELOPE.check(config)
    heads, nope, rope = (
        positive(config, key) for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    for key, meant in (("num_key_value_heads", heads), ("qk_head_dim", nope + rope)):
        if positive(config, key, meant) != meant:
            raise ModelFileError("unsupported_model", f"{key} {config[key]} is not supported beside {meant}")
    expert_ff = positive(config, "moe_intermediate_size")
    base, factor, native = _rope(config)
    return {
        "layers": positive(config, "num_hidden_layers"),
        "width": positive(config, "hidden_size"),
        "dense_ff": positive(config, "intermediate_size"),
        "heads": heads,
        "head_dim": positive(config, "head_dim"),
        "q_rank": 0 if config.get("q_lora_rank") is None else positive(config, "q_lora_rank"),
        "kv_rank": positive(config, "kv_lora_rank"),
        "nope_dim": nope,
        "rope_dim": rope,
        "v_dim": positive(config, "v_head_dim"),
        "vocab": positive(config, "vocab_size"),
        "context": positive(config, "max_position_embeddings"),
        "norm_eps": number("rms_norm_eps", config.get("rms_norm_eps")),
        "rope_base": base,
        "group": positive(config, "layer_group_size"),
        "experts": positive(config, "num_experts"),
        "experts_used": positive(config, "num_experts_per_tok"),
        "expert_groups": positive(config, "n_group"),
        "expert_groups_used": positive(config, "topk_group"),
        "expert_ff": expert_ff,
        "shared_ff": positive(config, "moe_shared_expert_intermediate_size", expert_ff),
        "dense_layers": _count(config, "first_k_dense_replace"),
        "route_scale": number("routed_scaling_factor", config.get("routed_scaling_factor")),
        "gate_lower_bound": _negative(config, "kda_lower_bound"),
        "yarn_factor": factor,
        "yarn_context": native,
    }


def _rope(config: dict[str, Any]) -> tuple[float, float, int]:
    """The base, YaRN's factor and the window it stretches; 1 and the whole window without YaRN."""
    base, scaling = rope_settings(config)
    if base is None:
        raise invalid("rope_theta", None, "a finite number above 0")
    scaling.pop("partial_rotary_factor", None)  # as dead here as beside it
    context = positive(config, "max_position_embeddings")
    if not scaling or scaling == {"rope_type": "default"}:
        return base, 1.0, context
    unknown = scaling.keys() - _YARN.keys() - {"factor", "original_max_position_embeddings"}
    if unknown or any(scaling.get(key) not in known for key, known in _YARN.items()):
        raise ModelFileError("unsupported_model", f"RoPE scaling {shown(scaling)} is not supported")
    factor = number("rope_scaling.factor", scaling.get("factor"))
    return base, factor, positive(scaling, "original_max_position_embeddings")


def _negative(config: dict[str, Any], key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value < 0:
        raise invalid(key, value, "a finite number below 0")
    return float(value)


def _count(config: dict[str, Any], key: str) -> int:
    """A whole number of at least 0."""
    return 0 if config.get(key) == 0 else positive(config, key)


def predicts(name: str, layers: int) -> bool:
    """Whether a tensor belongs to the heads that predict further tokens: they follow the last layer."""
    layer = _LAYER.match(name)
    return name.startswith(_PREDICTION) or (layer is not None and int(layer[1]) >= layers)


def mapped(source: HuggingFaceSource, arch: str, values: dict[str, Any]) -> list[Mapped]:
    """Every tensor of the target; raises ModelFileError unless the source holds exactly what they need."""
    for name in source.tensors:
        if name.endswith(_PACKED):
            raise ModelFileError(
                "unsupported_quantisation",
                f"the tensor {name!r} belongs to quantised weights (an FP8 or INT4 release); "
                "convert the checkpoint of float weights",
            )
    module = architecture(arch)
    wanted = module.tensors(module.spec_from(values))
    left_out = {name for name in source.tensors if predicts(name, values["layers"])}
    source.check_no_others({_source_name(name) for name in wanted} | left_out, arch)
    return [_mapped(source, name, spec, values) for name, spec in wanted.items()]


def notes(source: HuggingFaceSource, values: dict[str, Any]) -> list[str]:
    """What of the source the target leaves out."""
    count = sum(predicts(name, values["layers"]) for name in source.tensors)
    return [f"{count} tensors that predict further tokens (MTP) are left out"] if count else []


def _source_name(name: str) -> str:
    for ours in (".k_b_proj.", ".k_b_proj_t.", ".v_b_proj."):
        name = name.replace(ours, ".kv_b_proj.")
    return f"{name}_log" if name.endswith(".attention.A") else name


def _mapped(source: HuggingFaceSource, name: str, spec: TensorSpec, values: dict[str, Any]) -> Mapped:
    tensor = source.tensor(_source_name(name))
    heads, nope, v, rank = (values[key] for key in ("heads", "nope_dim", "v_dim", "kv_rank"))
    if tensor.name.endswith(".kv_b_proj.weight"):
        expect_shape(tensor.name, tensor.shape, (heads * (nope + v), rank))
        part = (nope, nope + v) if name.endswith(".v_b_proj.weight") else (0, nope)
        rows = Reordered(tensor, rows_of_heads(heads, nope + v, *part))
        return Mapped(name, spec, Transposed(rows, nope, rank) if ".k_b_proj_t." in name else rows)
    if name.endswith("_conv1d.weight"):
        expect_shape(tensor.name, tensor.shape, (spec.cols // CONV_WIDTH, 1, CONV_WIDTH))
        return Mapped(name, spec, tensor.shaped(spec.cols))
    check_shape(tensor.name, tensor.shape, spec)
    return Mapped(name, spec, tensor, exponential if name.endswith(".attention.A") else None)


def exponential(values: np.ndarray) -> np.ndarray:
    """exp(x) rounded once to f32; what does not fit becomes infinite, which is refused later."""
    with np.errstate(over="ignore"):
        return np.exp(values.astype(np.float64)).astype(np.float32)
