# SPDX-License-Identifier: Apache-2.0
"""The numpy form of Ling-3.0 against results of another implementation, and against worked examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reference import ling3

FIXTURES = Path(__file__).resolve().parents[3] / "shared" / "fixtures" / "ling3"
RANDOM = ("micro", "micro-yarn", "realdims", "small-qk", "negative-bias")


def checkpoint(name: str) -> tuple[dict[str, Any], dict[str, Any], Any]:
    folder = FIXTURES / name
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    config = json.loads((folder / "config.json").read_text())
    return read(folder / "model.safetensors"), config, np.load(folder / "golden.npz")


def read(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file as f32; numpy has no bf16, whose bits are an f32's upper half."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    found = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = (start + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(raw[begin:end], np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            assert entry["dtype"] == "F32"
            values = np.frombuffer(raw[begin:end], np.float32)
        found[name] = values.reshape(entry["shape"])
    return found


@pytest.mark.parametrize("name", RANDOM)
def test_logits_of_the_other_implementation(name: str) -> None:
    weights, config, golden = checkpoint(name)
    found = ling3.forward(weights, config, golden["ids"], np.float64)
    np.testing.assert_allclose(found, golden["logits"], rtol=0, atol=1e-3)
    np.testing.assert_array_equal(found.argmax(axis=1), golden["logits"].argmax(axis=1))


def test_a_trained_model() -> None:
    weights, config, golden = checkpoint("trained")
    ids = golden["ids"][0]
    found = ling3.forward(weights, config, ids[:128], np.float32)
    np.testing.assert_allclose(found, golden["logits"][:128], rtol=0, atol=1e-3)


def test_the_delta_rule_by_hand() -> None:
    """One head of width 2, three tokens; figures worked out independently."""
    q, k, v = (
        np.array(rows, np.float64)[:, None, :]
        for rows in ([[1, 2], [0.5, -1], [2, 1]], [[1, 0], [1, 1], [0, 2]], [[1, -1], [2, 0.5], [-1, 3]])
    )
    f = np.array([[0.2, -0.3], [-1, 0.5], [0, 0]])[:, None, :]
    g = ling3.decay(f, np.array([np.log(2)]), np.array([[-1, 0.5]]), -5.0)
    beta = ling3.sigmoid(np.array([[0.0], [1.0], [-1.0]]))
    o, state = ling3.delta_rule(ling3.l2(q) * 2**-0.5, ling3.l2(k), v, g, beta)
    np.testing.assert_allclose(
        g[:, 0],
        [[-0.83990807, -2.9934383], [-0.08993105, -4.40398539], [-0.59601461, -3.65529289]],
        atol=1e-7,
    )
    np.testing.assert_allclose(beta[:, 0], [0.5, 0.73105858, 0.26894142], atol=1e-8)
    np.testing.assert_allclose(
        o[:, 0], [[0.15811379, -0.15811379], [-0.12959963, -0.27907428], [0.38146703, 0.24671208]], atol=1e-6
    )
    np.testing.assert_allclose(state[0], [[0.72943125, -0.01734726], [-0.25255772, 0.81486669]], atol=1e-6)


def test_the_router_by_hand() -> None:
    """Eight experts in four groups, two groups and two experts chosen."""
    config = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "routed_scaling_factor": 2.5}
    logits = np.array([0.1, 0.9, -0.2, 0.4, 1.2, -1, 0.3, 0.2])
    bias = np.array([0, -0.3, 0.5, 0, -0.6, 0, 0.1, 0.2])
    ids, weights = ling3.route(logits, bias, config)
    assert ids.tolist() == [2, 7]
    np.testing.assert_allclose(weights, [1.12541501, 1.37458499], atol=1e-8)


def test_yarn_frequencies() -> None:
    """Ling-3.0-tiny with a window of 256K; figures of the library that defines this rope type."""
    yarn = {"factor": 2.0, "original_max_position_embeddings": 131072}
    config = {"qk_rope_head_dim": 64, "rope_theta": 6_000_000, "rope_scaling": yarn}
    found, factor = ling3.frequencies(config)
    wanted = {
        0: 1.0,
        1: 0.6140204,
        13: 1.763502e-3,
        14: 1.015150e-3,
        17: 1.880046e-4,
        20: 3.264209e-5,
        21: 1.781592e-5,
        31: 1.357175e-7,
    }
    for pair, value in wanted.items():
        assert found[pair] == pytest.approx(value, rel=1e-6)
    assert factor == pytest.approx(1.0693147180559945, rel=1e-15)
