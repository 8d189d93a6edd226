# SPDX-License-Identifier: Apache-2.0
"""Tensor types of checkpoints, decoded into Cecilia's blocks.

One row of the table per type: the format it is kept in and functions that take raw rows [R, row bytes] u8 to
`Blocks`. Most types lose nothing; types with two scales a value or more than four bits and a minimum have no
format of ours that holds them exactly, so they are kept in the nearest one and the error is reported. Byte
layouts are those of ggml's block structs (32 or 256 elements each; f16 scales).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cecilia.errors import ModelFileError
from cecilia.formats.quant import Blocks, quantise

BLOCK = 32
SUPER = 256

Decoder = Callable[[np.ndarray, int], Blocks]


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


def _q4_k(raw: np.ndarray, cols: int) -> Blocks:
    """d f16, dmin f16, 8 scales and 8 minima of 6 bits in 12 bytes, then nibbles: w = d*scale*q - dmin*min.

    The products become f16, which rounds them to 11 bits; the quants stay what they are.
    """
    supers = raw.reshape(len(raw), cols // SUPER, -1)
    d, dmin = (_half(supers, at).astype(np.float32)[..., None] for at in (0, 2))
    low, high, mixed = (supers[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([low & 63, (mixed & 15) | (low >> 6 << 4)], axis=-1)
    minima = np.concatenate([high & 63, (mixed >> 4) | (high >> 6 << 4)], axis=-1)
    pairs = supers[..., 16:].reshape(len(raw), -1, 1, BLOCK)  # low nibbles: one block, high ones: the next
    quants = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, cols)
    with np.errstate(over="ignore"):  # what does not fit is refused as not finite
        scale, minimum = (
            (f * n).astype("<f2").reshape(len(raw), -1) for f, n in ((d, scales), (-dmin, minima))
        )
    return Blocks("q4a_32", len(raw), cols, quants, scale, minimum)


def _values(type_name: str) -> Decoder:
    """The gguf package's own reading of a type, as f32."""

    def decode(raw: np.ndarray, cols: int) -> Blocks:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        with np.errstate(over="ignore", invalid="ignore"):
            values = dequantize(raw, GGMLQuantizationType[type_name])
        return Blocks("f32", len(raw), cols, values)

    return decode


def _as_q8(decode: Decoder) -> Decoder:
    """Decoded values rounded to q8_32."""
    return lambda raw, cols: quantise(decode(raw, cols).q, "q8_32")


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
    """What becomes of a tensor type: `keep` is the format that `fit` makes under that choice.

    `decode` loses nothing: it gives `keep` too when that holds the type exactly, else f32.
    """

    keep: str
    decode: Decoder
    fit: Decoder

    @property
    def exact(self) -> bool:
        """Whether keeping changes no value."""
        return self.decode is self.fit


def _exact(keep: str, decode: Decoder) -> SourceType:
    return SourceType(keep, decode, decode)


def _rounded(type_name: str) -> SourceType:
    decode = _values(type_name)
    return SourceType("q8_32", decode, _as_q8(decode))


REQUANTISED = "f32 of blocks"
"""The type of a view that takes a quantised tensor's blocks apart: its values are kept in 8 bits."""

TYPES: dict[str, SourceType] = {
    "F32": _exact("f32", _f32),
    "F16": _exact("f32", _f16),  # bf16 would lose three bits of every value
    "BF16": _exact("bf16", _bf16),
    "Q8_0": _exact("q8_32", _q8_0),
    "Q4_0": _exact("q4_32", _q4_0),
    "Q4_1": _exact("q4a_32", _q4_1),
    "Q5_0": _exact("q8_32", _q5_0),
    "Q5_1": _rounded("Q5_1"),
    "Q4_K": SourceType("q4a_32", _values("Q4_K"), _q4_k),
    "Q5_K": _rounded("Q5_K"),
    "Q6_K": _rounded("Q6_K"),
}


def source_type(tensor: str, type_name: str) -> SourceType:
    """The row of the table; raises ModelFileError naming what is supported."""
    if type_name == REQUANTISED:
        return SourceType("q8_32", _f32, _as_q8(_f32))
    if type_name not in TYPES:
        raise ModelFileError(
            "unsupported_tensor_type", f"the tensor {tensor!r} is {type_name}; supported: {' '.join(TYPES)}"
        )
    return TYPES[type_name]
