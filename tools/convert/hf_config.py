# SPDX-License-Identifier: Apache-2.0
"""The config.json of a Hugging Face checkpoint: which architecture, which hyper-parameters, nothing unknown.

Every key is either read, or must have the one value this code computes, or is known not to matter when a
sequence is evaluated. Any other key is refused by name: it may change what the model means.
"""

from __future__ import annotations

import math
from typing import Any

from cecilia.errors import ModelFileError

from .checkpoint import shown

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}

_READ = {
    "architectures",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
    "vocab_size",
}
# Key -> the values that mean what is computed here.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "rope_interleaved": (False, None),
    "use_sliding_window": (False, None),
}
# Training, serialisation, other libraries, and text settings that are read elsewhere.
_IGNORED = {
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "is_llama_config",
    "max_window_layers",  # matters only with sliding windows
    "model_type",
    "name_or_path",
    "pad_token_id",
    "sliding_window",  # without use_sliding_window it is a mere number
    "tokenizer_class",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
}


def architecture(config: dict[str, Any]) -> str:
    """Our name of the one class in `architectures`; raises ModelFileError for another."""
    found = config.get("architectures")
    if not isinstance(found, list) or len(found) != 1 or found[0] not in ARCHITECTURES:
        raise ModelFileError(
            "unsupported_architecture",
            f"config.json names the architectures {shown(found)}; supported: {' '.join(ARCHITECTURES)}",
        )
    return ARCHITECTURES[found[0]]


def hyper(config: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters for the metadata; raises ModelFileError for anything outside the envelope."""
    _check_keys(config)
    width, heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    if config.get("head_dim") is None and width % heads:
        raise ModelFileError("unsupported_model", f"the width {width} is no multiple of the {heads} heads")
    tied = config.get("tie_word_embeddings", False)  # the default of all these classes
    if not isinstance(tied, bool):
        raise _invalid("tie_word_embeddings", tied, "true or false")
    return {
        "layers": _positive(config, "num_hidden_layers"),
        "width": width,
        "ff": _positive(config, "intermediate_size"),
        "heads": heads,
        "kv_heads": _positive(config, "num_key_value_heads", heads),
        "head_dim": _positive(config, "head_dim", width // heads),
        "vocab": _positive(config, "vocab_size"),
        "context": _positive(config, "max_position_embeddings"),
        "norm_eps": _number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),  # the classes' default
        "rope_base": _rope_base(config),
        "tied": tied,
    }


def _check_keys(config: dict[str, Any]) -> None:
    for key, value in config.items():
        if key in _READ or key in _IGNORED or key.startswith("_"):
            continue
        if key not in _FIXED:
            raise ModelFileError("unsupported_model", f"config.json has the unknown key {shown(key)}")
        if not any(value is known or value == known for known in _FIXED[key]):
            raise ModelFileError("unsupported_model", f"{key} {shown(value)} is not supported")
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or set(map(str, kinds)) != {"full_attention"}):
        raise ModelFileError(
            "unsupported_model", f"layer_types {shown(kinds)}: only full_attention is supported"
        )


def _rope_base(config: dict[str, Any]) -> float:
    """The base, from rope_theta or from the newer rope_parameters; raises for every kind of scaling."""
    found = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise _invalid(key, value, "an object or null")
        kind = value.get("rope_type", value.get("type", "default"))
        extra = sorted(value.keys() - {"rope_type", "type", "rope_theta"})
        if kind != "default" or extra:
            raise ModelFileError("unsupported_model", f"RoPE scaling is not supported ({key} {shown(value)})")
        if "rope_theta" in value:
            found[key] = _number(f"{key}.rope_theta", value["rope_theta"])
    if config.get("rope_theta") is not None:
        found["rope_theta"] = _number("rope_theta", config["rope_theta"])
    if len(set(found.values())) > 1:
        raise ModelFileError("invalid_metadata", f"config.json contradicts itself about rope_theta: {found}")
    return next(iter(found.values()), 10000.0)  # the default of all these classes


def _positive(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
        raise _invalid(key, value, "a whole number from 1 to 2147483647")
    return value


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _invalid(key, value, "a finite number above 0")
    return float(value)


def _invalid(key: str, value: Any, wanted: str) -> ModelFileError:
    return ModelFileError("invalid_metadata", f"config.json: {key} is {shown(value)}; it must be {wanted}")
