# SPDX-License-Identifier: Apache-2.0
"""Exported weights, read back by the public reader and dequantised by it, are the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from cecilia.errors import UsageError
from cecilia.formats.l3r import open_model
from cecilia.formats.quant import dequantise, unpack
from tests.tools.test_convert_ling3 import values
from tools.bench.export_gguf import export_gguf
from tools.convert.gguf_dense import gguf_name
from tools.convert.pipeline import convert
from tools.make_tiny import make_tiny


@pytest.mark.parametrize("quant", ["f32", "bf16", "q8_32", "q4_32", "q4a_32"])
def test_values_are_the_same(tmp_path: Path, quant: str) -> None:
    model = make_tiny(tmp_path / "tiny.l3r", architecture="qwen3", quant=quant)
    out = export_gguf(model, tmp_path / "tiny.gguf")
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
    with open_model(model) as file:
        assert len(read) == len(file.tensors)
        for entry in file.tensors.values():
            theirs = read[gguf_name(entry.name)]
            raw = np.asarray(file.data(entry.name))
            ours = raw.view(np.float32)
            if entry.rank == 2:
                ours = dequantise(unpack(raw, entry.format, entry.rows, entry.cols))
            found = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
            np.testing.assert_array_equal(found.reshape(ours.shape), ours)


def test_a_round_trip_through_the_converter(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "tiny.l3r", architecture="qwen3", quant="q4_32")
    back = convert(export_gguf(model, tmp_path / "tiny.gguf"), tmp_path / "back.l3r").path
    with open_model(model) as first, open_model(back) as second:
        assert first.metadata["hyper"] == second.metadata["hyper"]
        assert all(first.data(name) == second.data(name) for name in first.tensors)


# Name in GGUF, shape outermost first, name of ours. Layer 0: delta attention, dense; 1: experts; 3: latent.
LING3 = [
    ("token_embd", (320, 64), "model.word_embeddings.weight"),
    ("output_norm", (64,), "model.norm.weight"),
    ("output", (320, 64), "lm_head.weight"),
    ("blk.0.attn_norm", (64,), "model.layers.0.input_layernorm.weight"),
    ("blk.0.attn_v", (64, 64), "model.layers.0.attention.v_proj.weight"),
    ("blk.0.ssm_conv1d_k", (1, 64, 1, 4), "model.layers.0.attention.k_conv1d.weight"),
    ("blk.0.ssm_f_a", (64, 64), "model.layers.0.attention.f_proj.weight"),
    ("blk.0.ssm_g_a", (64, 64), "model.layers.0.attention.g_proj.weight"),
    ("blk.0.ssm_beta", (4, 64), "model.layers.0.attention.b_proj.weight"),
    ("blk.0.ssm_norm", (16,), "model.layers.0.attention.o_norm.weight"),
    ("blk.0.attn_output", (64, 64), "model.layers.0.attention.o_proj.weight"),
    ("blk.0.ffn_norm", (64,), "model.layers.0.post_attention_layernorm.weight"),
    ("blk.0.ffn_down", (64, 96), "model.layers.0.mlp.down_proj.weight"),
    ("blk.1.ffn_gate_inp", (16, 64), "model.layers.1.mlp.gate.weight"),
    ("blk.1.ffn_up_shexp", (32, 64), "model.layers.1.mlp.shared_experts.up_proj.weight"),
    ("blk.3.attn_q_a", (32, 64), "model.layers.3.attention.q_a_proj.weight"),
    ("blk.3.attn_q_a_norm", (32,), "model.layers.3.attention.q_a_layernorm.weight"),
    ("blk.3.attn_q_b", (192, 32), "model.layers.3.attention.q_b_proj.weight"),
    ("blk.3.attn_kv_a_mqa", (48, 64), "model.layers.3.attention.kv_a_proj_with_mqa.weight"),
    ("blk.3.attn_kv_a_norm", (32,), "model.layers.3.attention.kv_a_layernorm.weight"),
    ("blk.3.attn_k_b", (4, 32, 32), "model.layers.3.attention.k_b_proj_t.weight"),
    ("blk.3.attn_v_b", (4, 16, 32), "model.layers.3.attention.v_b_proj.weight"),
    ("blk.3.attn_gate", (4, 64), "model.layers.3.attention.g_proj.weight"),
    ("blk.3.attn_output", (64, 64), "model.layers.3.attention.dense.weight"),
]
BARE = [
    ("blk.0.ssm_a", (4, 1), "model.layers.0.attention.A"),
    ("blk.0.ssm_dt.bias", (64,), "model.layers.0.attention.dt_bias"),
    ("blk.1.exp_probs_b.bias", (16,), "model.layers.1.mlp.gate.expert_bias"),
]


def ling3(folder: Path, quant: str, **changes: Any) -> tuple[Path, Path]:
    model = make_tiny(
        folder / "tiny.l3r", architecture="ling3", quant=quant, **{"q_rank": 32, "nope_dim": 32} | changes
    )
    return model, export_gguf(model, folder / "tiny.gguf")


def read(path: Path) -> dict[str, np.ndarray]:
    """Values by name, as the public reader has them, in the shapes of the file, outermost first."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found[tensor.name] = data.reshape([int(n) for n in reversed(tensor.shape)])
    return found


