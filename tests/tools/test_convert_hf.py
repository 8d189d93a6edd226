# SPDX-License-Identifier: Apache-2.0
"""Hugging Face directories to .l3r: the values of the safetensors package, the settings of the JSON files."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cecilia.engine.load import load_runner
from cecilia.errors import CeciliaError, ModelFileError
from cecilia.formats.l3r import open_model
from cecilia.formats.quant import bf16_to_f32
from tests.tools import tiny_gguf, tiny_hf
from tests.tools.test_convert import values
from tools.compare import compare, read_golden
from tools.convert.pipeline import Options, convert

ARCHITECTURES = ("llama", "qwen2", "qwen3")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tiny-0.6B"


def as_stored(value: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "F16":
        return value.astype(np.float16).astype(np.float32)
    return bf16_to_f32((value.view(np.uint32) >> 16).astype(np.uint16)) if dtype == "BF16" else value


@pytest.mark.parametrize("shards", [0, 3])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_value_arrives(architecture: str, dtype: str, shards: int, folder: Path) -> None:
    tied = architecture != "qwen2"
    wanted = tiny_hf.write(folder, architecture, tied=tied, dtype=dtype, shards=shards)
    report = convert(folder, folder.parent / "tiny.l3r")
    assert report.errors == {}
    with open_model(folder.parent / "tiny.l3r", verify=True) as model:
        assert model.metadata["architecture"] == architecture
        assert model.tensors.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_array_equal(values(model, name), as_stored(value, dtype), err_msg=name)
            kept = "bf16" if dtype == "BF16" and value.ndim == 2 else "f32"
            assert model.tensors[name].format == kept


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_safetensors_and_gguf_of_one_checkpoint_are_equal(
    architecture: str, tied: bool, folder: Path, tmp_path: Path
) -> None:
    tiny_hf.write(folder, architecture, tied=tied)
    tiny_gguf.write(
        tmp_path / "x.gguf", tiny_gguf.GGMLQuantizationType.F32, architecture=architecture, tied=tied
    )
    convert(folder, tmp_path / "a.l3r")
    convert(tmp_path / "x.gguf", tmp_path / "b.l3r")
    with open_model(tmp_path / "a.l3r") as a, open_model(tmp_path / "b.l3r") as b:
        assert a.metadata["architecture"] == b.metadata["architecture"] == architecture
        assert a.metadata["hyper"] == b.metadata["hyper"]
        assert list(a.tensors) == list(b.tensors)
        for name in a.tensors:
            assert a.data(name) == b.data(name), name


def test_qwen3_gives_the_golden_logits_and_tokens(fixtures_dir: Path, tmp_path: Path) -> None:
    source = fixtures_dir / "qwen3" / "dense"
    convert(source, tmp_path / "x.l3r", Options(quant="f32", tokenizer="none", weights="random"))
    runner = load_runner(tmp_path / "x.l3r", profile="f32", threads=1)
    try:
        found = compare(runner, read_golden(source / "golden.npz"))
    finally:
        runner.close()
    assert found.max_error is not None
    assert found.max_error < 1e-3
    assert found.argmax_agreement == 1
    assert found.greedy == (10, 10)


def test_a_head_beside_a_tied_embedding_and_derived_buffers_are_left_out(folder: Path) -> None:
    extra = {
        "lm_head.weight": np.zeros((tiny_gguf.VOCAB, tiny_gguf.WIDTH), np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
    }
    wanted = tiny_hf.write(folder, extra=extra)
    convert(folder, folder.parent / "tiny.l3r")
    with open_model(folder.parent / "tiny.l3r") as model:
        assert model.tensors.keys() == wanted.keys()


def converted(folder: Path, **files: Any) -> tuple[dict[str, Any], str | None]:
    """Metadata and chat template after writing JSON files (by stem) into a tiny directory."""
    tiny_hf.write(folder)
    for name, value in files.items():
        tiny_hf.put(folder, f"{name}.json", value)
    convert(folder, folder.parent / "tiny.l3r")
    with open_model(folder.parent / "tiny.l3r") as model:
        return model.metadata, model.chat_template


def test_markers_come_from_the_generation_settings_first(folder: Path) -> None:
    found, template = converted(folder, generation_config={"eos_token_id": [7, 256], "pad_token_id": 9})
    assert found["text"] == {"bos_id": 256, "add_bos": False, "eos_ids": [7, 256, 258], "pad_id": 9}
    assert found["sampling"] == {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
    assert found["name"] == "tiny-0.6B"
    assert template is None


def test_the_tokenizer_settings_name_markers_and_a_template(folder: Path) -> None:
    settings = {
        "add_bos_token": True,
        "bos_token": {"content": "<|im_start|>"},
        "eos_token": "<|endoftext|>",
        "chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}],
    }
    found, template = converted(folder, tokenizer_config=settings)
    assert found["text"] == {"bos_id": 257, "add_bos": True, "eos_ids": [256, 258], "pad_id": None}
    assert template == "y"


def test_bos_is_added_where_the_tokenizer_itself_would(folder: Path) -> None:
    """Without a setting the post-processor decides, as it does in the tokenizers library."""
    tiny_hf.write(folder)
    document = json.loads((folder / "tokenizer.json").read_bytes())
    bos = {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}
    single = [
        {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    template = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [],
        "special_tokens": {bos["id"]: bos},
    }
    for processor in (template, {"type": "Sequence", "processors": [template]}):
        tiny_hf.put(folder, "tokenizer.json", {**document, "post_processor": processor})
        convert(folder, folder.parent / "tiny.l3r")
        with open_model(folder.parent / "tiny.l3r") as model:
            assert model.metadata["text"]["add_bos"] is True
            assert model.metadata["text"]["bos_id"] == 256


def test_a_template_file_wins(folder: Path) -> None:
    folder.mkdir()
    (folder / "chat_template.jinja").write_text(tiny_hf.TEMPLATE)
    _, template = converted(folder, tokenizer_config={"chat_template": "y"})
    assert template == tiny_hf.TEMPLATE


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}, (0.6, 0.95, 20)),
        ({"do_sample": True}, (1.0, 1.0, 0)),
        ({"temperature": 1.0, "top_p": 0.95, "top_k": 20}, (1.0, 0.95, 20)),  # a recommendation all the same
        ({"do_sample": False, "temperature": 0.6}, (0.0, 1.0, 0)),
        ({"temperature": None}, (0.0, 1.0, 0)),
    ],
)
def test_sampling_defaults_are_those_of_the_generation_settings(
    folder: Path, settings: dict[str, Any], expected: tuple[float, float, int]
) -> None:
    found, _ = converted(folder, generation_config=settings)
    assert found["sampling"] == dict(zip(("temperature", "top_p", "top_k"), expected, strict=True))


def test_both_spellings_of_the_rope_base_mean_the_same(folder: Path) -> None:
    for keys in (
        {"rope_theta": 5e5},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
    ):
        tiny_hf.write(folder, keys=keys)
        convert(folder, folder.parent / "tiny.l3r")
        with open_model(folder.parent / "tiny.l3r") as model:
            assert model.metadata["hyper"]["rope_base"] == 5e5


def test_the_digest_stands_for_every_file_read(folder: Path) -> None:
    """It is what `sha256sum FILES | sha256sum` prints, sorted by name."""
    found, _ = converted(folder, generation_config={})
    names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    assert found["provenance"]["source_sha256"] == hashlib.sha256("".join(lines).encode()).hexdigest()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "class": ({"architectures": ["GemmaForCausalLM"]}, "supported: LlamaForCausalLM Qwen2ForCausalLM"),
    "no class": ({"architectures": None}, "names the architectures None"),
    "unknown key": ({"logit_scale": 0.5}, "the unknown key 'logit_scale'"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    "bias": ({"attention_bias": True}, "attention_bias True is not supported"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config {'bits': 4} is not supported"),
    "window": ({"use_sliding_window": True}, "use_sliding_window True is not supported"),
    "layer kinds": ({"layer_types": ["full_attention", "sliding_attention"]}, "only full_attention"),
    "scaling": ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "RoPE scaling is not supported"),
    "newer scaling": ({"rope_parameters": {"rope_type": "llama3"}}, "RoPE scaling is not supported"),
    "unknown scaling": ({"rope_scaling": {"factor": 2.0}}, "RoPE scaling is not supported"),
    "two bases": ({"rope_parameters": {"rope_theta": 1.0}}, "contradicts itself about rope_theta"),
    "negative base": ({"rope_theta": -1}, "rope_theta is -1; it must be a finite number above 0"),
    "text for a number": ({"hidden_size": "64"}, "hidden_size is '64'; it must be a whole number"),
    "fraction": ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
    "missing": ({"vocab_size": None}, "vocab_size is None"),
    "head groups": ({"num_key_value_heads": 3}, "kv_heads is 3, which does not divide heads 4"),
    "shape": ({"vocab_size": 320}, "model.embed_tokens.weight is [300, 64]; expected [320, 64]"),
    "missing layer": ({"num_hidden_layers": 3}, "no safetensors file has the tensor model.layers.2."),
    "extra layer": ({"num_hidden_layers": 1}, "'model.layers.1.input_layernorm.weight' (one of 9 too many)"),
    "untied": ({"tie_word_embeddings": False}, "no safetensors file has the tensor lm_head.weight"),
    "eos": ({"eos_token_id": 300}, "eos_token_id is 300, not in the vocabulary of 300"),
}


def refusal(folder: Path) -> str:
    with pytest.raises(CeciliaError) as caught:
        convert(folder, folder.parent / "x.l3r")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_outside_the_envelope_is_refused_by_name(case: str, folder: Path) -> None:
    keys, expected = REFUSED[case]
    tiny_hf.write(folder, keys=keys)
    assert expected in refusal(folder)


def test_damaged_directories_are_refused_in_one_line(folder: Path) -> None:
    tiny_hf.write(folder, shards=2)
    sound = {path.name: path.read_bytes() for path in folder.iterdir()}
    shard, index = "model-00001-of-00002.safetensors", "model.safetensors.index.json"
    weight_map = json.loads(sound[index])["weight_map"]
    name = next(name for name, file in weight_map.items() if file == shard)
    outside = json.dumps({"weight_map": weight_map | {name: f"../{shard}"}}).encode()
    other = json.dumps({"weight_map": weight_map | {name: shard.replace("00001-", "00002-")}}).encode()
    for file, content, expected in (
        ("config.json", b"{", "not JSON"),
        ("config.json", b"[]", "not a JSON object"),
        ("config.json", b"\xff", "not UTF-8"),
        ("config.json", None, "a directory without config.json"),
        (index, b"{}", "no weight_map"),
        (index, outside, "the shard"),
        (index, other, "the index and the file differ in the tensor"),
        (index, None, "neither model.safetensors nor model.safetensors.index.json"),
        (shard, None, "No such file"),
        (shard, sound[shard][:-1], "no sound safetensors file"),
        (shard, sound[shard][:50], "no sound safetensors file"),
        (shard, b"\xff" * 100, "no sound safetensors file"),
        (shard, b"", "no sound safetensors file"),
        ("tokenizer.json", b"{}", "no usable tokenizer.json"),
        ("tokenizer.json", None, "no tokenizer.json (or give --tokenizer)"),
        ("generation_config.json", b'{"do_sample": true, "top_k": -1}', "top_k is -1"),
    ):
        if content is None:
            (folder / file).unlink()
        else:
            (folder / file).write_bytes(content)
        assert expected in refusal(folder), (file, content)
        (folder / file).unlink(missing_ok=True)
        if file in sound:
            (folder / file).write_bytes(sound[file])


def test_types_that_are_no_floats_are_refused_by_name(folder: Path) -> None:
    tiny_hf.write(folder)
    tiny_hf.relabel(folder / "model.safetensors", "F32", "I32")
    assert "is I32; supported: F32 F16 BF16" in refusal(folder)


def test_values_that_are_not_finite_are_refused_by_name(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    bad = tiny_gguf.random_values()[name].copy()
    bad[3, 5] = np.nan
    tiny_hf.write(folder, extra={name: bad})
    assert f"{name!r} holds values that are not finite" in refusal(folder)


def test_the_target_may_not_be_a_file_of_the_source(folder: Path) -> None:
    tiny_hf.write(folder)
    with pytest.raises(CeciliaError, match="bad_output"):
        convert(folder, folder / "model.safetensors")


def test_memory_follows_the_slab_not_the_tensor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding alone is 48 MB here."""
    rows = 196_608
    embedding = np.random.default_rng(1).standard_normal((rows, 64), np.float32)
    tiny_hf.write(folder, keys={"vocab_size": rows}, extra={"model.embed_tokens.weight": embedding})
    monkeypatch.setattr("tools.convert.pipeline._SLAB_BYTES", 1 << 20)
    del embedding
    tracemalloc.start()
    try:
        convert(folder, folder.parent / "x.l3r", Options(quant="q8"))
        assert tracemalloc.get_traced_memory()[1] < 24 << 20
    finally:
        tracemalloc.stop()


def test_a_file_that_shrinks_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_hf.write(folder)
    path = folder / "model.safetensors"

    def cut(*_: Any) -> str:
        path.write_bytes(path.read_bytes()[:-2000])
        return ""

    monkeypatch.setattr("tools.convert.pipeline.digest_of", cut)
    with pytest.raises(ModelFileError, match=r"truncated_model: .*ended inside the tensor"):
        convert(folder, folder.parent / "x.l3r")
