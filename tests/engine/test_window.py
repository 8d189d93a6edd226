# SPDX-License-Identifier: Apache-2.0
"""Windows: which there are, what they cost, and that only used pages cost anything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cecilia.engine import memory
from cecilia.engine.load import load_runner
from cecilia.engine.window import cache_costs
from cecilia.errors import MemoryLimitError, UsageError
from tools.make_tiny import make_tiny

NATIVE = 256 << 10
VALUES = 2 * 2 * 2 * 16  # a token's: layers, K and V, KV heads, head width


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("window") / "wide.l3r", context=NATIVE)


def test_costs(wide: Path) -> None:
    costs = cache_costs(wide, 128 << 10)
    assert (costs["window"], costs["recommended"], costs["saves_bytes"]) == (128 << 10, "int8-v1", 0)
    per_token = {name: recipe["bytes_per_token"] for name, recipe in costs["recipes"].items()}
    assert (per_token["f32"], per_token["bf16-v1"]) == (4 * VALUES, 2 * VALUES)
    assert per_token["int8-v1"] == VALUES + 4 * VALUES // 16  # a f32 scale for each vector of a head
    assert costs["recipes"]["f32"]["window_bytes"] == (128 << 10) * 4 * VALUES
    fits = {name: recipe["fits"] for name, recipe in costs["recipes"].items()}
    assert fits == {"int8-v1": True, "bf16-v1": False, "f32": True}


def test_latent_recipes_are_recommended_where_they_save(tmp_path: Path) -> None:
    """Two MLA layers. Expanded int8: a key of 32, a value of 16 dimensions for each head, a scale for each.
    Latent int8: the latent vector, in parts of at most 128, and 16 shared dimensions, a scale for each."""
    path = make_tiny(tmp_path / "heads.l3r", architecture="ling3", heads=4, kv_rank=32)
    costs = cache_costs(path, 4096)
    per_token = {name: recipe["bytes_per_token"] for name, recipe in costs["recipes"].items()}
    expanded, latent = 2 * 4 * (36 + 20), 2 * (36 + 20)
    assert (per_token["int8-v1"], per_token["latent-int8-v1"]) == (expanded, latent)
    assert (per_token["bf16-v1"], per_token["latent-bf16-v1"]) == (2 * 4 * 48 * 2, 2 * 48 * 2)
    assert costs["recipes"]["latent-int8-v1"]["window_bytes"] == 4096 * latent
    assert (costs["recommended"], costs["saves_bytes"]) == ("latent-int8-v1", 4096 * (expanded - latent))

    path = make_tiny(tmp_path / "rank.l3r", architecture="ling3", heads=1, kv_rank=256)
    costs = cache_costs(path, 4096)
    assert costs["recipes"]["latent-int8-v1"]["bytes_per_token"] == 2 * (2 * 132 + 20)
    assert (costs["recommended"], costs["saves_bytes"]) == ("int8-v1", 0)


def test_bf16_ends_at_64k(wide: Path) -> None:
    load_runner(wide, profile="bf16-v1", context=64 << 10, threads=1).close()
    with pytest.raises(UsageError, match=r"context_too_large.*bf16-v1 ends at 65536.*int8-v1 f32"):
        load_runner(wide, profile="bf16-v1", context=(64 << 10) + 1, threads=1)


def test_a_long_window_costs_nothing_until_it_is_filled(wide: Path) -> None:
    runner = load_runner(wide, context=128 << 10, threads=1)
    assert runner.pool.allocated == 0
    runner.feed([1] * 65)
    assert runner.pool.allocated == 2
    runner.close()


def test_a_window_that_does_not_fit_can_be_forced(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: memory.RESERVE + (8 << 20))
    costs = cache_costs(wide, NATIVE)
    assert not costs["recipes"]["int8-v1"]["fits"]
    assert (costs["recommended"], costs["saves_bytes"]) == (None, 0)
    with pytest.raises(MemoryLimitError, match=r"KV cache of 262144 tokens 40\.0 MiB"):
        load_runner(wide, context=NATIVE, threads=1)
    load_runner(wide, context=NATIVE, threads=1, force_context=True).close()


def test_a_stretched_window(tmp_path: Path) -> None:
    """Twice the native window with YaRN, by the published settings; a mode of its own."""
    path = make_tiny(tmp_path / "ling.l3r", architecture="ling3", context=1024)
    modes = {}
    for window in (1024, 2048):
        assert cache_costs(path, window)["rope"] == ("default" if window == 1024 else "yarn-2")
        runner = load_runner(path, context=window, profile="latent-int8-v1", threads=1)
        modes[runner.rope] = runner.evaluate([5, 6, 7, 8]).copy()
        runner.close()
    assert not np.array_equal(modes["default"], modes["yarn-2"])  # from the first positions on
    assert cache_costs(path, 1024)["recipes"]["latent-int8-v1"]["longest_window"] == 2048
    with pytest.raises(UsageError, match=r"context_too_large.*limit is 2048"):
        load_runner(path, context=2049, threads=1)


def test_a_recipe_the_architecture_lacks(wide: Path) -> None:
    with pytest.raises(UsageError, match=r"unsupported_profile.*llama has no profile latent-int8-v1, but"):
        load_runner(wide, profile="latent-int8-v1", threads=1)
    with pytest.raises(UsageError, match="unknown_profile"):
        load_runner(wide, profile="int4-v9", threads=1)
