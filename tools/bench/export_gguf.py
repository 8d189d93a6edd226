# SPDX-License-Identifier: Apache-2.0
"""Write a model's weights as a GGUF file, value for value, so that the peers can be timed on them.

The text side is not carried over: the file gets a vocabulary of 256 bytes and padding. One tensor at a time
is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from cecilia.errors import UsageError
from cecilia.formats.l3r import ModelFile, TensorEntry, open_model
from cecilia.formats.quant import BLOCK, TILE, Blocks, tile_bytes, unpack
from tools.bench.gguf_layouts import LAYOUTS, Target
from tools.convert.bpe import byte_alphabet

_TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_32": gguf.GGMLQuantizationType.Q8_0,
    "q4_32": gguf.GGMLQuantizationType.Q4_0,
    "q4a_32": gguf.GGMLQuantizationType.Q4_1,
}
_SLAB_VALUES = 1 << 22  # a matrix is turned in slabs of whole tiles of about this many values


def export_gguf(model: Path, out: Path) -> Path:
    """Write `out` from the `.l3r` file `model`. Raises UsageError `not_exportable`, and ModelFileError."""
    with open_model(model) as file:
        architecture, hyper = file.metadata["architecture"], file.metadata["hyper"]
        if architecture not in LAYOUTS:
            raise UsageError("not_exportable", f"{model}: {architecture}, not one of: {' '.join(LAYOUTS)}")
        layout = LAYOUTS[architecture]
        writer = gguf.GGUFWriter(out, layout.name)
        _add_keys(writer, layout.name, layout.keys(hyper))
        _add_vocabulary(writer, hyper["vocab"])
        targets = list(layout.targets(hyper, file.tensors))
        for target in targets:
            kind, shape = _type(target), _bytes_shape(target)
            writer.add_tensor_info(target.name, shape, np.dtype(np.uint8), math.prod(shape), kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for target in targets:
            writer.write_tensor_data(_gguf_bytes(file, target))
        writer.close()
    return out


def _add_keys(writer: gguf.GGUFWriter, name: str, keys: Mapping[str, Any]) -> None:
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in keys.items():
        add[type(value)](f"{name}.{key}", value)


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


def _type(target: Target) -> gguf.GGMLQuantizationType:
    return _TYPES[target.entries[0].format]


def _bytes_shape(target: Target) -> tuple[int, ...]:
    """The tensor's shape with bytes along its rows."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[_type(target)]
    return (*target.shape[:-1], target.shape[-1] // block * block_bytes)


def _gguf_bytes(file: ModelFile, target: Target) -> np.ndarray:
    """The tensor's bytes as GGUF has them, u8."""
    buffer = np.empty(math.prod(_bytes_shape(target)), np.uint8)
    at = 0
    for entry in target.entries:
        for part in _parts(file, entry):
            buffer[at : at + part.size] = part
            at += part.size
    return buffer


def _parts(file: ModelFile, entry: TensorEntry) -> Iterator[np.ndarray]:
    """The bytes of one tensor of ours, u8, slab by slab."""
    if entry.rank == 1:
        yield _read(file, entry.offset, entry.nbytes)
        return
    size = tile_bytes(entry.format, entry.cols)
    tiles = max(_SLAB_VALUES // entry.cols // TILE, 1)
    for first in range(0, -(-entry.rows // TILE), tiles):
        rows = min(tiles * TILE, entry.rows - first * TILE)
        slab = _read(file, entry.offset + first * size, -(-rows // TILE) * size)
        yield _blocks_bytes(unpack(slab, entry.format, rows, entry.cols))


def _read(file: ModelFile, offset: int, nbytes: int) -> np.ndarray:
    """Bytes of the file, u8; not through its mapping, which would hold every page that was read."""
    return np.fromfile(file.path, np.uint8, nbytes, offset=offset)


def _blocks_bytes(blocks: Blocks) -> np.ndarray:
    """Blocks of Q8_0, Q4_0 or Q4_1: scale, minimum if any, quants; quant j shares a byte with j + 16."""
    if blocks.format in ("f32", "bf16"):
        return np.ascontiguousarray(blocks.q).view(np.uint8).reshape(-1)
    q = blocks.q.reshape(-1, BLOCK)
    if blocks.format != "q8_32":
        q = q[:, :16] | q[:, 16:] << 4
    parts = [d.reshape(-1, 1).view(np.uint8) for d in (blocks.d, blocks.m) if d is not None]
    return np.concatenate([*parts, q.view(np.uint8)], axis=1).reshape(-1)
