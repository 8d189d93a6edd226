# SPDX-License-Identifier: Apache-2.0
"""A llama GGUF as float arrays under the checkpoint's names, read with the gguf package alone.

GGUF files of this architecture hold the rows of each q and k head as interleaved rotary pairs
(x0 y0 x1 y1 ...); checkpoints hold the two halves one after the other (x0 x1 ... y0 y1 ...).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (weights, hyper) as tests.reference.llama.forward takes them."""
    reader = GGUFReader(path)

    def key(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    heads, width = key("attention.head_count"), key("embedding_length")
    hyper = {
        "layers": key("block_count"),
        "heads": heads,
        "kv_heads": key("attention.head_count_kv"),
        "head_dim": width // heads,
        "norm_eps": key("attention.layer_norm_rms_epsilon"),
        "rope_base": key("rope.freq_base"),
    }
    weights = {}
    for tensor in reader.tensors:
        *block, name, _weight = tensor.name.split(".")
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name in ("attn_q", "attn_k"):
            pairs = values.reshape(-1, hyper["head_dim"] // 2, 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        prefix = f"model.layers.{block[1]}." if block else ""
        weights[f"{prefix}{NAMES[name]}.weight"] = values
    return weights, hyper | {"tied": "lm_head.weight" not in weights}
