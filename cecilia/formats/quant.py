# SPDX-License-Identifier: Apache-2.0
"""The one table of weight formats: sizes, quantisers, and the tile layout every kernel reads.

A weight matrix W [rows, cols] is used as y = W x, so `cols` is K, the direction sums run along. Values are
grouped in blocks of 32 along K. On disk and in memory the matrix is a sequence of tiles of 16 rows;
docs/FORMAT-L3R.md gives the byte formulas. One layout serves every instruction set: 16 rows x 4 K-bytes fill
one 512-bit register, two 256-bit ones or four 128-bit ones.

    f32, bf16   w
    q8_32       w = d * q          q in -128..127 (ours writes -127..127; an imported file may hold -128)
    q4_32       w = d * (q - 8)    q in 0..15
    q4a_32      w = d * q + m      q in 0..15
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cecilia.errors import ModelFileError

TILE = 16
"""Rows of a tile."""
BLOCK = 32
"""Values that share one scale, along K."""
ALIGNMENT = 64
"""A tile is padded to a multiple of this many bytes, so that every tile starts on a cache line."""

Array = npt.NDArray[Any]

_CHUNK_ROWS = 2048  # rows quantised at a time: bounds the float temporaries of a large embedding
_F32_TINY = np.finfo(np.float32).tiny  # below it 1 / d overflows


@dataclass(frozen=True)
class Format:
    """One weight format. `block` is the number of values along K that must be stored together (1: any K)."""

    name: str
    id: int
    block: int
    activation: Literal["f32", "int8"]
    bits_per_weight: float
    quant_bytes: int  # bytes of the values of one block and one row
    scales: int  # f16 numbers kept for one block and one row: d, then m


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("f32", 0, 1, "f32", 32.0, 4, 0),
        Format("bf16", 1, 1, "f32", 16.0, 2, 0),
        Format("q8_32", 2, BLOCK, "int8", 8.5, 32, 1),
        Format("q4_32", 3, BLOCK, "int8", 4.5, 16, 1),
        Format("q4a_32", 4, BLOCK, "int8", 5.0, 16, 2),
    )
}
FORMAT_BY_ID: dict[int, Format] = {f.id: f for f in FORMATS.values()}


@dataclass
class Blocks:
    """A matrix as numbers rather than tiles.

    q: [R, K] float32 (f32), uint16 bit patterns (bf16), int8 (q8_32) or uint8 (q4_32, q4a_32).
    d, m: float16 [R, K/32], or None where the format has none.
    """

    format: str
    rows: int
    cols: int
    q: Array
    d: Array | None = None
    m: Array | None = None


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def lookup(fmt: str, cols: int) -> Format:
    """The format called `fmt`; ModelFileError `bad_format` if there is none or it cannot hold `cols`."""
    found = FORMATS.get(fmt)
    if found is None:
        raise ModelFileError("bad_format", f"unknown weight format {fmt!r}; known: {' '.join(FORMATS)}")
    if cols < 1 or cols % found.block:
        raise ModelFileError("bad_format", f"{fmt} needs columns in multiples of {found.block}, found {cols}")
    return found


def _value_bytes(fmt: Format, cols: int) -> int:
    """Bytes of a tile before its scales."""
    return TILE * (cols // fmt.block) * fmt.quant_bytes


def tile_bytes(fmt: str, cols: int) -> int:
    """Bytes of one 16-row tile, padding included."""
    f = lookup(fmt, cols)
    return _round_up(_value_bytes(f, cols) + f.scales * TILE * (cols // f.block) * 2, ALIGNMENT)


def matrix_bytes(fmt: str, rows: int, cols: int) -> int:
    """Bytes of a packed [rows, cols] matrix."""
    return -(-rows // TILE) * tile_bytes(fmt, cols)


def tensor_bytes(fmt: str, rank: int, rows: int, cols: int) -> int:
    """Bytes of a tensor in a model file: a rank 2 matrix in tiles, or a rank 1 vector of `cols` plain f32."""
    if rank == 2:
        return matrix_bytes(fmt, rows, cols)
    if rank != 1 or rows != 1 or fmt != "f32":
        raise ModelFileError(
            "bad_format", f"a tensor is a matrix or one row of f32; found rank {rank}, {rows} rows, {fmt}"
        )
    return lookup(fmt, cols).quant_bytes * cols


# ---- quantise and dequantise ------------------------------------------------------------------------------


def _f16(x: Array, what: str) -> Array:
    """`x` as float16; ModelFileError `bad_weights` if it does not fit."""
    with np.errstate(over="ignore"):
        half = x.astype("<f2")
    if not np.isfinite(half).all():
        raise ModelFileError(
            "bad_weights", f"a block's {what} {np.abs(x).max():g} does not fit a 16-bit float"
        )
    return half


def _inverse(d: Array) -> Array:
    """1 / d in float32, and 0 where d is zero or so small that 1 / d is infinite."""
    usable = np.abs(d) >= _F32_TINY
    return np.where(usable, np.float32(1) / np.where(usable, d, np.float32(1)), np.float32(0))


def _quantise_q8(w: Array) -> tuple[Array, Array, None]:
    """[r, b, 32] float32 -> q, d, None. Halves round away from zero, as C's roundf does."""
    d = np.abs(w).max(axis=-1, keepdims=True) / np.float32(127)
    x = w * _inverse(d)
    size = np.abs(x)
    whole = np.floor(size)
    whole += size - whole >= np.float32(0.5)  # not floor(size + 0.5): that sum rounds 0.49999997 up to 1
    return np.copysign(whole, x).astype(np.int8), _f16(d[..., 0], "scale"), None


