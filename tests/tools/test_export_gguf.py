# SPDX-License-Identifier: Apache-2.0
"""Exported weights, read back by the public reader and dequantised by it, are the model's."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from cecilia.errors import UsageError
from cecilia.formats.l3r import open_model
from cecilia.formats.quant import dequantise, unpack
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
            values = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
            np.testing.assert_array_equal(values.reshape(ours.shape), ours)


def test_a_round_trip_through_the_converter(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "tiny.l3r", architecture="qwen3", quant="q4_32")
    back = convert(export_gguf(model, tmp_path / "tiny.gguf"), tmp_path / "back.l3r").path
    with open_model(model) as first, open_model(back) as second:
        assert first.metadata["hyper"] == second.metadata["hyper"]
        assert all(first.data(name) == second.data(name) for name in first.tensors)


def test_an_architecture_with_another_row_order_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="llama, not qwen2 or qwen3"):
        export_gguf(make_tiny(tmp_path / "tiny.l3r"), tmp_path / "tiny.gguf")
