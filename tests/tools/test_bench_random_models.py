# SPDX-License-Identifier: Apache-2.0
"""Random models of real shapes: the shapes, and that each pair is made once and whole."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from cecilia.arch import ARCHITECTURES
from cecilia.errors import CeciliaError
from cecilia.formats.l3r import open_model
from tools.bench import random_models
from tools.bench.random_models import SHAPES, random_pair
from tools.shapes import hyper

# What llama-bench counts in a file of these shapes.
WEIGHTS = {
    "qwen3-0.6b": 596_049_920,
    "ling3-tiny": 7_893_392_800,
    # 6 x 18,925,712 delta, 2 x 7,332,608 latent, 21,233,664 dense, 7 x 304,545,920 experts, norms, 2 tables
    "ling3-tiny-8-layers": 2_764_169_952,
}
SMALL = {"layers": 2, "width": 64, "ff": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 320}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a small model with the rest of a real one's shape."""
    monkeypatch.setitem(SHAPES, "small", SHAPES["qwen3-0.6b"] | SMALL)
    return "small"


@pytest.mark.parametrize("name", SHAPES)
def test_the_shapes_have_the_real_number_of_weights(name: str) -> None:
    changes = dict(SHAPES[name])
    architecture, full = changes.pop("architecture"), changes.pop("full", False)
    arch = ARCHITECTURES[architecture]
    specs = arch.tensors(arch.spec_from(hyper(architecture, full=full, changes=changes)))
    # Of the two key matrices, which hold the same, GGUF has one.
    counted = [spec for tensor, spec in specs.items() if ".k_b_proj." not in tensor]
    assert sum(spec.rows * spec.cols for spec in counted) == WEIGHTS[name]


def test_every_matrix_is_four_bit_in_both_files(tmp_path: Path, small: str) -> None:
    pair = random_pair(small, tmp_path / "new")
    with open_model(pair.model) as file:
        assert {entry.format for entry in file.tensors.values() if entry.rank == 2} == {"q4_32"}
    kinds = {
        tensor.tensor_type.name for tensor in gguf.GGUFReader(pair.gguf).tensors if len(tensor.shape) == 2
    }
    assert kinds == {"Q4_0"}


def test_a_pair_is_made_once(tmp_path: Path, small: str) -> None:
    pair = random_pair(small, tmp_path)
    pair.model.write_bytes(b"kept")
    pair.gguf.write_bytes(b"too")
    assert random_pair(small, tmp_path) == pair
    assert (pair.model.read_bytes(), pair.gguf.read_bytes()) == (b"kept", b"too")
    assert sorted(tmp_path.iterdir()) == sorted([pair.model, pair.gguf])


def test_a_failed_export_is_not_taken_for_a_model(
    tmp_path: Path, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_written(_: Path, out: Path) -> Path:
        out.write_bytes(b"half")
        raise CeciliaError("io_error", "disk full")

    with monkeypatch.context() as patch:
        patch.setattr(random_models, "export_gguf", half_written)
        with pytest.raises(CeciliaError, match="disk full"):
            random_pair(small, tmp_path)
    pair = random_pair(small, tmp_path)
    assert len(gguf.GGUFReader(pair.gguf).tensors) == 2 + 11 * SMALL["layers"]
