# SPDX-License-Identifier: Apache-2.0
"""Ling-3.0 in GGUF files (bailingmoe3): the same tensors as from the official layout, and what is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from tokenizers.pre_tokenizers import ByteLevel

from cecilia.engine.load import load_runner
from cecilia.errors import ModelFileError
from cecilia.formats.l3r import open_model
from tests.arch.test_ling3 import CONFIG, IDS, random_weights
from tests.tools.test_convert_ling3 import checkpoint, formats, values
from tests.tools.tiny_gguf import add_key
from tools.bench.export_gguf import export_gguf
from tools.convert.pipeline import Options, convert
from tools.make_tiny import make_tiny

A = "bailingmoe3."
HEADS, RANK, NOPE, ROPE, V = 4, 32, 16, 16, 32
Tensors = dict[str, np.ndarray]


def keys() -> dict[str, Any]:
    """The keys of a file of CONFIG's model, as a public converter writes them."""
    return {
        A + "block_count": 4,
        A + "context_length": 512,
        A + "embedding_length": 64,
        A + "feed_forward_length": 96,
        A + "vocab_size": 320,
        A + "attention.head_count": HEADS,
        A + "attention.head_count_kv": [0, 0, 0, 1],
        A + "attention.layer_norm_rms_epsilon": 1e-6,
        A + "attention.key_length": RANK + ROPE,
        A + "attention.value_length": V,
        A + "attention.key_length_mla": NOPE + ROPE,
        A + "attention.value_length_mla": V,
        A + "attention.q_lora_rank": 32,
        A + "attention.kv_lora_rank": RANK,
        A + "rope.freq_base": 6_000_000.0,
        A + "rope.dimension_count": ROPE,
        A + "ssm.conv_kernel": 4,
        A + "kda.head_dim": 16,
        A + "kda.safe_gate": True,
        A + "kda.gate_lower_bound": -5.0,
        A + "expert_count": 16,
        A + "expert_used_count": 4,
        A + "expert_group_count": 4,
        A + "expert_group_used_count": 2,
        A + "expert_gating_func": 2,
        A + "expert_weights_scale": 2.5,
        A + "expert_weights_norm": True,
        A + "expert_feed_forward_length": 32,
        A + "expert_shared_feed_forward_length": 64,
        A + "expert_shared_count": 1,
        A + "leading_dense_block_count": 1,
    }


