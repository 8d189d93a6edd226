# SPDX-License-Identifier: Apache-2.0
"""Ling-3.0 against another implementation's results, and its bytes against every way to reach a position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cecilia._kernels import isa, threads
from cecilia.arch import ling3
from cecilia.engine.load import load_runner
from cecilia.engine.recipes import PROFILES
from cecilia.engine.runner import Runner
from cecilia.errors import ModelFileError
from cecilia.layers.rope import Rope, Yarn
from tests.arch import ling3_file
from tests.reference import ling3 as reference
from tests.reference.test_reference_ling3 import RANDOM, checkpoint


@pytest.mark.parametrize("name", RANDOM)
def test_results_of_another_implementation(tmp_path: Path, name: str) -> None:
    weights, config, golden = checkpoint(name)
    runner = load_runner(ling3_file.write(tmp_path / "x.l3r", config, weights), profile="f32", threads=1)
    try:
        ids = golden["ids"].tolist()
        found = runner.evaluate(ids)
        np.testing.assert_allclose(found, golden["logits"], rtol=0, atol=1e-3)
        np.testing.assert_array_equal(found.argmax(axis=1), golden["logits"].argmax(axis=1))
        assert runner.greedy(ids[: len(ids) // 3], 10) == golden["greedy"].tolist()
    finally:
        runner.close()


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """A micro checkpoint of the official layout, for clones without the fixtures."""
    rng = np.random.default_rng(seed)
    spec = ling3.spec_from(ling3_file.hyper_of(config))
    inner, made = spec.heads * spec.head_dim, {}
    for name, t in ling3.tensors(spec).items():
        shape = (t.rows, t.cols) if t.rank == 2 else (t.cols,)
        made[name] = rng.standard_normal(shape) * (t.cols**-0.5 if t.rank == 2 else 0.1)
        if name.endswith("norm.weight"):
            made[name] += 1
    for i in range(spec.layers):
        p = f"model.layers.{i}.attention."
        if spec.is_mla(i):
            del made[p + "k_b_proj_t.weight"]
            k, v = (made.pop(f"{p}{n}_b_proj.weight").reshape(spec.heads, -1, spec.kv_rank) for n in "kv")
            made[p + "kv_b_proj.weight"] = np.concatenate([k, v], axis=1).reshape(-1, spec.kv_rank)
        else:
            del made[p + "A"]
            for n in "qkv":
                made[f"{p}{n}_conv1d.weight"] = 0.5 * rng.standard_normal((inner, 1, 4))
            made[p + "A_log"] = np.log(0.2 * rng.uniform(1, 16, spec.heads))
            made[p + "dt_bias"] = 0.5 * rng.standard_normal(inner) - 1
    return {name: value.astype(np.float32) for name, value in made.items()}


CONFIG = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "layer_group_size": 4,
    "first_k_dense_replace": 1,
    "intermediate_size": 96,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "routed_scaling_factor": 2.5,
    "kda_lower_bound": -5,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 6_000_000,
    "rope_scaling": None,
}
IDS = np.random.default_rng(4).integers(0, 320, 130).tolist()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, weights = tmp_path_factory.mktemp("ling3"), random_weights(CONFIG)
    return {
        quant: ling3_file.write(folder / f"{quant}.l3r", CONFIG, weights, quant)
        for quant in ("f32", "q8_32", "q4_32")
    }


@pytest.mark.parametrize("change", [{}, {"q_lora_rank": None}, {"num_hidden_layers": 6}])
def test_the_numpy_reference(tmp_path: Path, change: dict[str, Any]) -> None:
    config = CONFIG | change
    weights = random_weights(config)
    runner = load_runner(ling3_file.write(tmp_path / "x.l3r", config, weights), profile="f32", threads=1)
    try:
        found = runner.evaluate(IDS[:70])
    finally:
        runner.close()
    want = reference.forward(weights, config, IDS[:70], np.float64)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-3)


def logits(path: Path, profile: str) -> np.ndarray:
    runner = load_runner(path, profile=profile, threads=1)
    try:
        return runner.evaluate(IDS)
    finally:
        runner.close()


@pytest.mark.parametrize("name", RANDOM)
def test_the_golden_results_in_both_forms(tmp_path: Path, name: str) -> None:
    weights, config, golden = checkpoint(name)
    path = ling3_file.write(tmp_path / "x.l3r", config, weights)
    found = {}
    for profile in ("f32", "latent-f32"):
        runner = load_runner(path, profile=profile, threads=1)
        try:
            found[profile] = runner.evaluate(golden["ids"])
            np.testing.assert_allclose(found[profile], golden["logits"], rtol=0, atol=1e-3)
            np.testing.assert_array_equal(found[profile].argmax(1), golden["logits"].argmax(1))
            prompt, wanted = golden["ids"][: len(golden["ids"]) // 3], golden["greedy"]
            assert runner.greedy(prompt, len(wanted)) == wanted.tolist()
        finally:
            runner.close()
    np.testing.assert_allclose(found["latent-f32"], found["f32"], rtol=0, atol=1e-4)


def test_the_latent_form_computes_the_same(files: dict[str, Path]) -> None:
    found = logits(files["f32"], "latent-f32")
    np.testing.assert_allclose(found, logits(files["f32"], "f32"), rtol=0, atol=1e-4)


def states(runner: Runner) -> bytes:
    return bytes(memoryview(runner.session.fixed))


@pytest.mark.parametrize("name", isa.available())
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("quant", ["f32", "q8_32", "q4_32"])
def test_every_way_to_a_position_gives_the_same_bytes(
    files: dict[str, Path], name: str, profile: str, quant: str
) -> None:
    isa.use(name)
    runner = load_runner(files[quant], profile=profile, threads=1)
    try:
        whole = runner.evaluate(IDS)
        state = states(runner)
        for size in (1, 3, 16, 17, 100):
            for count in (1, 2):
                threads.set_threads(count)
                assert runner.evaluate(IDS, chunk=size).tobytes() == whole.tobytes(), (size, count)
                assert states(runner) == state
    finally:
        runner.close()


def test_a_session_goes_on_or_starts_again(files: dict[str, Path]) -> None:
    runner = load_runner(files["q8_32"], threads=1)
    try:
        cold = runner.evaluate(IDS)
        session = runner.session
        runner.reset()
        session.evaluate(IDS[:50])
        assert session.sync(IDS) == 50
        assert session.evaluate(IDS[50:], last_only=False).tobytes() == cold[50:].tobytes()
        assert session.sync(IDS[:40]) == 0  # a recurrent state cannot be taken back
        assert session.evaluate(IDS[:40], last_only=False).tobytes() == cold[:40].tobytes()
    finally:
        runner.close()


def test_layers_of_each_kind() -> None:
    spec = ling3.spec_from(ling3_file.hyper_of(CONFIG | {"num_hidden_layers": 10}))
    assert [i for i in range(10) if spec.is_mla(i)] == [
        3,
        7,
        8,
        9,
    ]  # the last two: behind the last whole group


def test_bytes_of_the_published_shape() -> None:
    """24 layers, 16 heads: 61,440 bytes a token expanded in bf16; KDA states 18.87 MB and rows 1.33 MB."""
    tiny = CONFIG | {
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "head_dim": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    spec = ling3.spec_from(ling3_file.hyper_of(tiny))
    assert ling3.page_bytes(spec, "bf16") == 64 * 61_440
    assert ling3.page_bytes(spec, "int8") == 64 * (30_720 + 6 * 16 * 2 * 4)  # two f32 scales a head
    assert ling3.page_bytes(spec, "latent-bf16") == 64 * 6_912
    assert ling3.page_bytes(spec, "latent-int8") == 64 * 6 * (576 + 5 * 4)  # a scale for each 128, and R
    assert ling3.state_bytes(spec) == 18 * (16 * 128 * 128 * 4 + 3 * 3 * 2048 * 4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("head_dim", 24),
        ("kv_rank", 40),
        ("kv_rank", 272),  # of 17 parts
        ("expert_groups", 16),
        ("expert_groups_used", 5),
        ("experts_used", 9),
        ("gate_lower_bound", 5.0),
        ("q_rank", -1),
        ("yarn_factor", 0.5),
        ("layers", 2000),
    ],
)
def test_values_outside_the_envelope(key: str, value: object) -> None:
    with pytest.raises(ModelFileError, match=key) as caught:
        ling3.spec_from(ling3_file.hyper_of(CONFIG) | {key: value})
    assert caught.value.code == "bad_hyper"


def test_a_window_of_256k_has_the_published_settings() -> None:
    spec = ling3.spec_from(ling3_file.hyper_of(CONFIG | {"max_position_embeddings": 131072}))
    assert ling3.for_window(spec, 131072) is spec
    assert ling3.rope_mode(spec) == "default"
    wide = ling3.for_window(spec, 131073)
    assert (wide.yarn_factor, wide.yarn_context, wide.context) == (2.0, 131072, 262144)
    assert (ling3.rope_mode(wide), ling3.longest_window(wide)) == ("yarn-2", 262144)


def test_yarn_angles() -> None:
    """The published setting for a window of 256K; frequencies of the library that defines this rope type."""
    rope = Rope(64, 6_000_000, 2, yarn=Yarn(2.0, 131072))
    rope.fill(0, 2)
    factor = 1.0693147180559945
    np.testing.assert_allclose(np.asarray(rope.cos)[0], factor, rtol=1e-6)
    wanted = {
        1: 0.6140204,
        13: 1.763502e-3,
        14: 1.015150e-3,
        17: 1.880046e-4,
        20: 3.264209e-5,
        31: 1.357175e-7,
    }
    for pair, frequency in wanted.items():
        assert np.asarray(rope.sin)[1, pair] == pytest.approx(factor * np.sin(frequency), rel=2e-6)
