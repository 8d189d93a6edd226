# SPDX-License-Identifier: Apache-2.0
"""Write a dense model's weights as a GGUF file, value for value, so that the peers can be timed on them.

The text side is not carried over: the file gets a vocabulary of 256 bytes and padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from cecilia.errors import UsageError
from cecilia.formats.l3r import ModelFile, TensorEntry, open_model
from cecilia.formats.quant import BLOCK, Blocks, unpack
from tools.convert.bpe import byte_alphabet
from tools.convert.gguf_dense import gguf_name

ARCHITECTURES = ("qwen2", "qwen3")  # GGUF keeps the Q and K rows of these in our order
_TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_32": gguf.GGMLQuantizationType.Q8_0,
    "q4_32": gguf.GGMLQuantizationType.Q4_0,
    "q4a_32": gguf.GGMLQuantizationType.Q4_1,
}


def export_gguf(model: Path, out: Path) -> Path:
    """Write `out` from the `.l3r` file `model`. Raises UsageError `not_exportable`, and ModelFileError."""
    with open_model(model) as file:
        architecture = file.metadata["architecture"]
        if architecture not in ARCHITECTURES:
            raise UsageError("not_exportable", f"{model}: {architecture}, not {' or '.join(ARCHITECTURES)}")
        writer = gguf.GGUFWriter(out, architecture)
        _add_keys(writer, file.metadata["hyper"])
        _add_vocabulary(writer, file.metadata["hyper"]["vocab"])
        for entry in file.tensors.values():
            kind = _TYPES[entry.format]
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            row = entry.cols // block * block_bytes
            shape = (row,) if entry.rank == 1 else (entry.rows, row)
            writer.add_tensor_info(gguf_name(entry.name), shape, np.dtype(np.uint8), entry.rows * row, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in file.tensors.values():
            writer.write_tensor_data(_gguf_bytes(file, entry))
        writer.close()
    return out


def _add_keys(writer: gguf.GGUFWriter, hyper: Mapping[str, Any]) -> None:
    writer.add_block_count(hyper["layers"])
    writer.add_context_length(hyper["context"])
    writer.add_embedding_length(hyper["width"])
    writer.add_feed_forward_length(hyper["ff"])
    writer.add_head_count(hyper["heads"])
    writer.add_head_count_kv(hyper["kv_heads"])
    writer.add_key_length(hyper["head_dim"])
    writer.add_value_length(hyper["head_dim"])
    writer.add_layer_norm_rms_eps(hyper["norm_eps"])
    writer.add_rope_freq_base(hyper["rope_base"])


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    letters = byte_alphabet()
    tokens = [*letters, letters[0] + letters[1]]  # the one merge there must be
    tokens += [f"[PAD{i}]" for i in range(len(tokens), size)]
    unused = [gguf.TokenType.UNUSED] * (size - len(letters) - 1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(letters) + 1) + unused)
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_eos_token_id(size - 1)


def _gguf_bytes(file: ModelFile, entry: TensorEntry) -> np.ndarray:
    """The tensor's bytes as GGUF has them, u8."""
    raw = np.asarray(file.data(entry.name))
    if entry.rank == 1:
        return raw
    blocks = unpack(raw, entry.format, entry.rows, entry.cols)
    if entry.format in ("f32", "bf16"):
        return np.ascontiguousarray(blocks.q).view(np.uint8).reshape(-1)
    return _blocks_bytes(blocks)


def _blocks_bytes(blocks: Blocks) -> np.ndarray:
    """Blocks of Q8_0, Q4_0 or Q4_1: scale, minimum if any, quants; quant j shares a byte with j + 16."""
    q = blocks.q.reshape(-1, BLOCK)
    if blocks.format != "q8_32":
        q = q[:, :16] | q[:, 16:] << 4
    parts = [d.reshape(-1, 1).view(np.uint8) for d in (blocks.d, blocks.m) if d is not None]
    return np.concatenate([*parts, q.view(np.uint8)], axis=1).reshape(-1)
