# SPDX-License-Identifier: Apache-2.0
"""GGUF to .l3r: every value and every row where it belongs, judged by the `gguf` package's own reading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from cecilia.errors import ModelFileError, UsageError
from cecilia.formats.l3r import ModelFile, open_model
from cecilia.formats.quant import dequantise, quantise, unpack
from tests.tools import tiny_gguf
from tools.convert.__main__ import main
from tools.convert.pipeline import Options, convert
from tools.convert.tensor_types import source_type

KEPT = {
    Kind.F32: "f32",
    Kind.F16: "f32",
    Kind.BF16: "bf16",
    Kind.Q8_0: "q8_32",
    Kind.Q4_0: "q4_32",
    Kind.Q4_1: "q4a_32",
    Kind.Q5_0: "q8_32",
}


def values(model: ModelFile, name: str) -> np.ndarray:
    """The float32 values of a tensor, [n] or [R, K]."""
    entry = model.tensors[name]
    if entry.rank == 1:
        return np.frombuffer(model.data(name), "<f4")
    return dequantise(unpack(model.data(name), entry.format, entry.rows, entry.cols))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.name)
def test_keep_changes_no_value_and_puts_rows_into_hugging_face_order(
    kind: Kind, tied: bool, tmp_path: Path
) -> None:
    expected = tiny_gguf.write(tmp_path / "tiny.gguf", kind, tied=tied)
    report = convert(tmp_path / "tiny.gguf", tmp_path / "tiny.l3r")
    with open_model(tmp_path / "tiny.l3r", verify=True) as model:
        assert list(model.tensors) == list(tiny_gguf.shapes(tied=tied))
        assert model.metadata["hyper"]["tied"] is tied
        for name, wanted in expected.items():
            np.testing.assert_array_equal(values(model, name), wanted, err_msg=name)
            assert model.tensors[name].format == ("f32" if wanted.ndim == 1 else KEPT[kind])
    assert report.errors == {}
    assert report.parameters == sum(value.size for value in expected.values())


def test_metadata_says_what_the_source_says(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf", keys={"general.sampling.temp": 0.25})
    convert(tmp_path / "tiny.gguf", tmp_path / "tiny.l3r", Options(weights="random"))
    with open_model(tmp_path / "tiny.l3r") as model:
        found = model.metadata
        assert model.chat_template == tiny_gguf.TEMPLATE
    assert found["architecture"] == "llama"
    assert found["hyper"] == {
        "layers": 2,
        "width": 64,
        "ff": 96,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "vocab": 300,
        "context": 128,
        "norm_eps": 1e-5,
        "rope_base": 10000.0,
        "tied": True,
    }
    assert (found["name"], found["weights"], found["license"]) == ("tiny", "random", "apache-2.0")
    assert found["text"] == {"bos_id": 1, "add_bos": False, "eos_ids": [2, 0], "pad_id": None}
    assert found["sampling"] == {"temperature": 0.25, "top_p": 1.0, "top_k": 0}
    assert found["provenance"]["source"] == "tiny.gguf"


@pytest.mark.parametrize(
    ("quant", "format", "bound"),
    [("f32", "f32", 0.0), ("bf16", "bf16", 2**-8), ("q8", "q8_32", 0.01), ("q4", "q4_32", 0.1)],
)
def test_requantising_rounds_the_values_of_the_source(
    quant: str, format: str, bound: float, tmp_path: Path
) -> None:
    expected = tiny_gguf.write(tmp_path / "tiny.gguf", Kind.F32)
    report = convert(tmp_path / "tiny.gguf", tmp_path / "tiny.l3r", Options(quant=quant))
    error = energy = 0.0
    with open_model(tmp_path / "tiny.l3r") as model:
        for name, wanted in expected.items():
            found = values(model, name)
            if wanted.ndim == 1:
                np.testing.assert_array_equal(found, wanted)
                continue
            assert model.tensors[name].format == format
            if quant in ("f32", "bf16"):
                np.testing.assert_array_equal(found, dequantise(quantise(wanted, format)), err_msg=name)
            error += float(np.square(found.astype(np.float64) - wanted).sum())
            energy += float(np.square(wanted.astype(np.float64)).sum())
    assert report.relative_rms() == pytest.approx((error / energy) ** 0.5)
    assert report.relative_rms() <= bound


def test_a_tensor_already_in_the_wanted_format_is_left_alone(tmp_path: Path) -> None:
    expected = tiny_gguf.write(tmp_path / "tiny.gguf", Kind.Q4_0)
    report = convert(tmp_path / "tiny.gguf", tmp_path / "tiny.l3r", Options(quant="q4"))
    assert report.relative_rms() == 0
    with open_model(tmp_path / "tiny.l3r") as model:
        name = "model.layers.0.self_attn.q_proj.weight"
        np.testing.assert_array_equal(values(model, name), expected[name])


def test_slabs_join_to_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf", Kind.Q8_0)
    convert(tmp_path / "tiny.gguf", tmp_path / "whole.l3r")
    monkeypatch.setattr("tools.convert.pipeline._SLAB_BYTES", 16 * 64 * 4)
    convert(tmp_path / "tiny.gguf", tmp_path / "slabs.l3r")
    assert (tmp_path / "whole.l3r").read_bytes() == (tmp_path / "slabs.l3r").read_bytes()


def test_rows_that_no_block_divides_stay_float_and_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def narrow(tensors: dict[str, np.ndarray]) -> None:
        for i in range(tiny_gguf.LAYERS):
            for name, cut in (("ffn_gate", np.s_[:40]), ("ffn_up", np.s_[:40]), ("ffn_down", np.s_[:, :40])):
                tensors[f"blk.{i}.{name}.weight"] = tensors[f"blk.{i}.{name}.weight"][cut].copy()

    source, out = tmp_path / "tiny.gguf", tmp_path / "tiny.l3r"
    tiny_gguf.write(source, Kind.BF16, keys={"llama.feed_forward_length": 40}, edit=narrow)
    assert main([str(source), "--out", str(out), "--quant", "q8"]) == 0
    assert "model.layers.1.mlp.down_proj.weight: rows of 40" in capsys.readouterr().out
    with open_model(out) as model:
        assert model.tensors["model.layers.0.mlp.down_proj.weight"].format == "bf16"
        assert model.tensors["model.layers.0.mlp.gate_proj.weight"].format == "q8_32"


def test_the_command_reports_size_and_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "tiny.gguf", tmp_path / "tiny.l3r"
    tiny_gguf.write(source, Kind.F32)
    assert main([str(source), "--out", str(out), "--quant", "q4"]) == 0
    printed = capsys.readouterr().out
    assert "bits a weight: " in printed
    assert "relative RMS error: 0." in printed
    assert main([str(source), "--out", str(out)]) == 0  # an existing file is replaced
    assert "values: unchanged" in capsys.readouterr().out


def test_the_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path / "a.l3r")
    convert(tmp_path / "tiny.gguf", tmp_path / "b.l3r")
    assert (tmp_path / "a.l3r").read_bytes() == (tmp_path / "b.l3r").read_bytes()


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "IQ4_NL", "MXFP4"])
def test_unsupported_tensor_types_are_named(name: str) -> None:
    with pytest.raises(ModelFileError, match=rf"{name}; supported: F32 .* Q5_1 Q4_K Q5_K Q6_K$"):
        source_type("blk.0.attn_q.weight", name)


def test_output_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    tiny_gguf.write(source)
    link = tmp_path / "link.l3r"
    link.symlink_to(source)
    for out in (source, link, tmp_path, tmp_path / "absent" / "x.l3r"):
        with pytest.raises(UsageError, match="bad_output"):
            convert(source, out)
