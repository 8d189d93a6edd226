# SPDX-License-Identifier: Apache-2.0
"""GGUF tensor types, decoded into Cecilia's blocks without changing a value.

One row of the table per type: the format that holds its values exactly and the function that takes raw rows
[R, row bytes] u8 to `Blocks`. Byte layouts are those of ggml's block structs (32 elements each; f16 scales).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cecilia.errors import ModelFileError
from cecilia.formats.quant import Blocks

BLOCK = 32


def _f32(raw: np.ndarray, cols: int) -> Blocks:
    return Blocks("f32", len(raw), cols, raw.view("<f4"), None, None)


def _f16(raw: np.ndarray, cols: int) -> Blocks:
    return Blocks("f32", len(raw), cols, raw.view("<f2").astype(np.float32), None, None)


def _bf16(raw: np.ndarray, cols: int) -> Blocks:
    return Blocks("bf16", len(raw), cols, raw.view("<u2"), None, None)


def _q8_0(raw: np.ndarray, cols: int) -> Blocks:
    """d f16, then 32 int8: w = d*q."""
    blocks = _split(raw, cols)
    quants = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return Blocks("q8_32", len(raw), cols, quants.reshape(-1, cols), _half(blocks, 0), None)


def _q4_0(raw: np.ndarray, cols: int) -> Blocks:
    """d f16, then 16 bytes of nibbles: w = d*(q - 8)."""
    blocks = _split(raw, cols)
    return Blocks("q4_32", len(raw), cols, _nibbles(blocks[..., 2:], cols), _half(blocks, 0), None)


def _q4_1(raw: np.ndarray, cols: int) -> Blocks:
    """d f16, m f16, then 16 bytes of nibbles: w = d*q + m."""
    blocks = _split(raw, cols)
    quants = _nibbles(blocks[..., 4:], cols)
    return Blocks("q4a_32", len(raw), cols, quants, _half(blocks, 0), _half(blocks, 2))


def _q5_0(raw: np.ndarray, cols: int) -> Blocks:
    """d f16, 32 fifth bits (element i is bit i), then 16 bytes of nibbles: w = d*(q - 16)."""
    blocks = _split(raw, cols)
    fifth = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little").reshape(-1, cols)
    quants = (_nibbles(blocks[..., 6:], cols) | fifth << 4).astype(np.int8) - np.int8(16)
    return Blocks("q8_32", len(raw), cols, quants, _half(blocks, 0), None)


def _split(raw: np.ndarray, cols: int) -> np.ndarray:
    """[R, row bytes] -> [R, K/32, block bytes]."""
    return raw.reshape(len(raw), cols // BLOCK, -1)


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The f16 at byte `at` of every block -> [R, K/32]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]


def _nibbles(packed: np.ndarray, cols: int) -> np.ndarray:
    """[R, K/32, 16] -> [R, K]: the low nibbles are elements 0..15 of a block, the high ones 16..31."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1).reshape(-1, cols)


@dataclass(frozen=True)
class SourceType:
    """What becomes of a GGUF tensor type under `keep`."""

    keep: str
    decode: Callable[[np.ndarray, int], Blocks]


TYPES: dict[str, SourceType] = {
    "F32": SourceType("f32", _f32),
    "F16": SourceType("f32", _f16),  # bf16 would lose three bits of every value
    "BF16": SourceType("bf16", _bf16),
    "Q8_0": SourceType("q8_32", _q8_0),
    "Q4_0": SourceType("q4_32", _q4_0),
    "Q4_1": SourceType("q4a_32", _q4_1),
    "Q5_0": SourceType("q8_32", _q5_0),
}


def source_type(tensor: str, type_name: str) -> SourceType:
    """The row of the table; raises ModelFileError naming what is supported."""
    if type_name not in TYPES:
        raise ModelFileError(
            "unsupported_tensor_type", f"the tensor {tensor!r} is {type_name}; supported: {' '.join(TYPES)}"
        )
    return TYPES[type_name]
