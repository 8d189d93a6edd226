# SPDX-License-Identifier: Apache-2.0
"""GGUF architecture `llama`: its envelope, its hyper-parameters, its tensor names and its row order.

GGUF llama files keep the Q and K rows of each head interleaved (pair 2j, 2j+1 rotates together); Hugging Face
checkpoints, and ours, keep the halves apart (pair j, j + head_dim/2). The rows of the two projections are put
back into the latter order here; a row moves whole, so no value changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cecilia.errors import ModelFileError

from .gguf_source import GgufSource

NAME = "llama"
MAX_LAYERS = 1024

_KNOWN_KEYS = {
    f"{NAME}.{key}"
    for key in (
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
    )
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


@dataclass(frozen=True)
class Mapped:
    """One tensor: its names here and there, its shape, its layer (-1: none).

    `interleaved_heads`: the heads whose rows the source keeps interleaved, 0 when rows stay where they are.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    layer: int
    interleaved_heads: int = 0

    def row_order(self) -> np.ndarray:
        """[R]: for every row of this tensor, the row of the source that holds it."""
        rows = np.arange(self.shape[0])
        if not self.interleaved_heads:
            return rows
        pairs = rows.reshape(self.interleaved_heads, -1, 2)  # [H, pair, member]
        return pairs.transpose(0, 2, 1).reshape(-1)  # [H, member, pair]


def hyper(source: GgufSource) -> dict[str, Any]:
    """The hyper-parameters for the metadata; raises ModelFileError for anything outside the envelope."""
    for key in source.metadata_keys():
        if key.startswith(f"{NAME}.") and key not in _KNOWN_KEYS:
            raise ModelFileError("unsupported_model", f"{_feature(key)} not supported (key {key!r})")
    width = _positive(source, "embedding_length")
    heads = _positive(source, "attention.head_count")
    if source.value(f"{NAME}.attention.key_length") is None and width % heads:
        raise ModelFileError("unsupported_model", f"the width {width} is no multiple of the {heads} heads")
    head_dim = _positive(source, "attention.key_length", width // heads)
    values = {
        "layers": _positive(source, "block_count"),
        "width": width,
        "ff": _positive(source, "feed_forward_length"),
        "heads": heads,
        "kv_heads": _positive(source, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab": _vocabulary(source, width),
        "context": _positive(source, "context_length"),
        "norm_eps": source.number(f"{NAME}.attention.layer_norm_rms_epsilon"),
        "rope_base": source.number(f"{NAME}.rope.freq_base", 10000.0),  # the format's own default
        "tied": "output.weight" not in source.tensors,
    }
    _check(source, values)
    return values


def tensors(values: dict[str, Any]) -> Iterator[Mapped]:
    """Every tensor the architecture has, in file order; `values` as returned by `hyper`."""
    width, ff, vocab = values["width"], values["ff"], values["vocab"]
    heads, kv_heads, head_dim = values["heads"], values["kv_heads"], values["head_dim"]
    yield Mapped("model.embed_tokens.weight", "token_embd.weight", (vocab, width), -1)
    for i in range(values["layers"]):
        ours, theirs = f"model.layers.{i}", f"blk.{i}"
        for name, source, shape, interleaved in (
            ("input_layernorm", "attn_norm", (width,), 0),
            ("self_attn.q_proj", "attn_q", (heads * head_dim, width), heads),
            ("self_attn.k_proj", "attn_k", (kv_heads * head_dim, width), kv_heads),
            ("self_attn.v_proj", "attn_v", (kv_heads * head_dim, width), 0),
            ("self_attn.o_proj", "attn_output", (width, heads * head_dim), 0),
            ("post_attention_layernorm", "ffn_norm", (width,), 0),
            ("mlp.gate_proj", "ffn_gate", (ff, width), 0),
            ("mlp.up_proj", "ffn_up", (ff, width), 0),
            ("mlp.down_proj", "ffn_down", (width, ff), 0),
        ):
            yield Mapped(f"{ours}.{name}.weight", f"{theirs}.{source}.weight", shape, i, interleaved)
    yield Mapped("model.norm.weight", "output_norm.weight", (width,), -1)
    if not values["tied"]:
        yield Mapped("lm_head.weight", "output.weight", (vocab, width), -1)


def check_tensors(source: GgufSource, wanted: list[Mapped]) -> None:
    """Raise ModelFileError unless the file holds exactly the wanted tensors in the wanted shapes."""
    extra = sorted(source.tensors.keys() - {tensor.source for tensor in wanted})
    if extra:
        name = extra[0]
        raise ModelFileError(
            "unsupported_model",
            f"{_feature(name)} not supported (tensor {name!r}, one of {len(extra)} too many)",
        )
    for tensor in wanted:
        if tensor.source not in source.tensors:
            raise ModelFileError("missing_tensor", f"the file has no tensor {tensor.source}")
        found = source.tensors[tensor.source].shape
        if found != tensor.shape:
            raise ModelFileError(
                "wrong_shape", f"the tensor {tensor.source} is {list(found)}; expected {list(tensor.shape)}"
            )


def _positive(source: GgufSource, key: str, default: int | None = None) -> int:
    value = source.integer(f"{NAME}.{key}", default)
    if not 1 <= value < 1 << 31:
        raise ModelFileError("invalid_metadata", f"{NAME}.{key} is {value}; it must be 1 to 2147483647")
    return value


def _vocabulary(source: GgufSource, width: int) -> int:
    """The rows of the embedding: the file's own count of the vocabulary is optional and must agree."""
    embedding = source.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError("missing_tensor", f"the file has no matrix token_embd.weight of {width} columns")
    rows = embedding.shape[0]
    claimed = source.integer(f"{NAME}.vocab_size", rows)
    if claimed != rows:
        raise ModelFileError(
            "wrong_shape", f"token_embd.weight has {rows} rows, {NAME}.vocab_size is {claimed}"
        )
    return rows


def _check(source: GgufSource, values: dict[str, Any]) -> None:
    head_dim = values["head_dim"]
    rotary = source.integer(f"{NAME}.rope.dimension_count", head_dim)
    value_dim = source.integer(f"{NAME}.attention.value_length", head_dim)
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
