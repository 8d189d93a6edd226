# SPDX-License-Identifier: Apache-2.0
"""Tiny Hugging Face directories with the values of `tiny_gguf`, written by the `safetensors` package."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.tools import tiny_gguf
from tools.convert.byte_vocabulary import byte_vocabulary

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
TEMPLATE = "{{ messages[0]['content'] }} from jinja"


def config(architecture: str = "llama", *, tied: bool = True) -> dict[str, Any]:
    """The config.json of the tiny model, with the keys published checkpoints have."""
    return {
        "architectures": [CLASSES[architecture]],
        "model_type": architecture,
        "hidden_size": tiny_gguf.WIDTH,
        "intermediate_size": tiny_gguf.FF,
        "num_hidden_layers": tiny_gguf.LAYERS,
        "num_attention_heads": tiny_gguf.HEADS,
        "num_key_value_heads": tiny_gguf.KV_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "vocab_size": tiny_gguf.VOCAB,
        "torch_dtype": "float32",
        "use_cache": True,
        "bos_token_id": 256,
        "eos_token_id": 258,
    }


def write(
    folder: Path,
    architecture: str = "llama",
    *,
    tied: bool = True,
    dtype: str = "F32",
    shards: int = 0,
    keys: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Write a directory; return its values by name. `shards` 0: one file without an index.

    `keys` changes config.json (None removes a key), `extra` adds tensors.
    """
    folder.mkdir(exist_ok=True)
    settings = {**config(architecture, tied=tied), **(keys or {})}
    settings = {key: value for key, value in settings.items() if value is not None or key == "rope_scaling"}
    put(folder, "config.json", settings)
    (folder / "tokenizer.json").write_bytes(byte_vocabulary(tiny_gguf.VOCAB).tokenizer or b"")
    values = tiny_gguf.random_values(architecture, tied=tied)
    tensors = {**values, **(extra or {})}
    names = sorted(tensors)
    if not shards:
        save(folder / "model.safetensors", tensors, dtype)
        return values
    files = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save(folder / file, {name: tensors[name] for name in names if files[name] == file}, dtype)
    put(folder, "model.safetensors.index.json", {"metadata": {}, "weight_map": files})
    return values


def put(folder: Path, name: str, value: Any) -> None:
    """Write a JSON file."""
    (folder / name).write_text(json.dumps(value), encoding="utf-8")


def save(path: Path, tensors: Mapping[str, np.ndarray], dtype: str) -> None:
    """A safetensors file; bfloat16 is written as the upper halves of the values, relabelled."""
    if dtype == "F16":
        save_file({name: value.astype(np.float16) for name, value in tensors.items()}, path)
    elif dtype == "BF16":
        halves = {name: (value.view(np.uint32) >> 16).astype(np.uint16) for name, value in tensors.items()}
        save_file(halves, path)
        relabel(path, "U16", "BF16")
    else:
        save_file(dict(tensors), path)


def relabel(path: Path, old: str, new: str) -> None:
    """Change the dtype of every tensor of a safetensors file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = raw[8 : 8 + length].replace(f'"{old}"'.encode(), f'"{new}"'.encode())
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])
