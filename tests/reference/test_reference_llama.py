# SPDX-License-Identifier: Apache-2.0
"""The numpy Llama against stored results of llama.cpp on real weights.

llama.cpp rounds activations to 8 bits, so the two agree as distributions, not as numbers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.reference import gguf_weights, llama
from tools.compare import kl_divergence

pytestmark = pytest.mark.model
TOKENS = 64


def test_the_reference_agrees_with_another_implementation(gguf_path: Path, fixtures_dir: Path) -> None:
    weights, hyper = gguf_weights.read(gguf_path)
    golden = np.load(fixtures_dir / "smollm2" / "golden_llamacpp.npz")
    stored = [i for i, (row, at) in enumerate(golden["logits_at"]) if row == 0 and at < TOKENS]
    logits = llama.forward(weights, hyper, golden["ids"][0, :TOKENS])
    ours = logits[golden["logits_at"][stored, 1]]
    want = golden["logits"][stored].astype(np.float32)
    assert kl_divergence(want, ours).mean() < 0.01
    logp = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    nll = -logp[np.arange(TOKENS - 1), golden["ids"][0, 1:TOKENS]]
    assert nll.mean() == pytest.approx(golden["nll"][0, : TOKENS - 1].mean(), rel=0.02)


def test_half_the_precision_changes_little() -> None:
    """f32 and f64 give the same logits to 1e-4: the reference is no worse than its number format."""
    rng = np.random.default_rng(1)
    hyper = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "norm_eps": 1e-5, "rope_base": 1e4}
    shapes = {"self_attn.q_proj": (64, 48), "self_attn.k_proj": (32, 48), "self_attn.v_proj": (32, 48)}
    shapes |= {"self_attn.o_proj": (48, 64), "mlp.gate_proj": (80, 48), "mlp.up_proj": (80, 48)}
    shapes |= {"mlp.down_proj": (48, 80), "input_layernorm": (48,), "post_attention_layernorm": (48,)}
    weights = {
        f"model.layers.{layer}.{name}.weight": rng.standard_normal(shape) * shape[-1] ** -0.5
        for layer in range(2)
        for name, shape in shapes.items()
    }
    weights |= {"model.embed_tokens.weight": rng.standard_normal((100, 48)), "model.norm.weight": np.ones(48)}
    ids = rng.integers(0, 100, 40)
    single = llama.forward(weights, hyper | {"tied": True}, ids)
    double = llama.forward(weights, hyper | {"tied": True}, ids, np.float64)
    assert single.dtype == np.float32
    assert double.dtype == np.float64
    assert np.abs(single - double).max() < 1e-4
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"][::-1]
    untied = llama.forward(weights, hyper | {"tied": False}, ids, np.float64)
    np.testing.assert_array_equal(untied, double[:, ::-1])
