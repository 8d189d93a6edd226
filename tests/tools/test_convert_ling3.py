# SPDX-License-Identifier: Apache-2.0
"""Ling-3.0 checkpoints of the official layout: their tensors as written down by hand, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cecilia.errors import ModelFileError, UsageError
from cecilia.formats.l3r import open_model
from cecilia.formats.quant import dequantise, unpack
from tests.arch import ling3_file
from tests.arch.test_ling3 import CONFIG, random_weights
from tests.reference.test_reference_ling3 import FIXTURES, RANDOM, read
from tests.tools import tiny_hf
from tools.convert.byte_vocabulary import LING3_TEMPLATE, byte_vocabulary
from tools.convert.pipeline import Options, convert

OFFICIAL = CONFIG | {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "gated_attention_proj_granularity_type": "head_wise",
    "expert_swiglu_limit_list": None,
    "share_expert_swiglu_limit_list": None,
    "hidden_act": "silu",
    "kda_safe_gate": True,
    "moe_router_enable_expert_bias": True,
    "no_kda_lora": True,
    "norm_topk_prob": True,
    "num_shared_experts": 1,
    "rope_interleave": True,
    "score_function": "sigmoid",
    "short_conv_kernel_size": 4,
    "num_nextn_predict_layers": 0,
}


def checkpoint(
    folder: Path, change: Mapping[str, Any], edit: Callable[[dict[str, np.ndarray]], None] = lambda _: None
) -> Path:
    """A micro checkpoint; a key changed to ... is left out."""
    folder.mkdir(exist_ok=True)
    config = {key: value for key, value in (OFFICIAL | change).items() if value is not ...}
    weights = random_weights(CONFIG)
    edit(weights)
    (folder / "config.json").write_text(json.dumps(config))
    tiny_hf.save(folder / "model.safetensors", weights, "F32")
    return folder


def values(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a model file, f32."""
    found = {}
    with open_model(path) as file:
        for entry in file.tensors.values():
            raw = np.array(file.data(entry.name))
            if entry.rank == 1:
                found[entry.name] = raw.view(np.float32)
            else:
                found[entry.name] = dequantise(unpack(raw, entry.format, entry.rows, entry.cols))
    return found


def formats(path: Path) -> dict[str, str]:
    with open_model(path) as file:
        return {entry.name: entry.format for entry in file.tensors.values()}


@pytest.mark.parametrize("name", [*RANDOM, "trained"])
def test_the_fixtures(tmp_path: Path, name: str) -> None:
    folder = FIXTURES / name
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    config = json.loads((folder / "config.json").read_text())
    by_hand = ling3_file.write(tmp_path / "hand.l3r", config, read(folder / "model.safetensors"))
    converted = convert(folder, tmp_path / "x.l3r", Options(tokenizer="none")).path
    with open_model(by_hand) as first, open_model(converted) as second:
        assert first.metadata["hyper"] == second.metadata["hyper"]
    want, found = values(by_hand), values(converted)
    assert want.keys() == found.keys()
    for tensor in want:
        np.testing.assert_array_equal(found[tensor], want[tensor], err_msg=tensor)


@pytest.mark.parametrize(
    ("quant", "routed", "others"),
    [("q8", "q8_32", "q8_32"), ("w8a8", "q8_32", "q8_32"), ("w4a8", "q4_32", "q8_32")],
)
def test_formats_of_a_quantised_model(tmp_path: Path, quant: str, routed: str, others: str) -> None:
    path = convert(checkpoint(tmp_path / "x", {}), tmp_path / "x.l3r", Options(quant, "none")).path
    found = formats(path)
    assert found["model.layers.1.mlp.experts.3.down_proj.weight"] == routed
    assert found["model.layers.1.mlp.shared_experts.down_proj.weight"] == others
    assert found["model.layers.0.attention.f_proj.weight"] == others
    for exact in ("0.attention.b_proj", "3.attention.g_proj", "1.mlp.gate"):  # too decisive to be quantised
        assert found[f"model.layers.{exact}.weight"] == "f32"


def test_experts_of_four_bits_need_experts(tmp_path: Path) -> None:
    tiny_hf.write(tmp_path / "x")
    with pytest.raises(UsageError, match="llama has none; take q4 or w8a8"):
        convert(tmp_path / "x", tmp_path / "x.l3r", Options("w4a8", "none"))


