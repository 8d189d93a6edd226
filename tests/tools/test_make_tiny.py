# SPDX-License-Identifier: Apache-2.0
"""Random models: formats and values; they run and chat; full sizes are the published ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cecilia.arch import ARCHITECTURES
from cecilia.arch.base import TensorSpec
from cecilia.engine.load import load, load_runner
from cecilia.errors import ModelFileError, UsageError
from cecilia.formats.l3r import open_model
from cecilia.text.tokenizer import Tokenizer
from tests.tools.test_convert_ling3 import formats, values
from tools.make_tiny import main, make_tiny
from tools.shapes import hyper

SPECIALS = (
    *("<|startoftext|>", "<|endoftext|>", "<|role_end|>", "<role>", "</role>"),
    *("<tool_call>", "</tool_call>", "<think>", "</think>"),
)
NARROW: dict[str, Any] = {  # of full width in every way that decides a format, in little room
    "layers": 4,
    "heads": 2,
    "head_dim": 32,
    "q_rank": 64,
    "kv_rank": 64,
    "nope_dim": 32,
    "v_dim": 32,
}


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("ling3") / "micro.l3r", architecture="ling3", quant="f32")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose quantised matrices are noise, as those of full sizes are."""
    path = tmp_path_factory.mktemp("ling3") / "wide.l3r"
    small = {"width": 64, "experts": 16, "dense_ff": 64, "expert_ff": 32, "shared_ff": 32, "vocab": 320}
    return make_tiny(path, architecture="ling3", full=True, **NARROW, **small)


def test_kinds_of_weights(micro: Path) -> None:
    found = values(micro)
    together: dict[str, list[np.ndarray]] = {}
    for name, value in found.items():
        together.setdefault(name.rsplit(".", 2)[-2 if name.endswith("weight") else -1], []).append(
            value.ravel()
        )
    kinds = {kind: np.concatenate(values) for kind, values in together.items()}
    assert (kinds["A"].min() >= 0.2, kinds["A"].max() <= 3.2) == (True, True)
    for kind, mean, spread in [
        ("input_layernorm", 1, 0.1),
        ("o_norm", 1, 0.1),
        ("q_conv1d", 0, 0.5),
        ("dt_bias", -1, 0.5),
        ("expert_bias", 0, 0.2),
        ("q_proj", 0, 64**-0.5),
        ("down_proj", 0, 32**-0.5),
    ]:
        assert abs(kinds[kind].mean() - mean) < 5 * spread / kinds[kind].size ** 0.5, kind
        assert abs(kinds[kind].std() / spread - 1) < 0.2, kind


def test_turned_keys_are_those_of_each_head_transposed(micro: Path) -> None:
    found = values(micro)
    keys = found["model.layers.3.attention.k_b_proj.weight"]  # 4 heads of 16 rows, 32 columns
    turned = found["model.layers.3.attention.k_b_proj_t.weight"]
    for head in range(4):
        np.testing.assert_array_equal(turned[head * 32 : head * 32 + 32], keys[head * 16 : head * 16 + 16].T)


def test_noise_is_as_large_as_rounded_weights_and_has_turned_keys_too(wide: Path) -> None:
    found = values(wide)
    for name, fan_in in [
        ("lm_head.weight", 64),
        ("model.layers.0.attention.q_proj.weight", 64),
        ("model.layers.1.mlp.experts.5.up_proj.weight", 64),
        ("model.layers.1.mlp.experts.5.down_proj.weight", 32),
    ]:
        assert abs(found[name].std() * fan_in**0.5 - 1) < 0.1, name
        assert abs(found[name].mean()) < 0.02, name
    keys = found["model.layers.3.attention.k_b_proj.weight"].reshape(2, 32, 64)
    turned = found["model.layers.3.attention.k_b_proj_t.weight"].reshape(2, 64, 32)
    np.testing.assert_allclose(turned, keys.transpose(0, 2, 1), atol=4e-3)  # 8 bits for up to 0.5, twice


@pytest.mark.parametrize(
    ("quant", "routed", "others"),
    [("w4a8", "q4_32", "q8_32"), ("w8a8", "q8_32", "q8_32"), ("q4_32", "q4_32", "q4_32")],
)
def test_formats_follow_the_converter(tmp_path: Path, quant: str, routed: str, others: str) -> None:
    found = formats(make_tiny(tmp_path / "x.l3r", architecture="ling3", quant=quant, **NARROW))
    assert found["model.layers.1.mlp.experts.3.down_proj.weight"] == routed
    assert found["model.layers.1.mlp.shared_experts.down_proj.weight"] == others
    assert found["model.layers.3.attention.k_b_proj_t.weight"] == others
    assert found["lm_head.weight"] == others
    for exact in ("0.attention.b_proj", "3.attention.g_proj", "1.mlp.gate"):  # too decisive to be quantised
        assert found[f"model.layers.{exact}.weight"] == "f32"


