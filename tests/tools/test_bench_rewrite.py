# SPDX-License-Identifier: Apache-2.0
"""Files made from another: formats and values of every tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cecilia.formats.l3r import open_model
from cecilia.formats.quant import dequantise, quantise, unpack
from tools.bench.rewrite import dequantised, round_to_nearest
from tools.make_tiny import make_tiny


def test_plain_rounding_takes_the_formats_of_the_other_file(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "wide.l3r", quant="f32")
    like = make_tiny(tmp_path / "like.l3r", quant="q4_32", seed=1)
    out = round_to_nearest(source, like, tmp_path / "out.l3r")
    with open_model(source) as wide, open_model(out) as found:
        for entry in found.tensors.values():
            raw = np.asarray(wide.data(entry.name))
            if entry.rank == 1:
                assert bytes(found.data(entry.name)) == bytes(raw)
                continue
            assert entry.format == "q4_32"
            blocks = unpack(np.asarray(found.data(entry.name)), "q4_32", entry.rows, entry.cols)
            weights = dequantise(unpack(raw, "f32", entry.rows, entry.cols))
            np.testing.assert_array_equal(dequantise(blocks), dequantise(quantise(weights, "q4_32")))


def test_dequantised_values_are_those_of_the_blocks(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "four.l3r", quant="q4_32")
    out = dequantised(source, tmp_path / "wide.l3r")
    with open_model(source) as four, open_model(out) as wide:
        assert wide.metadata == four.metadata
        assert list(wide.tensors) == list(four.tensors)
        for entry in four.tensors.values():
            raw, found = np.asarray(four.data(entry.name)), np.asarray(wide.data(entry.name))
            if entry.rank == 1:
                assert bytes(found) == bytes(raw)
                continue
            assert (entry.format, wide.tensors[entry.name].format) == ("q4_32", "f32")
            want = dequantise(unpack(raw, "q4_32", entry.rows, entry.cols))
            np.testing.assert_array_equal(dequantise(unpack(found, "f32", entry.rows, entry.cols)), want)