@pytest.mark.parametrize("quant", ["f32", "q4_32", "w4a8"])
def test_ling3_has_the_names_shapes_and_values_of_its_runtime(tmp_path: Path, quant: str) -> None:
    model, out = ling3(tmp_path, quant)
    ours, theirs = values(model), read(out)
    for name, shape, own in [*((f"{n}.weight", s, o) for n, s, o in LING3), *BARE]:
        assert theirs[name].shape == shape, name
        np.testing.assert_array_equal(theirs[name].reshape(-1), ours[own].reshape(-1), err_msg=name)
    for part in ("gate", "up", "down"):
        stacked = theirs[f"blk.2.ffn_{part}_exps.weight"]
        assert len(stacked) == 16
        for e in range(16):
            np.testing.assert_array_equal(
                stacked[e], ours[f"model.layers.2.mlp.experts.{e}.{part}_proj.weight"]
            )
    everything = sum(value.size for name, value in ours.items() if ".k_b_proj." not in name)
    assert sum(value.size for value in theirs.values()) == everything


def test_ling3_s_keys(tmp_path: Path) -> None:
    _, out = ling3(tmp_path, "f32", context=8192, yarn_factor=2.0, layers=6)
    fields = gguf.GGUFReader(out).fields
    said = {name.removeprefix("bailingmoe3."): field.contents() for name, field in fields.items()}
    assert said["general.architecture"] == "bailingmoe3"
    for name, value in {
        "block_count": 6,
        "context_length": 8192,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": [0, 0, 0, 1, 1, 1],  # what is behind the last whole group is latent
        "attention.q_lora_rank": 32,
        "attention.kv_lora_rank": 32,
        "attention.key_length_mla": 48,
        "attention.value_length_mla": 16,
        "rope.dimension_count": 16,
        "rope.freq_base": 6e6,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 2.0,
        "rope.scaling.original_context_length": 4096,
        "ssm.conv_kernel": 4,
        "kda.head_dim": 16,
        "kda.safe_gate": True,
        "kda.gate_lower_bound": -5.0,
        "leading_dense_block_count": 1,
        "expert_count": 16,
        "expert_used_count": 4,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "expert_gating_func": 2,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "expert_feed_forward_length": 32,
        "expert_shared_feed_forward_length": 32,
    }.items():
        assert said[name] == value, name


def test_queries_without_a_rank(tmp_path: Path) -> None:
    model, out = ling3(tmp_path, "f32", q_rank=0)
    np.testing.assert_array_equal(
        read(out)["blk.3.attn_q.weight"], values(model)["model.layers.3.attention.q_proj.weight"]
    )
    assert "bailingmoe3.attention.q_lora_rank" not in gguf.GGUFReader(out).fields


def test_an_architecture_with_another_row_order_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="llama, not one of: ling3 qwen2 qwen3"):
        export_gguf(make_tiny(tmp_path / "tiny.l3r"), tmp_path / "tiny.gguf")
