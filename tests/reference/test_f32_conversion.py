# SPDX-License-Identifier: Apache-2.0
"""Real weights through the whole chain: a GGUF converted with `--quant f32` must compute what numpy does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cecilia.engine.load import load_runner
from tests.reference import gguf_weights, llama
from tools.convert.pipeline import Options, convert

pytestmark = pytest.mark.model
TOKENS = 48


def test_f32_logits_equal_the_reference(gguf_path: Path, tmp_path: Path) -> None:
    weights, hyper = gguf_weights.read(gguf_path)
    ids = np.random.default_rng(7).integers(0, len(weights["model.embed_tokens.weight"]), TOKENS)
    want = llama.forward(weights, hyper, ids)
    path = convert(gguf_path, tmp_path / "f32.l3r", Options(quant="f32", tokenizer="none")).path
    runner = load_runner(path, profile="f32", context=TOKENS, threads=1)
    try:
        ours = runner.evaluate(ids.tolist())
    finally:
        runner.close()
    path.unlink()
    assert np.abs(ours - want).max() < 1e-3
    np.testing.assert_array_equal(ours.argmax(axis=1), want.argmax(axis=1))