def tensors(weights: Tensors) -> Tensors:
    """The official layout's tensors as a public converter names and shapes them, shapes outermost first."""
    found = {
        "token_embd.weight": weights["model.word_embeddings.weight"],
        "output_norm.weight": weights["model.norm.weight"],
        "output.weight": weights["lm_head.weight"],
    }
    for i in range(4):
        w = {name.split(".", 3)[-1]: value for name, value in weights.items() if f".layers.{i}." in name}
        layer = {
            "attn_norm.weight": w["input_layernorm.weight"],
            "ffn_norm.weight": w["post_attention_layernorm.weight"],
        }
        layer |= _mla(w) if i == 3 else _kda(w)
        if i == 0:
            layer |= {f"ffn_{part}.weight": w[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down")}
        else:
            layer["ffn_gate_inp.weight"] = w["mlp.gate.weight"]
            layer["exp_probs_b.bias"] = w["mlp.gate.expert_bias"]
            for part in ("gate", "up", "down"):
                stack = [w[f"mlp.experts.{e}.{part}_proj.weight"] for e in range(16)]
                layer[f"ffn_{part}_exps.weight"] = np.stack(stack)
                layer[f"ffn_{part}_shexp.weight"] = w[f"mlp.shared_experts.{part}_proj.weight"]
        found |= {f"blk.{i}.{name}": value for name, value in layer.items()}
    return found


def _kda(w: Tensors) -> Tensors:
    found = {f"attn_{n}.weight": w[f"attention.{n}_proj.weight"] for n in "qkv"}
    found |= {f"ssm_conv1d_{n}.weight": w[f"attention.{n}_conv1d.weight"] for n in "qkv"}  # [P, 1, 4]
    return found | {
        "ssm_f_a.weight": w["attention.f_proj.weight"],
        "ssm_g_a.weight": w["attention.g_proj.weight"],
        "ssm_beta.weight": w["attention.b_proj.weight"],
        "ssm_a": np.exp(w["attention.A_log"].astype(np.float64)).astype(np.float32)[:, None],
        "ssm_dt.bias": w["attention.dt_bias"],
        "ssm_norm.weight": w["attention.o_norm.weight"],
        "attn_output.weight": w["attention.o_proj.weight"],
    }


def _mla(w: Tensors) -> Tensors:
    both = w["attention.kv_b_proj.weight"].reshape(HEADS, NOPE + V, RANK)
    return {
        "attn_q_a.weight": w["attention.q_a_proj.weight"],
        "attn_q_a_norm.weight": w["attention.q_a_layernorm.weight"],
        "attn_q_b.weight": w["attention.q_b_proj.weight"],
        "attn_kv_a_mqa.weight": w["attention.kv_a_proj_with_mqa.weight"],
        "attn_kv_a_norm.weight": w["attention.kv_a_layernorm.weight"],
        "attn_k_b.weight": np.ascontiguousarray(both[:, :NOPE].transpose(0, 2, 1)),
        "attn_v_b.weight": np.ascontiguousarray(both[:, NOPE:]),
        "attn_gate.weight": w["attention.g_proj.weight"],
        "attn_output.weight": w["attention.dense.weight"],
    }


def write(
    path: Path,
    change: Mapping[str, Any] | None = None,
    edit: Callable[[Tensors], None] = lambda _: None,
    kinds: Mapping[str, Kind] | None = None,
    tokenizer: bool = False,
) -> Path:
    """A GGUF file of CONFIG's random model; a key changed to None is left out; `kinds` by tensor name."""
    made = tensors(random_weights(CONFIG))
    edit(made)
    writer = gguf.GGUFWriter(path, "bailingmoe3")
    for key, value in (keys() | dict(change or {})).items():
        add_key(writer, key, value)
    if tokenizer:
        _vocabulary(writer)
    for name, value in made.items():
        kind = (kinds or {}).get(name, Kind.F32)
        writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _vocabulary(writer: gguf.GGUFWriter) -> None:
    """320 tokens: bytes, and the specials of the published tokenizer."""
    tokens = sorted(ByteLevel.alphabet())
    tokens += ["<|startoftext|>", "<|endoftext|>", "<|role_end|>", tokens[0] + tokens[1]]
    kinds = [1] * 256 + [3, 3, 3, 1] + [5] * 60
    tokens += [f"[PAD{i}]" for i in range(260, 320)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("bailingmoe2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    writer.add_eos_token_id(258)
    writer.add_chat_template("{{ messages[0].content }}")


def converted(source: Path, quant: str = "keep") -> Path:
    return convert(source, source.with_suffix(".l3r"), Options(quant, "none")).path


def assert_equal(found: Tensors, want: Tensors) -> None:
    assert found.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(found[name], want[name], err_msg=name)


@pytest.mark.parametrize("quant", ["keep", "f32", "bf16", "q8", "q4", "w8a8", "w4a8"])
def test_the_same_file_as_from_the_official_layout(tmp_path: Path, quant: str) -> None:
    theirs = converted(write(tmp_path / "x.gguf"), quant)
    ours = convert(checkpoint(tmp_path / "hf", {}), tmp_path / "hf.l3r", Options(quant, "none")).path
    with open_model(theirs) as first, open_model(ours) as second:
        assert first.metadata["hyper"] == second.metadata["hyper"]
    assert formats(theirs) == formats(ours)
    assert_equal(values(theirs), values(ours))


@pytest.mark.parametrize("quant", ["f32", "bf16"])
def test_a_round_trip_of_plain_numbers(tmp_path: Path, quant: str) -> None:
    model = make_tiny(tmp_path / "tiny.l3r", architecture="ling3", quant=quant)
    back = converted(export_gguf(model, tmp_path / "back.gguf"))
    with open_model(model) as first, open_model(back) as second:
        assert first.metadata["hyper"] == second.metadata["hyper"]
    found, want = values(back), values(model)
    # make_tiny's two key matrices are no transposes of each other; a GGUF file has the second one alone.
    for name in [name for name in want if name.endswith("k_b_proj.weight")]:
        turned = want.pop(name.replace("k_b_proj", "k_b_proj_t")).reshape(-1, *_head_shape(back))
        found.pop(name.replace("k_b_proj", "k_b_proj_t"))
        np.testing.assert_array_equal(
            found.pop(name), turned.transpose(0, 2, 1).reshape(want.pop(name).shape)
        )
    assert_equal(found, want)


def _head_shape(path: Path) -> tuple[int, int]:
    with open_model(path) as file:
        return file.metadata["hyper"]["kv_rank"], file.metadata["hyper"]["nope_dim"]


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.BF16])
def test_quantised_tensors_keep_their_values(tmp_path: Path, kind: Kind) -> None:
    """The key matrix is [32, 16] a head: no whole block of 32 fits in it, so it is given to 32 columns."""
    names = [name for name, value in tensors(random_weights(CONFIG)).items() if value.ndim > 1]
    exempt = ("ssm_a", "conv1d", "ssm_beta", "attn_gate.weight", "ffn_gate_inp", "attn_k_b")
    kinds = {name: kind for name in names if not any(part in name for part in exempt)}
    found = values(converted(write(tmp_path / "x.gguf", kinds=kinds)))
    for theirs, ours in (
        ("blk.2.ffn_down_exps.weight", "model.layers.2.mlp.experts.7.down_proj.weight"),
        ("blk.3.attn_v_b.weight", "model.layers.3.attention.v_b_proj.weight"),
        ("output.weight", "lm_head.weight"),
    ):
        value = tensors(random_weights(CONFIG))[theirs]
        want = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
        want = want[7] if "exps" in theirs else want.reshape(found[ours].shape)
        np.testing.assert_array_equal(found[ours], want)


def test_a_quantised_key_matrix_is_turned_by_its_values(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "tiny.l3r", architecture="ling3", quant="q4_32", nope_dim=32, kv_rank=64)
    back = converted(export_gguf(model, tmp_path / "back.gguf"))
    name = next(name for name in formats(back) if name.endswith("k_b_proj.weight"))
    turned = name.replace("k_b_proj", "k_b_proj_t")
    assert (formats(back)[turned], formats(back)[name]) == ("q4_32", "q8_32")
    found, want = values(back), values(model)
    np.testing.assert_array_equal(found[turned], want[turned])
    exact = want[turned].reshape(-1, 64, 32).transpose(0, 2, 1).reshape(found[name].shape)
    # Eight bits to a block: half a step of its largest value, and the rounding of its f16 scale.
    step = np.abs(exact.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
    assert (np.abs(found[name] - exact).reshape(-1, 32) <= step * (0.5 + 127 * 2**-11)).all()


def test_logits_are_those_of_the_official_layout(tmp_path: Path) -> None:
    paths = [
        converted(write(tmp_path / "x.gguf")),
        convert(checkpoint(tmp_path / "hf", {}), tmp_path / "hf.l3r", Options(tokenizer="none")).path,
    ]
    found = []
    for path in paths:
        runner = load_runner(path, profile="f32", threads=1)
        found.append(runner.evaluate(IDS[:40]))
        runner.close()
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("change", "hyper"),
    [
        ({A + "kda.safe_gate": None}, {}),
        ({A + "attention.value_length": RANK, A + "attention.key_length": None}, {}),
        ({A + "swiglu_clamp_exp": [0.0] * 4}, {}),
        (
            {
                A + "nextn_predict_layers": 1,
                A + "block_count": 5,
                A + "attention.head_count_kv": [0, 0, 0, 1, 1],
            },
            {},
        ),
        (
            {
                A + "rope.scaling.type": "yarn",
                A + "rope.scaling.factor": 2.0,
                A + "rope.scaling.original_context_length": 256,
            },
            {"yarn_factor": 2.0, "yarn_context": 256},
        ),
    ],
)
def test_what_may_be_said_in_other_words(
    tmp_path: Path, change: dict[str, Any], hyper: dict[str, Any]
) -> None:
    with open_model(converted(write(tmp_path / "x.gguf"))) as plain:
        want = plain.metadata["hyper"] | hyper
    with open_model(converted(write(tmp_path / "y.gguf", change))) as file:
        assert file.metadata["hyper"] == want


def test_heads_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    change = {
        A + "nextn_predict_layers": 1,
        A + "block_count": 5,
        A + "attention.head_count_kv": [0, 0, 0, 1, 1],
    }
    path = write(
        tmp_path / "x.gguf", change, put("blk.4.nextn.eh_proj.weight", np.zeros((64, 128), np.float32))
    )
    report = convert(path, tmp_path / "x.l3r", Options(tokenizer="none"))
    assert report.notes == ["1 tensors that predict further tokens (MTP) are left out"]


@pytest.mark.parametrize(
    ("change", "code", "fact"),
    [
        ({A + "a_new_key": 1}, "unsupported_model", "bailingmoe3.a_new_key"),
        ({A + "rope.dimension_sections": [8, 8]}, "unsupported_model", "rope.dimension_sections"),
        ({A + "kda.safe_gate": False}, "unsupported_model", "kda.safe_gate is False"),
        ({A + "kda.gate_lower_bound": 5.0}, "bad_hyper", "gate_lower_bound"),
        ({A + "swiglu_clamp_exp": [0.0, 0.0, 7.0, 0.0]}, "unsupported_model", "swiglu_clamp_exp"),
        ({A + "swiglu_clamp_shexp": [7.0]}, "unsupported_model", "swiglu_clamp_shexp"),
        ({A + "expert_gating_func": 1}, "unsupported_model", "expert_gating_func is 1"),
        ({A + "expert_gating_func": None}, "unsupported_model", "expert_gating_func is None"),
        ({A + "expert_weights_norm": False}, "unsupported_model", "expert_weights_norm is False"),
        ({A + "expert_shared_count": 2}, "unsupported_model", "expert_shared_count is 2"),
        ({A + "ssm.conv_kernel": 3}, "unsupported_model", "ssm.conv_kernel is 3"),
        ({A + "rope.scaling.type": "linear"}, "unsupported_model", "RoPE scaling 'linear'"),
        ({A + "rope.scaling.factor": 2.0}, "unsupported_model", "rope.scaling.factor without"),
        ({A + "attention.key_length": 40}, "unsupported_model", "key_length is 40; expected 48"),
        ({A + "attention.value_length": 40}, "unsupported_model", "value_length is 40"),
        ({A + "attention.key_length_mla": 16}, "unsupported_model", "key_length_mla is 16"),
        ({A + "attention.head_count_kv": [0, 1, 1, 1]}, "unsupported_model", "order of layers"),
        ({A + "attention.head_count_kv": [0, 0, 0, 0]}, "unsupported_model", "order of layers"),
        ({A + "attention.head_count_kv": [0, 0, 1]}, "invalid_metadata", "3 entries for 4 layers"),
        ({A + "attention.head_count_kv": 1}, "invalid_metadata", "list of int"),
        ({A + "nextn_predict_layers": 4}, "invalid_metadata", "0 layers"),
        ({A + "attention.kv_lora_rank": None}, "invalid_metadata", "kv_lora_rank"),
        ({A + "vocab_size": 319}, "wrong_shape", "vocab_size is 319"),
        (
            {A + "block_count": 3, A + "attention.head_count_kv": [0, 0, 1]},
            "unsupported_model",
            r"blk\.2\.attn_k\.weight.*too many",
        ),
    ],
)
def test_what_is_outside_the_envelope(tmp_path: Path, change: dict[str, Any], code: str, fact: str) -> None:
    with pytest.raises(ModelFileError, match=fact) as caught:
        converted(write(tmp_path / "x.gguf", change))
    assert caught.value.code == code
    assert not (tmp_path / "x.l3r").exists()


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda made: made.__delitem__(name)


def put(name: str, value: np.ndarray) -> Callable[[Tensors], None]:
    return lambda made: made.__setitem__(name, value)


@pytest.mark.parametrize(
    ("edit", "code", "fact"),
    [
        (drop("output.weight"), "unsupported_model", "tied embeddings"),
        (drop("blk.3.attn_k_b.weight"), "missing_tensor", "blk.3.attn_k_b.weight"),
        (drop("blk.1.exp_probs_b.bias"), "missing_tensor", "exp_probs_b"),
        (put("blk.0.attn_q.bias", np.zeros(4, np.float32)), "unsupported_model", "attn_q.bias"),
        (put("blk.3.attn_k_b.weight", np.zeros((4, 16, 32), np.float32)), "wrong_shape", "attn_k_b"),
        (put("blk.3.attn_v_b.weight", np.zeros((4, 16, 32), np.float32)), "wrong_shape", "attn_v_b"),
        (put("blk.1.ffn_up_exps.weight", np.zeros((8, 32, 64), np.float32)), "wrong_shape", "ffn_up_exps"),
        (put("blk.0.ssm_a", np.zeros((3, 1), np.float32)), "wrong_shape", "ssm_a"),
        (put("blk.0.ssm_conv1d_q.weight", np.zeros((64, 1, 3), np.float32)), "wrong_shape", "conv1d"),
        (put("output_norm.weight", np.full(64, np.nan, np.float32)), "bad_weights", "output_norm"),
    ],
)
def test_damaged_weights(tmp_path: Path, edit: Callable[[Tensors], None], code: str, fact: str) -> None:
    with pytest.raises(ModelFileError, match=fact) as caught:
        converted(write(tmp_path / "x.gguf", edit=edit))
    assert caught.value.code == code
    assert not (tmp_path / "x.l3r").exists()


def test_a_quantised_vector_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="output_norm") as caught:
        converted(write(tmp_path / "x.gguf", kinds={"output_norm.weight": Kind.Q8_0}))
    assert caught.value.code == "unsupported_tensor_type"


def test_a_truncated_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelFileError) as caught:
        converted(path)
    assert caught.value.code == "truncated_model"


