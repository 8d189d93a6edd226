# SPDX-License-Identifier: Apache-2.0
"""A small model file that has everything the container knows: all formats, layers, odd shapes, two leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cecilia.formats.l3r_write import ModelWriter, PlannedTensor
from cecilia.formats.quant import Blocks, pack, quantise

METADATA: dict[str, Any] = {
    "architecture": "llama",
    "hyper": {"layers": 2, "width": 64, "tied": True},
    "name": "sämple",
    "weights": "random",
    "license": "Apache-2.0",
    "provenance": {"source": "seed 7", "converter": "tests", "quant": "keep"},
    "text": {"bos_id": 1, "add_bos": True, "eos_ids": [2, 3], "pad_id": None},
    "sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 40},
}
TOKENIZER = b'{"version": "1.0", "model": {}}'
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }} \N{SNOWMAN}{% endfor %}"
PLAN = [
    PlannedTensor("model.embed_tokens.weight", "f32", 2, 301, 900, -1),
    PlannedTensor("model.layers.0.input_layernorm.weight", "f32", 1, 1, 64, 0),
    PlannedTensor("model.layers.0.self_attn.q_proj.weight", "q8_32", 2, 33, 96, 0),
    PlannedTensor("model.layers.0.mlp.gate_proj.weight", "q4_32", 2, 16, 32, 0, 16384),
    PlannedTensor("model.layers.1.mlp.up_proj.weight", "q4a_32", 2, 17, 64, 1),
    PlannedTensor("model.layers.1.mlp.down_proj.weight", "bf16", 2, 5, 37, 1),
    PlannedTensor("model.norm.weight", "f32", 1, 1, 65, -1),
]


def weights(seed: int = 7) -> dict[str, Blocks]:
    """The numbers of every tensor of PLAN, before they are packed; a vector has one row."""
    rng = np.random.default_rng(seed)
    return {t.name: quantise(rng.standard_normal((t.rows, t.cols), np.float32), t.format) for t in PLAN}


def content(name: str, blocks: Blocks) -> np.ndarray:
    """The bytes or numbers of a tensor as the writer takes them."""
    return blocks.q[0] if next(t.rank for t in PLAN if t.name == name) == 1 else pack(blocks)


def writer(path: Path, **changes: Any) -> ModelWriter:
    """A writer for the sample, with some of its arguments changed."""
    arguments = {
        "metadata": METADATA,
        "tokenizer": TOKENIZER,
        "chat_template": TEMPLATE,
        "tensors": PLAN,
        **changes,
    }
    return ModelWriter(path, **arguments)


def write_sample(path: Path, **changes: Any) -> Path:
    """Write the sample to `path`."""
    with writer(path, **changes) as out:
        for name, blocks in weights().items():
            out.write(name, content(name, blocks))
        out.finish()
    return path
