# SPDX-License-Identifier: Apache-2.0
"""Weight formats: the numbers against ggml's reference quantisers, the bytes against a slow packer."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from cecilia.errors import ModelFileError
from cecilia.formats.quant import (
    FORMATS,
    Blocks,
    dequantise,
    matrix_bytes,
    pack,
    quantise,
    tensor_bytes,
    tile_bytes,
    unpack,
)

GGML = {
    "q8_32": GGMLQuantizationType.Q8_0,
    "q4_32": GGMLQuantizationType.Q4_0,
    "q4a_32": GGMLQuantizationType.Q4_1,
}
SHAPES = [(1, 32), (15, 64), (16, 96), (17, 32), (33, 160)]


def hard_matrix() -> np.ndarray:
    """[R, 64] float32 with what breaks quantisers: zeros, ties, constants, spikes, one sign, wide ranges."""
    rng = np.random.default_rng(3)
    rows = [
        np.zeros(64),
        np.full(64, -1.5),
        np.linspace(-127, 127, 64),
        np.arange(64) % 32 - 15.5,
        (np.arange(64) % 32 - 16) / 2,
        np.where(np.arange(64) % 32 == 5, 1000, 1e-3),
        np.where(np.arange(64) % 32 == 9, -1000, 1e-3),
        np.abs(rng.standard_normal(64)),
        -np.abs(rng.standard_normal(64)),
        np.r_[127, np.full(63, 0.49999997)],
        np.r_[-127, np.arange(63) - 0.5],
        rng.standard_normal(64) * 1e-6,
        rng.standard_normal(64) * 1e4,
    ]
    return np.concatenate([np.array(rows), rng.standard_normal((200, 64))]).astype(np.float32)


@pytest.mark.parametrize("fmt", GGML)
def test_quantisers_give_ggml_numbers(fmt: str) -> None:
    w = hard_matrix()
    raw = quants.quantize(w, GGML[fmt]).reshape(len(w), 2, -1)  # [R, K/32, bytes of a ggml block]
    b = quantise(w, fmt)
    scales = [b.d] if b.m is None else [b.d, b.m]
    for i, scale in enumerate(scales):
        np.testing.assert_array_equal(raw[:, :, 2 * i : 2 * i + 2].copy().view("<f2")[..., 0], scale)
    codes = raw[:, :, 2 * len(scales) :]
    nibbles = np.concatenate([codes & 15, codes >> 4], axis=2)
    expected = codes.view(np.int8) if fmt == "q8_32" else nibbles
    np.testing.assert_array_equal(b.q.reshape(len(w), 2, 32), expected)
    np.testing.assert_array_equal(dequantise(b), quants.dequantize(raw.reshape(len(w), -1), GGML[fmt]))


def test_bf16_takes_the_nearer_neighbour_and_the_even_one_of_two() -> None:
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 0x7F7F0000, 20000, dtype=np.uint32) | (
        rng.integers(0, 2, 20000, dtype=np.uint32) << 31
    )
    ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    w = np.concatenate([bits, ties, [0, 0x80000000, 1, 0x007FFFFF, 0x7F7F0000]]).astype(np.uint32)
    low = w & np.uint32(0xFFFF0000)
    high = low + np.uint32(0x10000)
    exact = [x.view(np.float32).astype(np.float64) for x in (w, low, high)]
    below, above = np.abs(exact[0] - exact[1]), np.abs(exact[2] - exact[0])
    even_is_low = low & np.uint32(0x10000) == 0
    expected = np.where((below < above) | ((below == above) & even_is_low), low, high) >> np.uint32(16)
    b = quantise(w.view(np.float32)[None], "bf16")
    np.testing.assert_array_equal(b.q[0], expected)
    np.testing.assert_array_equal(dequantise(b)[0].view(np.uint32), expected.astype(np.uint32) << 16)


def test_f32_is_kept() -> None:
    w = hard_matrix()
    np.testing.assert_array_equal(dequantise(quantise(w, "f32")), w)


@pytest.mark.parametrize("fmt", GGML)
def test_values_too_small_for_a_scale_become_small_without_a_warning(fmt: str) -> None:
    w = np.full((2, 32), 1e-44, np.float32)
    w[0, 3] = -1e-39
    assert np.abs(dequantise(quantise(w, fmt))).max() < 1e-7


# ---- sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "cols", "expected"),
    [
        ("f32", 1, 64),
        ("f32", 576, 36864),
        ("bf16", 1, 64),
        ("bf16", 3, 128),
        ("q8_32", 32, 576),
        ("q8_32", 64, 1088),
        ("q4_32", 32, 320),
        ("q4_32", 64, 576),
        ("q4a_32", 32, 320),
        ("q4a_32", 64, 640),
    ],
)
def test_tile_bytes(fmt: str, cols: int, expected: int) -> None:
    assert tile_bytes(fmt, cols) == expected
    assert matrix_bytes(fmt, 16, cols) == expected
    assert matrix_bytes(fmt, 33, cols) == 3 * expected
    assert tensor_bytes(fmt, 2, 1, cols) == expected


def test_a_vector_is_plain_f32() -> None:
    assert tensor_bytes("f32", 1, 1, 65) == 260


@pytest.mark.parametrize("fmt", FORMATS)
def test_bits_per_weight_is_the_size_of_a_large_matrix(fmt: str) -> None:
    assert matrix_bytes(fmt, 4096, 4096) * 8 / 4096**2 == FORMATS[fmt].bits_per_weight


# ---- tiles ------------------------------------------------------------------------------------------------


def slow_pack(b: Blocks) -> bytes:
    """The tile formulas of docs/FORMAT-L3R.md, one element at a time."""
    k_all, out = b.cols, bytearray()
    for t in range(0, b.rows, 16):
        values = {"f32": 64, "bf16": 32, "q8_32": 16, "q4_32": 8, "q4a_32": 8}[b.format] * k_all
        scale = 0 if b.d is None else k_all // 32 * 32
        used = values + scale * (2 if b.m is not None else 1)
        tile = bytearray(-(-used // 64) * 64)
        for r in range(min(16, b.rows - t)):
            row = b.q[t + r]
            for k in range(k_all):
                block, i = divmod(k, 32)
                if b.format == "f32":
                    struct.pack_into("<f", tile, (k * 16 + r) * 4, row[k])
                elif b.format == "bf16":
                    struct.pack_into("<H", tile, (k * 16 + r) * 2, row[k])
                elif b.format == "q8_32":
                    g, j = divmod(i, 4)
                    struct.pack_into("<b", tile, ((block * 8 + g) * 16 + r) * 4 + j, row[k])
                else:
                    g, j = divmod(i % 16, 4)
                    tile[((block * 4 + g) * 16 + r) * 4 + j] |= int(row[k]) << (4 if i >= 16 else 0)
            for n, s in enumerate((b.d, b.m)):
                for block in range(0 if s is None else k_all // 32):
                    struct.pack_into("<e", tile, values + n * scale + (block * 16 + r) * 2, s[t + r, block])
        out += tile
    return bytes(out)


def random_blocks(fmt: str, rows: int, cols: int) -> Blocks:
    """Any legal numbers, -128 included, as an imported file may have them."""
    rng = np.random.default_rng(rows * 1000 + cols)
    shape = (rows, cols)
    if fmt == "f32":
        return Blocks(fmt, rows, cols, rng.standard_normal(shape, np.float32))
    if fmt == "bf16":
        return Blocks(fmt, rows, cols, rng.integers(0, 0x7F80, shape).astype(np.uint16))
    q = (
        rng.integers(-128, 128, shape).astype(np.int8)
        if fmt == "q8_32"
        else rng.integers(0, 16, shape).astype(np.uint8)
    )
    d, m = (rng.standard_normal((rows, cols // 32)).astype(np.float16) for _ in range(2))
    return Blocks(fmt, rows, cols, q, d, m if fmt == "q4a_32" else None)


CASES = [(f, r, c) for f in FORMATS for r, c in SHAPES] + [
    (f, r, 37) for f in ("f32", "bf16") for r in (1, 18)
]


@pytest.mark.parametrize(("fmt", "rows", "cols"), CASES)
def test_pack_follows_the_formulas_and_unpack_inverts_it(fmt: str, rows: int, cols: int) -> None:
    b = random_blocks(fmt, rows, cols)
    packed = pack(b)
    assert packed.tobytes() == slow_pack(b)
    back = unpack(memoryview(packed.tobytes()), fmt, rows, cols)
    assert (back.format, back.rows, back.cols) == (fmt, rows, cols)
    assert back.q.dtype == b.q.dtype
    np.testing.assert_array_equal(back.q, b.q)
    for found, expected in ((back.d, b.d), (back.m, b.m)):
        assert (found is None) == (expected is None)
        if expected is not None:
            np.testing.assert_array_equal(found, expected)


# ---- errors -----------------------------------------------------------------------------------------------


def refused(code: str, fmt: str, w: np.ndarray) -> None:
    with pytest.raises(ModelFileError) as caught:
        quantise(w, fmt)
    assert caught.value.code == code
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(fmt: str, value: float) -> None:
    w = np.zeros((3, 64), np.float32)
    w[2, 40] = value
    refused("bad_weights", fmt, w)


@pytest.mark.parametrize(
    ("fmt", "value"), [("bf16", 3.4e38), ("q8_32", 1e7), ("q4_32", 1e6), ("q4a_32", 7e4)]
)
def test_weights_beyond_the_format_are_refused(fmt: str, value: float) -> None:
    refused("bad_weights", fmt, np.full((1, 32), -value, np.float32))


@pytest.mark.parametrize("fmt", GGML)
def test_columns_that_are_no_multiple_of_the_block_are_refused(fmt: str) -> None:
    refused("bad_format", fmt, np.zeros((1, 33), np.float32))


def test_an_unknown_format_is_refused() -> None:
    refused("bad_format", "q3_32", np.zeros((1, 32), np.float32))


@pytest.mark.parametrize(
    ("fmt", "rank", "rows"), [("bf16", 1, 1), ("f32", 1, 2), ("f32", 3, 1), ("f32", 0, 1)]
)
def test_a_tensor_is_a_matrix_or_an_f32_vector(fmt: str, rank: int, rows: int) -> None:
    with pytest.raises(ModelFileError, match="bad_format"):
        tensor_bytes(fmt, rank, rows, 32)


@pytest.mark.parametrize("change", [-1, 1, -64, 64])
def test_unpack_refuses_another_size(change: int) -> None:
    with pytest.raises(ModelFileError, match="bad_format"):
        unpack(bytes(tile_bytes("q8_32", 64) + change), "q8_32", 16, 64)