def test_both_ends_of_a_turn_stop_and_the_template_stays(tmp_path: Path) -> None:
    report = convert(write(tmp_path / "x.gguf", tokenizer=True), tmp_path / "x.l3r", Options())
    with open_model(report.path) as file:
        assert sorted(file.metadata["text"]["eos_ids"]) == [257, 258]
        assert file.chat_template == "{{ messages[0].content }}"
        assert file.metadata["text"]["add_bos"] is False


def test_experts_of_a_role_in_two_formats_are_refused(tmp_path: Path) -> None:
    """Only the official layout can have them: GGUF stacks the experts of a role."""
    folder = checkpoint(tmp_path / "hf", {})
    _retype(folder / "model.safetensors", "model.layers.2.mlp.experts.5.up_proj.weight")
    with pytest.raises(ModelFileError, match=r"layers\.2\.mlp\.experts.*up_proj") as caught:
        convert(folder, tmp_path / "x.l3r", Options(tokenizer="none"))
    assert caught.value.code == "unsupported_model"
    convert(folder, tmp_path / "x.l3r", Options("q8", "none"))


def _retype(path: Path, name: str) -> None:
    """Store one tensor as BF16 beside the F32 ones."""
    data = path.read_bytes()
    size = struct.unpack_from("<Q", data)[0]
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    parts, at = [], 0
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        part = body[slice(*entry["data_offsets"])]
        if key == name:
            part = (np.frombuffer(part, "<u4") >> 16).astype("<u2").tobytes()
            entry["dtype"] = "BF16"
        entry["data_offsets"] = [at, at + len(part)]
        parts.append(part)
        at += len(part)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
