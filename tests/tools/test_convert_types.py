# SPDX-License-Identifier: Apache-2.0
"""Tensor types that no format of ours holds exactly, against the gguf package's dequantisation.

The bounds follow from the formats. Q4_K keeps its quants and rounds d*scale and dmin*min to f16, 2^-11 of
each: an error of at most 2^-11 (15 |d*scale| + |dmin*min|). The others are rounded to q8_32, half a step of
which is max|w| / 254 of the block, a little more by the rounding of that step to f16.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from cecilia.errors import ModelFileError
from cecilia.formats.quant import dequantise
from tests.tools import tiny_gguf
from tools.convert.__main__ import main
from tools.convert.pipeline import convert
from tools.convert.tensor_types import source_type

ROWS, COLS = 6, 768
# Where the f16 numbers of a block stand; every other byte may have any value.
HALVES = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.Q5_1: (0, 2)}


def random_rows(kind: Kind, seed: int = 0) -> np.ndarray:
    """Raw rows u8 [ROWS, row bytes] of random bits with scales of usual size, of either sign."""
    rng = np.random.default_rng(seed)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (ROWS, COLS // elements, size), np.uint8)
    for at in HALVES[kind]:
        scales = rng.normal(0, 0.01, (ROWS, COLS // elements, 1)).astype("<f2")
        raw[..., at : at + 2] = scales.view(np.uint8)
    return raw.reshape(ROWS, -1)


def test_q4_k_keeps_its_quants_and_rounds_its_scales() -> None:
    raw = random_rows(Kind.Q4_K)
    blocks = source_type("t", "Q4_K").fit(raw, COLS)
    assert blocks.format == "q4a_32"
    want = gguf.quants.dequantize(raw, Kind.Q4_K)
    scale, minimum = (np.abs(part.astype(np.float32)) for part in (blocks.d, blocks.m))
    bound = 2.0**-11 * (1 + 2**-10) * (15 * scale + minimum)
    error = np.abs(dequantise(blocks) - want).reshape(ROWS, -1, 32).max(axis=-1)
    assert (error <= bound).all()
    assert np.sqrt(np.square(error).mean() / np.square(want).mean()) < 2**-10


@pytest.mark.parametrize("kind", [Kind.Q5_1, Kind.Q5_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_other_types_are_rounded_to_eight_bits(kind: Kind) -> None:
    raw = random_rows(kind)
    blocks = source_type("t", kind.name).fit(raw, COLS)
    assert blocks.format == "q8_32"
    want = gguf.quants.dequantize(raw, kind).reshape(ROWS, -1, 32)
    error = np.abs(dequantise(blocks).reshape(want.shape) - want)
    assert (error <= np.abs(want).max(axis=-1, keepdims=True) * (1 / 254 + 2**-11)).all()


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_what_is_decoded_is_exact(kind: Kind) -> None:
    raw = random_rows(kind, 1)
    found = source_type("t", kind.name)
    assert not found.exact
    np.testing.assert_array_equal(found.decode(raw, COLS).q, gguf.quants.dequantize(raw, kind))


def write(path: Path, kind: Kind, raw: np.ndarray) -> None:
    """A tiny model whose embedding is `raw`, in rows of 256; all else is f32."""
    keys = {"llama.embedding_length": 256, "llama.attention.key_length": 16}
    tiny_gguf.write(path, Kind.F32, keys=keys, raw={"token_embd.weight": (raw, kind)}, width=256)


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_the_error_of_every_such_tensor_is_printed(
    kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.tile(random_rows(kind), (50, 1))[:, : 256 // elements * size].copy()
    write(tmp_path / "x.gguf", kind, raw)
    assert main([str(tmp_path / "x.gguf"), "--out", str(tmp_path / "x.l3r")]) == 0
    printed = capsys.readouterr().out
    assert "model.embed_tokens.weight: relative RMS error 0.00" in printed
    assert printed.count("relative RMS error") == 2  # the tensor's and the total


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_scales_that_are_not_finite_are_refused(kind: Kind, tmp_path: Path) -> None:
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.tile(random_rows(kind), (50, 1))[:, : 256 // elements * size].copy()
    at = HALVES[kind][0]
    raw[7, at : at + 2] = np.array([np.nan], "<f2").view(np.uint8)
    write(tmp_path / "x.gguf", kind, raw)
    with pytest.raises(ModelFileError, match=r"'token_embd\.weight' holds values that are not finite"):
        convert(tmp_path / "x.gguf", tmp_path / "x.l3r")
    assert not (tmp_path / "x.l3r").exists()
