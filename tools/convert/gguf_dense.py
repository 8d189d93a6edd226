# SPDX-License-Identifier: Apache-2.0
"""The dense decoders as GGUF files have them: envelope, hyper-parameters, tensor names and row order.

GGUF files of the architecture llama keep the Q and K rows of each head interleaved (pair 2j, 2j+1 rotates
together); those of the others, Hugging Face checkpoints, and ours, keep the halves apart (pair j,
j + head_dim/2).
"""

from __future__ import annotations

from typing import Any

from cecilia.arch import architecture
from cecilia.errors import ModelFileError

from .checkpoint import Mapped, Rows, check_shape
from .gguf_source import GgufSource, positive, vocabulary_rows
from .views import Reordered, halves_of_pairs

ARCHITECTURES = ("llama", "qwen2", "qwen3")
MAX_LAYERS = 1024
INTERLEAVED = "llama"  # the architecture whose Q and K rows are reordered

_KNOWN_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "vocab_size",
}
# Part of a key or tensor name -> the feature it means, for an error that says what is missing.
_OUTSIDE = {
    "rope.scal": "RoPE scaling",
    "rope_freqs": "RoPE scaling",
    "rope_factors": "RoPE scaling",
    "expert": "experts",
    "_exps": "experts",
    "ffn_gate_inp": "experts",
    "sliding_window": "sliding windows",
    ".bias": "biases",
    "attn_q_norm": "QK norms",
    "attn_k_norm": "QK norms",
}
# Parts of the target's tensor names and what GGUF calls them.
_PARTS = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".self_attn.q_proj.": ".attn_q.",
    ".self_attn.k_proj.": ".attn_k.",
    ".self_attn.v_proj.": ".attn_v.",
    ".self_attn.o_proj.": ".attn_output.",
    ".self_attn.q_norm.": ".attn_q_norm.",
    ".self_attn.k_norm.": ".attn_k_norm.",
    ".mlp.gate_proj.": ".ffn_gate.",
    ".mlp.up_proj.": ".ffn_up.",
    ".mlp.down_proj.": ".ffn_down.",
}


def hyper(source: GgufSource, arch: str) -> dict[str, Any]:
    """The hyper-parameters for the metadata; raises ModelFileError for anything outside the envelope."""
    for key in source.metadata_keys():
        if key.startswith(f"{arch}.") and key.removeprefix(f"{arch}.") not in _KNOWN_KEYS:
            raise ModelFileError("unsupported_model", f"{_feature(key)} not supported (key {key!r})")
    width = positive(source, f"{arch}.embedding_length")
    heads = positive(source, f"{arch}.attention.head_count")
    if source.value(f"{arch}.attention.key_length") is None and width % heads:
        raise ModelFileError("unsupported_model", f"the width {width} is no multiple of the {heads} heads")
    values = {
        "layers": positive(source, f"{arch}.block_count"),
        "width": width,
        "ff": positive(source, f"{arch}.feed_forward_length"),
        "heads": heads,
        "kv_heads": positive(source, f"{arch}.attention.head_count_kv", heads),
        "head_dim": positive(source, f"{arch}.attention.key_length", width // heads),
        "vocab": vocabulary_rows(source, arch, width),
        "context": positive(source, f"{arch}.context_length"),
        "norm_eps": source.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_base": source.number(f"{arch}.rope.freq_base", 10000.0),  # the format's own default
        "tied": "output.weight" not in source.tensors,
    }
    _check(source, arch, values)
    return values


def mapped(source: GgufSource, arch: str, values: dict[str, Any]) -> list[Mapped]:
    """Every tensor of the target, in file order; `values` as returned by `hyper`.

    Raises ModelFileError unless the file holds exactly these tensors in these shapes.
    """
    module = architecture(arch)
    wanted = {
        gguf_name(name): (name, spec) for name, spec in module.tensors(module.spec_from(values)).items()
    }
    extra = sorted(source.tensors.keys() - wanted.keys())
    if extra:
        name = extra[0]
        raise ModelFileError(
            "unsupported_model",
            f"{_feature(name)} not supported (tensor {name!r}, one of {len(extra)} too many)",
        )
    found = []
    for theirs, (ours, spec) in wanted.items():
        if theirs not in source.tensors:
            raise ModelFileError("missing_tensor", f"the file has no tensor {theirs}")
        tensor = source.tensors[theirs]
        check_shape(tensor.name, tensor.shape, spec)
        rows: Rows = tensor
        if arch == INTERLEAVED and (heads := _rotated_heads(ours, values)):
            rows = Reordered(tensor, halves_of_pairs(spec.rows, heads))
        found.append(Mapped(ours, spec, rows))
    return found


def _rotated_heads(name: str, values: dict[str, Any]) -> int:
    """The heads whose rows are rotated in pairs, 0 for a tensor without."""
    return {"q_proj": values["heads"], "k_proj": values["kv_heads"]}.get(name.split(".")[-2], 0)


def gguf_name(name: str) -> str:
    """What GGUF calls the tensor `name` of ours."""
    for ours, theirs in _PARTS.items():
        name = name.replace(ours, theirs)
    return name


def _check(source: GgufSource, arch: str, values: dict[str, Any]) -> None:
    head_dim = values["head_dim"]
    rotary = source.integer(f"{arch}.rope.dimension_count", head_dim)
    value_dim = source.integer(f"{arch}.attention.value_length", head_dim)
    problems = (
        (values["layers"] > MAX_LAYERS, f"{values['layers']} layers; at most {MAX_LAYERS} are supported"),
        (
            values["heads"] % values["kv_heads"],
            f"{values['heads']} heads are no multiple of {values['kv_heads']} KV heads",
        ),
        (head_dim % 2, f"heads of the odd width {head_dim} cannot be rotated"),
        (rotary != head_dim, f"partial rotary embedding ({rotary} of {head_dim}) is not supported"),
        (value_dim != head_dim, f"values of width {value_dim} beside keys of {head_dim} are not supported"),
        (not values["norm_eps"] > 0, f"the norm epsilon {values['norm_eps']} is not positive"),
        (not values["rope_base"] > 0, f"the RoPE base {values['rope_base']} is not positive"),
    )
    for wrong, message in problems:
        if wrong:
            raise ModelFileError("unsupported_model", message)


def _feature(name: str) -> str:
    for part, feature in _OUTSIDE.items():
        if part in name:
            return f"{feature} are" if feature.endswith("s") else f"{feature} is"
    return "this variant of the architecture is"
