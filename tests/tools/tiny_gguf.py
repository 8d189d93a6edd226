# SPDX-License-Identifier: Apache-2.0
"""Tiny llama GGUFs written by the `gguf` package itself, with the values that package reads from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from tokenizers.pre_tokenizers import ByteLevel

LAYERS, WIDTH, FF, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 64, 96, 4, 2, 16, 300
VOCAB_LARGE = 512

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "he", "Ġt", "<think>"]
TOKENS += [f"[PAD{index}]" for index in range(len(TOKENS), VOCAB)]
TYPES = [3, 3, 3] + [1] * 258 + [4] + [5] * (VOCAB - 262)
MERGES = ["h e", "Ġ t"]
TEMPLATE = "{{ messages[0]['content'] }}"

Edit = Callable[[dict[str, Any]], None]


def metadata(architecture: str = "llama") -> dict[str, Any]:
    """The keys of a file that converts, as plain Python values (int: u32, float: f32)."""
    keys: dict[str, Any] = {
        "general.name": "tiny",
        "general.license": "apache-2.0",
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": FF,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.vocab_size": VOCAB,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    return {key.replace("llama.", f"{architecture}."): value for key, value in keys.items()}


def shapes(
    architecture: str = "llama", *, tied: bool = True, width: int = WIDTH, vocab: int = VOCAB
) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of the tiny model."""
    q_rows, kv_rows = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width)}
    for i in range(LAYERS):
        if architecture == "qwen2":
            for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
                found[f"model.layers.{i}.self_attn.{name}_proj.bias"] = (rows,)
        if architecture == "qwen3":
            for name in "qk":
                found[f"model.layers.{i}.self_attn.{name}_norm.weight"] = (HEAD_DIM,)
        for name, shape in (
            ("input_layernorm", (width,)),
            ("self_attn.q_proj", (HEADS * HEAD_DIM, width)),
            ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, width)),
            ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, width)),
            ("self_attn.o_proj", (width, HEADS * HEAD_DIM)),
            ("post_attention_layernorm", (width,)),
            ("mlp.gate_proj", (FF, width)),
            ("mlp.up_proj", (FF, width)),
            ("mlp.down_proj", (width, FF)),
        ):
            found[f"model.layers.{i}.{name}.weight"] = shape
    found["model.norm.weight"] = (width,)
    if not tied:
        found["lm_head.weight"] = (vocab, width)
    return found


GGUF_PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    for ours, theirs in GGUF_PARTS.items():
        name = name.replace(ours, theirs)
    return name


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """Hugging Face to GGUF row order, as the public converters do: halves [2, hd/2] to pairs [hd/2, 2]."""
    rows = weights.shape[0]
    split = weights.reshape(heads, 2, rows // heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


def write(
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.Q4_1,
    *,
    tied: bool = True,
    keys: Mapping[str, Any] | None = None,
    edit: Edit | None = None,
    architecture: str = "llama",
    width: int = WIDTH,
    vocab: int = VOCAB,
    raw: Mapping[str, tuple[np.ndarray, GGMLQuantizationType]] | None = None,
) -> dict[str, np.ndarray]:
    """Write a seeded tiny model whose matrices are of `kind`; return its f32 values by Hugging Face name.

    `keys` replaces metadata (None removes a key), `edit` may change the GGUF tensors {name: f32} first, `raw`
    replaces some by rows u8 of another type.
    """
    values = random_values(architecture, tied=tied, width=width, vocab=vocab)
    tensors = {}
    for name, value in values.items():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
        if architecture != "llama":  # only this one interleaves
            heads = 0
        tensors[gguf_name(name)] = permute(value, heads) if heads else value
    if edit is not None:
        edit(tensors)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**metadata(architecture), **(keys or {})}.items():
        add_key(writer, key, value)
    for name, value in tensors.items():
        if raw is not None and name in raw:
            rows, one = raw[name]
            writer.add_tensor(name, rows, raw_dtype=one)
            continue
        one = kind if value.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(value, one), raw_dtype=one)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {
        name: gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind) if value.ndim > 1 else value
        for name, value in values.items()
    }


def random_values(
    architecture: str = "llama", *, tied: bool = True, width: int = WIDTH, vocab: int = VOCAB
) -> dict[str, np.ndarray]:
    """The seeded f32 values by Hugging Face name."""
    rng = np.random.default_rng(7)
    wanted = shapes(architecture, tied=tied, width=width, vocab=vocab)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in wanted.items()}


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Write a plain value (int: u32, float: f32); None writes nothing."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)
