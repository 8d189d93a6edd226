# SPDX-License-Identifier: Apache-2.0
"""What the table of recipes is computed from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cecilia.arch import ling3, llama
from cecilia.engine.recipes import profiles_of
from cecilia.errors import UsageError
from tests.arch.test_ling3 import CONFIG, random_weights
from tests.reference import ling3 as reference
from tests.tools.test_convert_ling3 import checkpoint
from tools.bench import recipes
from tools.bench.recipes import Result
from tools.compare import Distance, distance, read_golden

IDS = np.random.default_rng(7).integers(0, 320, (2, 20)).astype(np.int32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_distance() -> None:
    golden, found = np.float32([[0, 0], [1, 0]]), np.float32([[np.log(3), 0], [1, 0]])
    apart = distance(golden, found)
    assert apart.max_error == pytest.approx(np.log(3))
    assert apart.mean_error == pytest.approx(np.log(3) / 4)
    # of a fair coin to one of 3 : 1, and of equal ones
    assert apart.mean_kl == pytest.approx(np.log(2 / np.sqrt(3)) / 2)
    assert apart.agreement == 1.0  # the first of equals is meant
    assert distance(golden, found[:, ::-1]).agreement == 0.0


def test_nats_per_token() -> None:
    logits = np.tile(np.float32([np.log(3), 0]), (1, 5, 1))
    # four tokens are predicted, one of them the rarer
    assert recipes.nats_per_token(logits, np.array([[1, 0, 0, 1, 0]])) == pytest.approx(
        np.log(4) - 3 / 4 * np.log(3)
    )


def test_every_form_of_cache_has_its_float_profile() -> None:
    profiles = profiles_of(ling3)
    assert {name: recipes.float_profile(name, profiles) for name in profiles} == {
        "int8-v1": "f32",
        "bf16-v1": "f32",
        "f32": "f32",
        "latent-int8-v1": "latent-f32",
        "latent-bf16-v1": "latent-f32",
        "latent-f32": "latent-f32",
    }
    assert recipes.float_profile("int8-v1", profiles_of(llama)) == "f32"


def test_a_row_of_the_table() -> None:
    near, far = Distance(0.5, 0.25, 0.125, 0.9975), Distance(10.0, 1.0, 0.5, 0.5)
    assert Result("q4", "int8-v1", near, far, 1.053751).row() == (
        "| q4 | int8-v1 | 0.5 | 0.25 | 0.12 | 99.75 % | 10 | 1 | 0.5 | 50.00 % | 1.05375 |"
    )
    assert Result("q4", "f32", near, far, None).row().endswith("| 50.00 % |  |")


def test_a_checkpoint_without_a_golden(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no_golden.*holds no golden\.npz"):
        recipes.checkpoints([tmp_path])


def test_a_micro_checkpoint(tmp_path: Path) -> None:
    """Every pair is there, the float ones give the reference's likelihoods, and errors grow as they must."""
    folder = checkpoint(tmp_path / "x", {})
    weights = random_weights(CONFIG)
    logits = np.stack([reference.forward(weights, CONFIG, row, np.float64) for row in IDS])
    nll = -np.take_along_axis(log_softmax(logits)[:, :-1], IDS[:, 1:, None], axis=-1)[..., 0]
    np.savez(folder / "golden.npz", ids=IDS, nll=nll.astype(np.float32))
    golden = read_golden(folder / "golden.npz")

    results = list(recipes.measure(folder, golden, tmp_path))
    assert results[0].quantisation == results[0].profile == "f32"
    assert results[0].to_original == Distance(0.0, 0.0, 0.0, 1.0)
    found = {(r.quantisation, r.profile): r for r in results}
    assert set(found) == {(q, p) for q in recipes.QUANTISATIONS for p in profiles_of(ling3)}
    assert len(results) == len(found)
    for profile in ("f32", "latent-f32"):
        one = found["f32", profile]
        assert one.nats == pytest.approx(nll.mean(), abs=1e-5)
        assert one.to_dequantised.max_error == 0.0
        assert one.to_original.max_error < 1e-4
    # of weights rounded to four bits, what stands for them in f32 is nearer than what they were made from
    for profile in profiles_of(ling3):
        four = found["q4", profile]
        assert 0 < four.to_dequantised.mean_error < four.to_original.mean_error
        assert four.to_original.mean_error > found["w8a8", profile].to_original.mean_error


def test_the_first_rows(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", ids=IDS, nll=np.zeros((2, 19), np.float32))
    golden = recipes.first_rows(read_golden(tmp_path / "g.npz"), 1)
    assert golden.nll is not None
    assert (golden.ids.tolist(), golden.nll.shape) == ([IDS[0].tolist()], (1, 19))