def test_rows_that_are_no_blocks_are_floats(tmp_path: Path) -> None:
    found = formats(make_tiny(tmp_path / "x.l3r", architecture="ling3", q_rank=24))
    assert found["model.layers.3.attention.q_b_proj.weight"] == "f32"


def test_the_same_arguments_give_the_same_file(tmp_path: Path, wide: Path) -> None:
    small = {"width": 64, "experts": 16, "dense_ff": 64, "expert_ff": 32, "shared_ff": 32, "vocab": 320}
    again = make_tiny(tmp_path / "x.l3r", architecture="ling3", full=True, **NARROW, **small)
    other = make_tiny(tmp_path / "y.l3r", architecture="ling3", full=True, seed=1, **NARROW, **small)
    assert again.read_bytes() == wide.read_bytes()
    assert other.read_bytes() != wide.read_bytes()


@pytest.mark.parametrize("kind", ["micro", "wide"])
def test_they_run(kind: str, request: pytest.FixtureRequest) -> None:
    runner = load_runner(request.getfixturevalue(kind), threads=1)
    try:
        assert np.isfinite(runner.feed(range(200))).all()
    finally:
        runner.close()


def test_the_tokenizer(micro: Path) -> None:
    with open_model(micro) as file:
        text = file.metadata["text"]
        assert file.tokenizer is not None
        words = Tokenizer(
            file.tokenizer, bos_id=text["bos_id"], add_bos=text["add_bos"], eos_ids=text["eos_ids"]
        )
    ids = words.split_control("".join(SPECIALS))
    assert ids == list(range(256, 256 + len(SPECIALS)))
    assert text["add_bos"] is False
    assert words.eos_ids == {ids[SPECIALS.index("<|role_end|>")], ids[SPECIALS.index("<|endoftext|>")]}
    assert words.encode_text("I'LL 12 北") == list("I'LL 12 北".encode())
    assert words.decode(ids) == "<tool_call></tool_call><think></think>"  # what a client may see


def test_a_vocabulary_too_small_for_its_tokens(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs 265 tokens, the model has 264"):
        make_tiny(tmp_path / "x.l3r", architecture="ling3", vocab=264)
    make_tiny(tmp_path / "x.l3r", architecture="ling3", vocab=265, layers=1)


def test_it_loads_for_chat(micro: Path) -> None:
    engine = load(micro, threads=1)
    assert engine.info["weights"] == "random"
    engine.close()


def count(specs: dict[str, TensorSpec], left_out: str) -> int:
    return sum(s.rows * s.cols for name, s in specs.items() if left_out not in name)


def test_the_full_size_is_that_of_the_published_model() -> None:
    arch: Any = ARCHITECTURES["ling3"]
    found = hyper("ling3", full=True, changes={})
    specs = arch.tensors(arch.spec_from(found))
    assert count(specs, ".k_b_proj_t.") == 7_893_392_800
    cut = hyper("ling3", full=True, changes={"layers": 8})
    spec = arch.spec_from(cut)
    assert [i for i in range(spec.layers) if spec.is_mla(i)] == [3, 7]
    assert spec.width == 1536


def test_other_architectures_have_no_full_size(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="llama has no full size"):
        make_tiny(tmp_path / "x.l3r", full=True)


def test_yarn_stretches_the_window_it_is_given() -> None:
    found = hyper("ling3", full=False, changes={"context": 8192, "yarn_factor": 2.0})
    assert (found["yarn_context"], found["yarn_factor"]) == (4096, 2.0)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.l3r"
    args = ["--out", str(out), "--architecture", "ling3", "--layers", "5", "--quant", "w4a8", "--q-rank", "0"]
    assert main(args) == 0
    assert str(out.stat().st_size) in capsys.readouterr().out
    with open_model(out) as file:
        assert (file.metadata["hyper"]["layers"], file.metadata["hyper"]["q_rank"]) == (5, 0)
        assert file.metadata["hyper"]["experts"] == 16
    assert main(["--out", str(out), "--quant", "w4a8"]) == UsageError.exit_code
    assert main(["--out", str(out), "--architecture", "ling3", "--experts", "15"]) == ModelFileError.exit_code
    assert "expert_groups" in capsys.readouterr().err


def test_flags_are_those_of_the_architecture(root: Path) -> None:
    command = [sys.executable, "-m", "tools.make_tiny", "--out", "x.l3r", "--experts", "4"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "--experts" in done.stderr
