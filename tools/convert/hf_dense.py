# SPDX-License-Identifier: Apache-2.0
"""The dense decoders as Hugging Face checkpoints have them: envelope, hyper-parameters, tensors."""

from __future__ import annotations

from typing import Any

from cecilia.arch import architecture
from cecilia.errors import ModelFileError

from .checkpoint import Mapped, check_shape, shown
from .hf_config import Envelope, invalid, number, positive, rope_settings
from .hf_source import HuggingFaceSource

_ENVELOPE = Envelope(
    read={
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
    },
    fixed={
        "attention_bias": (False, None),
        "hidden_act": ("silu", None),
        "mlp_bias": (False, None),
        "partial_rotary_factor": (1, None),
        "pretraining_tp": (1, None),
        "rope_interleaved": (False, None),
        "use_sliding_window": (False, None),
    },
    ignored={
        "is_llama_config",
        "sliding_window",  # without use_sliding_window it is a mere number
    },
)
_HEAD = "lm_head.weight"
# Buffers that old checkpoints store though they follow from the configuration.
_DERIVED = ".rotary_emb.inv_freq"


def hyper(config: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters for the metadata; raises ModelFileError for anything outside the envelope."""
    _ENVELOPE.check(config)
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or set(map(str, kinds)) != {"full_attention"}):
        raise ModelFileError(
            "unsupported_model", f"layer_types {shown(kinds)}: only full_attention is supported"
        )
    width, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    if config.get("head_dim") is None and width % heads:
        raise ModelFileError("unsupported_model", f"the width {width} is no multiple of the {heads} heads")
    tied = config.get("tie_word_embeddings", False)  # the default of all these classes
    if not isinstance(tied, bool):
        raise invalid("tie_word_embeddings", tied, "true or false")
    base, scaling = rope_settings(config)
    if scaling:
        raise ModelFileError("unsupported_model", f"RoPE scaling is not supported ({shown(scaling)})")
    return {
        "layers": positive(config, "num_hidden_layers"),
        "width": width,
        "ff": positive(config, "intermediate_size"),
        "heads": heads,
        "kv_heads": positive(config, "num_key_value_heads", heads),
        "head_dim": positive(config, "head_dim", width // heads),
        "vocab": positive(config, "vocab_size"),
        "context": positive(config, "max_position_embeddings"),
        "norm_eps": number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),  # the classes' default
        "rope_base": base or 10000.0,  # the default of all these classes
        "tied": tied,
    }


def mapped(source: HuggingFaceSource, arch: str, values: dict[str, Any]) -> list[Mapped]:
    """Every tensor of the target; raises ModelFileError unless the source holds exactly these."""
    module = architecture(arch)
    wanted = module.tensors(module.spec_from(values))
    left_out = {name for name in source.tensors if name.endswith(_DERIVED)}
    if values["tied"]:
        left_out.add(_HEAD)  # some checkpoints store the embedding a second time under this name
    source.check_no_others(wanted.keys() | left_out, arch)
    found = []
    for name, spec in wanted.items():
        tensor = source.tensor(name)
        check_shape(name, tensor.shape, spec)
        found.append(Mapped(name, spec, tensor))
    return found
