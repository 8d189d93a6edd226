# SPDX-License-Identifier: Apache-2.0
"""Loading finds everything that is wrong with a file or a wish, and says which."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cecilia.arch import published
from cecilia.engine import memory
from cecilia.engine.load import load, load_runner
from cecilia.errors import MemoryLimitError, ModelFileError, UsageError
from cecilia.formats.quant import tensor_bytes
from tests.engine.conftest import Edit, rewrite
from tools.make_tiny import make_tiny

Q = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.norm.weight"


def test_info(tiny_path: Path) -> None:
    engine = load(tiny_path, threads=2, context=100, profile="bf16-v1", verify=True)
    info = engine.info
    assert {key: info[key] for key in ("id", "architecture", "weights", "context", "profile", "threads")} == {
        "id": "tiny",
        "architecture": "llama",
        "weights": "random",
        "context": 100,
        "profile": "bf16-v1",
        "threads": 2,
    }
    assert info["quantisation"] == "q8_32"
    assert len(info["digest"]) == 64
    assert engine.context == 100
    assert engine.defaults == {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
    engine.close()


@pytest.mark.parametrize(("weights", "name"), [("official", "known"), ("random", "x"), ("trained-here", "x")])
def test_only_official_weights_have_the_name_of_a_published_model(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, name: str
) -> None:
    monkeypatch.setattr(published, "_NAMES", {"known": ("llama", {"layers": 2, "width": 64})})
    path = rewrite(tiny_path, tmp_path / "x.l3r", lambda metadata, _: metadata.update(weights=weights))
    engine = load(path, threads=1)
    assert (engine.info["id"], engine.info["weights"]) == (name, weights)
    engine.close()


@pytest.mark.parametrize("verify", [False, True])
def test_progress_runs_from_zero_to_one(tiny_path: Path, verify: bool) -> None:
    seen: list[float] = []
    load(tiny_path, threads=1, progress=seen.append, verify=verify).close()
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert all(0 <= fraction <= 1 for fraction in seen)


@pytest.mark.parametrize(
    ("wish", "code", "facts"),
    [
        ({"profile": "int4-v9"}, "unknown_profile", ["int4-v9", "int8-v1", "bf16-v1"]),
        ({"context": 257}, "context_too_large", ["257", "256"]),
        ({"context": 0}, "invalid_context", ["0"]),
        ({"threads": 0}, "invalid_threads", ["0"]),
    ],
)
def test_wishes_that_cannot_be_met(
    tiny_path: Path, wish: dict[str, Any], code: str, facts: list[str]
) -> None:
    with pytest.raises(UsageError) as refusal:
        load_runner(tiny_path, **wish)
    assert refusal.value.code == code
    assert all(fact in refusal.value.message for fact in facts)


@pytest.mark.parametrize("weights", ["mmap", "hugepage", "auto"])
def test_too_little_memory_is_refused_with_the_arithmetic(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    monkeypatch.setattr(memory, "available", lambda: (256 << 20) + 100_000)
    with pytest.raises(MemoryLimitError) as refusal:
        load_runner(tiny_path, weights=weights)
    assert refusal.value.code == "insufficient_memory"
    assert "weights 0.1 MiB + KV cache of 256 tokens 0.0 MiB = 0.2 MiB needed" in refusal.value.message
    assert "256.1 MiB available less 256.0 MiB kept free" in refusal.value.message


def test_available_memory_is_what_the_system_says(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       2000 kB\nMemFree:  1 kB\nMemAvailable:   1500 kB\n")
    assert memory.available(meminfo) == 1500 * 1024
    meminfo.write_text("MemTotal:       2000 kB\n")
    with pytest.raises(MemoryLimitError, match="memory_unknown"):
        memory.available(meminfo)


def set_hyper(**changes: Any) -> Edit:
    return lambda metadata, _: metadata["hyper"].update(changes)


def drop_hyper(metadata: dict[str, Any], _: Any) -> None:
    del metadata["hyper"]["ff"]


def rename_architecture(metadata: dict[str, Any], _: Any) -> None:
    metadata["architecture"] = "mystery"


def drop_tensor(_: Any, tensors: dict[str, Any]) -> None:
    del tensors[Q]


def extra_tensor(_: Any, tensors: dict[str, Any]) -> None:
    planned, data = tensors[NORM]
    tensors["model.extra.weight"] = (replace(planned, name="model.extra.weight"), data)


def change(name: str, **changes: Any) -> Edit:
    """Give tensor `name` another shape, layer or format, and zeros to match."""

    def edit(_: Any, tensors: dict[str, Any]) -> None:
        planned = replace(tensors[name][0], **changes)
        nbytes = tensor_bytes(planned.format, planned.rank, planned.rows, planned.cols)
        tensors[name] = (planned, bytes(nbytes))

    return edit


@pytest.mark.parametrize(
    ("edit", "code", "fact"),
    [
        (rename_architecture, "unsupported_architecture", "'mystery'"),
        (set_hyper(sliding_window=4), "bad_hyper", "sliding_window is unknown"),
        (drop_hyper, "bad_hyper", "ff is missing"),
        (set_hyper(layers=0), "bad_hyper", "layers"),
        (set_hyper(layers=True), "bad_hyper", "layers"),
        (set_hyper(layers=2.0), "bad_hyper", "layers"),
        (set_hyper(layers=2**40), "bad_hyper", "layers"),
        (set_hyper(layers=5000), "bad_hyper", "layers"),
        (set_hyper(tied=1), "bad_hyper", "tied"),
        (set_hyper(norm_eps=-1.0), "bad_hyper", "norm_eps"),
        (set_hyper(norm_eps="small"), "bad_hyper", "norm_eps"),
        (set_hyper(norm_eps=1.5), "bad_hyper", "norm_eps"),
        (set_hyper(rope_base=0), "bad_hyper", "rope_base"),
        (set_hyper(kv_heads=3), "bad_hyper", "kv_heads"),
        (set_hyper(head_dim=24), "bad_hyper", "head_dim"),
        (set_hyper(layers=3), "missing_tensor", "model.layers.2.input_layernorm.weight"),
        (set_hyper(layers=1), "unknown_tensor", "model.layers.1."),
        (set_hyper(tied=True), "unknown_tensor", "lm_head.weight"),
        (set_hyper(vocab=260), "bad_tensor", "expected rank 2 and 260 x 64"),
        (drop_tensor, "missing_tensor", Q),
        (extra_tensor, "unknown_tensor", "model.extra.weight"),
        (change(Q, rows=48), "bad_tensor", f"{Q} has rank 2 and is 48 x 64, expected rank 2 and 64 x 64"),
        (change(NORM, cols=32), "bad_tensor", NORM),
        (change(NORM, rank=2), "bad_tensor", "has rank 2"),
        (change("model.embed_tokens.weight", layer=5), "bad_tensor", "layer 5, expected -1"),
    ],
)
def test_bad_files(tiny_path: Path, tmp_path: Path, edit: Edit, code: str, fact: str) -> None:
    bad = rewrite(tiny_path, tmp_path / "bad.l3r", edit)
    with pytest.raises(ModelFileError) as refusal:
        load(bad, threads=1)
    assert (refusal.value.code, "\n" in refusal.value.message) == (code, False)
    assert fact in refusal.value.message
    assert str(bad) in refusal.value.message


@pytest.mark.parametrize(
    ("sizes", "fact"),
    [
        ({"architecture": "llama", "head_dim": 272}, "head width 272"),
        ({"architecture": "ling3", "head_dim": 272}, "4 heads of 272"),
        ({"architecture": "ling3", "nope_dim": 256}, "head width 272"),
        ({"architecture": "ling3", "experts": 2048}, "4 of 2048 experts"),
    ],
)
def test_sizes_no_kernel_is_made_for(tmp_path: Path, sizes: dict[str, Any], fact: str) -> None:
    path = make_tiny(tmp_path / "x.l3r", **sizes)
    with pytest.raises(ModelFileError, match=rf"unsupported_model: .*x\.l3r: {fact}"):
        load(path, threads=1)


def test_experts_in_different_formats(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"

    def widen(_metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        planned = replace(tensors[name][0], format="f32")
        tensors[name] = planned, bytes(tensor_bytes("f32", planned.rank, planned.rows, planned.cols))

    path = rewrite(make_tiny(tmp_path / "x.l3r", architecture="ling3"), tmp_path / "mixed.l3r", widen)
    with pytest.raises(
        ModelFileError, match=r"unsupported_model: .*mixed\.l3r: experts in q8_32, f32, q8_32"
    ):
        load(path, threads=1)


def test_a_harmless_copy_loads(tiny_path: Path, tmp_path: Path) -> None:
    """The copies above fail for their edits, not for having been copied."""
    load(rewrite(tiny_path, tmp_path / "copy.l3r", set_hyper(context=300)), context=300, threads=1).close()


@pytest.mark.parametrize(
    ("parts", "code"),
    [({"tokenizer": False}, "no_tokenizer"), ({"template": False}, "no_chat_template")],
)
def test_without_its_text_a_file_is_for_tools_only(
    tiny_path: Path, tmp_path: Path, parts: dict[str, bool], code: str
) -> None:
    mute = rewrite(tiny_path, tmp_path / "mute.l3r", lambda *_: None, **parts)
    with pytest.raises(ModelFileError) as refusal:
        load(mute, threads=1)
    assert refusal.value.code == code
    runner = load_runner(mute, threads=1)
    assert runner.feed([1, 2, 3]).shape == (259,)
    runner.close()


def test_a_tokenizer_larger_than_the_model_is_refused(tiny_path: Path, tmp_path: Path) -> None:
    def shrink(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        metadata["hyper"]["vocab"] = 250
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            change(name, rows=250)(metadata, tensors)

    small = rewrite(tiny_path, tmp_path / "small.l3r", shrink)
    with pytest.raises(ModelFileError, match=r"bad_tokenizer.*259.*250"):
        load(small, threads=1)