@pytest.mark.parametrize(
    ("change", "code", "fact"),
    [
        ({"architectures": ["BailingMoeV2_5ForCausalLM"]}, "unsupported_architecture", "Ling-2.6"),
        ({"quantization_config": {"quant_method": "fp8"}}, "unsupported_quantisation", "an FP8 release"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors"}},
            "unsupported_quantisation",
            "such as INT4",
        ),
        ({"expert_swiglu_limit_list": [7.0]}, "unsupported_model", "expert_swiglu_limit_list"),
        ({"share_expert_swiglu_limit_list": [7.0]}, "unsupported_model", "share_expert_swiglu_limit_list"),
        ({"kda_safe_gate": False}, "unsupported_model", "kda_safe_gate"),
        ({"rope_interleave": False}, "unsupported_model", "rope_interleave"),
        ({"no_kda_lora": False}, "unsupported_model", "no_kda_lora"),
        ({"use_bias": True}, "unsupported_model", "use_bias"),
        ({"tie_word_embeddings": True}, "unsupported_model", "tie_word_embeddings"),
        ({"gated_attention_proj_granularity_type": "element_wise"}, "unsupported_model", "granularity"),
        ({"score_function": "softmax"}, "unsupported_model", "score_function"),
        ({"short_conv_kernel_size": 3}, "unsupported_model", "short_conv_kernel_size"),
        ({"kda_lower_bound": 5}, "invalid_metadata", "kda_lower_bound"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "unsupported_model", "RoPE scaling"),
        ({"num_key_value_heads": 2}, "unsupported_model", "num_key_value_heads"),
        ({"a_new_key": 1}, "unsupported_model", "a_new_key"),
        ({"kv_lora_rank": ...}, "invalid_metadata", "kv_lora_rank"),
    ],
)
def test_what_is_outside_the_envelope(tmp_path: Path, change: dict[str, Any], code: str, fact: str) -> None:
    with pytest.raises(ModelFileError, match=fact) as caught:
        convert(checkpoint(tmp_path / "x", change), tmp_path / "x.l3r", Options(tokenizer="none"))
    assert caught.value.code == code
    assert not (tmp_path / "x.l3r").exists()


def drop(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda weights: weights.__delitem__(name)


def put(name: str, value: np.ndarray) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda weights: weights.__setitem__(name, value)


LAST = "model.layers.3.attention.kv_b_proj.weight"


@pytest.mark.parametrize(
    ("edit", "code", "fact"),
    [
        (drop(LAST), "missing_tensor", LAST),
        (put(LAST, np.zeros((4, 4), np.float32)), "wrong_shape", LAST),
        (put("model.norm.weight", np.full(64, np.nan, np.float32)), "bad_weights", "model.norm.weight"),
        (put("model.layers.0.attention.A_log", np.full(4, 200, np.float32)), "bad_weights", "A_log"),
        (put("model.extra.weight", np.zeros(4, np.float32)), "unsupported_model", "model.extra.weight"),
        (
            put("model.layers.1.mlp.experts.0.up_proj.weight_packed", np.zeros(4, np.float32)),
            "unsupported_quantisation",
            "weight_packed",
        ),
    ],
)
def test_damaged_weights(
    tmp_path: Path, edit: Callable[[dict[str, np.ndarray]], None], code: str, fact: str
) -> None:
    with pytest.raises(ModelFileError, match=fact) as caught:
        convert(checkpoint(tmp_path / "x", {}, edit), tmp_path / "x.l3r", Options(tokenizer="none"))
    assert caught.value.code == code
    assert not (tmp_path / "x.l3r").exists()


def test_a_truncated_file(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "x", {})
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        convert(folder, tmp_path / "x.l3r", Options(tokenizer="none"))
    assert not (tmp_path / "x.l3r").exists()


def test_heads_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    edit = put("model.layers.4.eh_proj.weight", np.zeros((64, 128), np.float32))
    report = convert(checkpoint(tmp_path / "x", {}, edit), tmp_path / "x.l3r", Options(tokenizer="none"))
    assert report.notes == ["1 tensors that predict further tokens (MTP) are left out"]


@pytest.mark.parametrize("published", ["{{ messages[0].content }}", None])
def test_the_template_is_the_source_s_or_ours(tmp_path: Path, published: str | None) -> None:
    folder = checkpoint(tmp_path / "x", {"eos_token_id": 258})
    (folder / "tokenizer.json").write_bytes(byte_vocabulary(320, "ling3").tokenizer or b"")
    if published is not None:
        (folder / "chat_template.jinja").write_text(published)
    report = convert(folder, tmp_path / "x.l3r", Options())
    with open_model(report.path) as file:
        assert file.chat_template == (published or LING3_TEMPLATE)
        assert sorted(file.metadata["text"]["eos_ids"]) == [257, 258]  # <|endoftext|> and <|role_end|>
    assert any("no chat template" in note for note in report.notes) == (published is None)


def test_a_byte_tokenizer_speaks_the_architecture_s_chat(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "x", {})
    with open_model(convert(folder, tmp_path / "x.l3r", Options(tokenizer="byte")).path) as file:
        assert file.chat_template == LING3_TEMPLATE
        assert b"<|role_end|>" in (file.tokenizer or b"")