def _quantise_q4(w: Array) -> tuple[Array, Array, None]:
    """[r, b, 32] float32 -> q, d, None. The value of largest magnitude, of either sign, becomes q = 0."""
    at = np.abs(w).argmax(axis=-1, keepdims=True)
    d = np.take_along_axis(w, at, axis=-1) / np.float32(-8)
    q = np.minimum(np.trunc(w * _inverse(d) + np.float32(8.5)), 15).astype(np.uint8)
    return q, _f16(d[..., 0], "scale"), None


def _quantise_q4a(w: Array) -> tuple[Array, Array, Array]:
    """[r, b, 32] float32 -> q, d, m."""
    low = w.min(axis=-1, keepdims=True)
    with np.errstate(over="ignore"):
        d = (w.max(axis=-1, keepdims=True) - low) / np.float32(15)
    d16, m16 = _f16(d[..., 0], "scale"), _f16(low[..., 0], "minimum")
    q = np.minimum(np.trunc((w - low) * _inverse(d) + np.float32(0.5)), 15).astype(np.uint8)
    return q, d16, m16


_QUANTISERS = {"q8_32": _quantise_q8, "q4_32": _quantise_q4, "q4a_32": _quantise_q4a}


def f32_to_bf16(w: Array) -> Array:
    """Finite float32 -> uint16 bf16 bit patterns, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(w, dtype="<f4").view("<u4")
    rounded: Array = (
        (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    ).astype("<u2")
    if ((rounded & 0x7F80) == 0x7F80).any():
        raise ModelFileError("bad_weights", f"a weight of {np.abs(w).max():g} does not fit bf16")
    return rounded


def bf16_to_f32(bits: Array) -> Array:
    """uint16 bf16 bit patterns -> float32, exactly."""
    wide: Array = (bits.astype("<u4") << np.uint32(16)).view("<f4")
    return wide


def quantise(w: Array, fmt: str) -> Blocks:
    """Round a float32 matrix [R, K] to `fmt`.

    q8_32, q4_32 and q4a_32 give the numbers of ggml's reference quantisers for Q8_0, Q4_0 and Q4_1.
    ModelFileError: `bad_format` for a K the format cannot hold, `bad_weights` for a value that is not finite
    or whose scale does not fit.
    """
    rows, cols = w.shape
    f = lookup(fmt, cols)
    w = np.ascontiguousarray(w, dtype="<f4")
    if not np.isfinite(w).all():
        raise ModelFileError("bad_weights", f"{np.count_nonzero(~np.isfinite(w))} weights are not finite")
    if fmt == "f32":
        return Blocks(fmt, rows, cols, w)
    if fmt == "bf16":
        return Blocks(fmt, rows, cols, f32_to_bf16(w))

    blocks = cols // BLOCK
    q = np.empty((rows, cols), np.int8 if fmt == "q8_32" else np.uint8)
    d = np.empty((rows, blocks), "<f2")
    m = np.empty((rows, blocks), "<f2") if f.scales == 2 else None
    for r in range(0, rows, _CHUNK_ROWS):
        part = w[r : r + _CHUNK_ROWS]
        cut = slice(r, r + len(part))
        pq, pd, pm = _QUANTISERS[fmt](part.reshape(len(part), blocks, BLOCK))
        q[cut] = pq.reshape(len(part), cols)
        d[cut] = pd
        if m is not None:
            m[cut] = pm
    return Blocks(fmt, rows, cols, q, d, m)


def dequantise(b: Blocks) -> Array:
    """The float32 matrix [R, K] that `b` stands for. Every product and sum is one float32 operation."""
    if b.format == "f32":
        return b.q.astype("<f4")
    if b.format == "bf16":
        return bf16_to_f32(b.q)
    w = b.q.astype("<f4").reshape(b.rows, b.cols // BLOCK, BLOCK)
    if b.format == "q4_32":
        w -= np.float32(8)
    assert b.d is not None
    w *= b.d.astype("<f4")[:, :, None]
    if b.m is not None:
        w += b.m.astype("<f4")[:, :, None]
    return w.reshape(b.rows, b.cols)


# ---- tiles ------------------------------------------------------------------------------------------------


def _tile_view(buf: Array, fmt: Format, rows: int, cols: int, index: int) -> Array:
    """Part `index` of every tile as a view [tiles, units, 16 rows].

    Part 0 holds the values, in units of one element (f32, bf16) or four K-bytes (quantised, as uint32);
    parts 1 and 2 hold d and m, one f16 a block.
    """
    tiles = -(-rows // TILE)
    size = tile_bytes(fmt.name, cols)
    start = _value_bytes(fmt, cols) + (index - 1) * TILE * (cols // fmt.block) * 2 if index else 0
    if index:
        dtype, units = "<f2", cols // fmt.block
    elif fmt.name == "bf16":
        dtype, units = "<u2", cols
    elif fmt.name == "f32":
        dtype, units = "<f4", cols
    else:
        dtype, units = "<u4", cols // fmt.block * fmt.quant_bytes // 4
    width = np.dtype(dtype).itemsize
    flat = buf.view(dtype).reshape(tiles, size // width)
    return flat[:, start // width : start // width + units * TILE].reshape(tiles, units, TILE)


def _scatter(part: Array, values: Array) -> None:
    """Write values [R, units] into part [tiles, units, 16]; rows past R keep their zeros."""
    rows, units = values.shape
    full = rows // TILE
    part[:full] = values[: full * TILE].reshape(full, TILE, units).transpose(0, 2, 1)
    if rows % TILE:
        part[full, :, : rows % TILE] = values[full * TILE :].T


def _gather(part: Array, rows: int) -> Array:
    """The inverse of `_scatter`: part [tiles, units, 16] -> [rows, units]."""
    tiles, units, _ = part.shape
    return np.ascontiguousarray(part.transpose(0, 2, 1).reshape(tiles * TILE, units)[:rows])


def pack(b: Blocks) -> Array:
    """Blocks -> the matrix's bytes, uint8 [matrix_bytes]. Missing rows and padding are zero bytes."""
    f = lookup(b.format, b.cols)
    buf = np.zeros(matrix_bytes(b.format, b.rows, b.cols), np.uint8)
    values = np.ascontiguousarray(b.q)
    if f.quant_bytes == 16:
        halves = values.reshape(b.rows, -1, 2, BLOCK // 2)
        values = (halves[:, :, 0] | (halves[:, :, 1] << np.uint8(4))).reshape(b.rows, -1)
    if f.scales:
        values = values.view("<u4")  # four neighbours along K travel together
    _scatter(_tile_view(buf, f, b.rows, b.cols, 0), values)
    for index, scale in enumerate((b.d, b.m)[: f.scales], start=1):
        assert scale is not None
        _scatter(_tile_view(buf, f, b.rows, b.cols, index), scale)
    return buf


def unpack(buf: Any, fmt: str, rows: int, cols: int) -> Blocks:
    """The inverse of `pack`. `buf` is a contiguous buffer of matrix_bytes bytes, else `bad_format`."""
    f = lookup(fmt, cols)
    raw: Array = np.frombuffer(buf, np.uint8)
    expected = matrix_bytes(fmt, rows, cols)
    if raw.size != expected:
        raise ModelFileError("bad_format", f"{fmt} {rows} x {cols} takes {expected} bytes, found {raw.size}")
    q = _gather(_tile_view(raw, f, rows, cols, 0), rows)
    if f.quant_bytes == 16:
        nibbles = q.view(np.uint8).reshape(rows, -1, 1, BLOCK // 2)
        q = np.concatenate((nibbles & np.uint8(15), nibbles >> np.uint8(4)), axis=2).reshape(rows, cols)
    elif f.scales:
        q = q.view(np.int8)
    scales = [_gather(_tile_view(raw, f, rows, cols, i + 1), rows) for i in range(f.scales)]
    d, m = (*scales, None, None)[:2]
    return Blocks(fmt, rows, cols, q, d, m)
