# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the roofline table, counted by hand for the tiny model; no time is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from cecilia.engine.load import load_runner
from tools.bench import roofline
from tools.bench.roofline import Peaks, Work
from tools.make_tiny import make_tiny
from tools.shapes import MICRO

H = MICRO["llama"]  # width 64, ff 160, 4 heads of 16 over 2 key/value heads, vocabulary 320, untied


def test_required_work(tmp_path: Path) -> None:
    runner = load_runner(make_tiny(tmp_path / "tiny.l3r", quant="f32"), profile="f32")
    try:
        work = roofline.required(runner, tokens=3, depth=10, calls=2, profile="f32")
    finally:
        runner.close()
    layers, calls, tokens = H["layers"], 2, 3
    qkv = (64 + 32 + 32) * 64
    assert work["qkv"].products == layers * calls * tokens * qkv
    assert work["qkv"].nbytes == layers * calls * qkv * 4
    assert work["gate_up"].products == layers * calls * tokens * 2 * 160 * 64
    assert work["head"].products == calls * 320 * 64  # only the last token of a pass needs it
    assert work["head"].nbytes == calls * 320 * 64 * 4
    # the passes end at positions 13 and 16; K and V of 32 floats each per layer and position
    assert work["attention"].nbytes == (13 + 16) * layers * 2 * 32 * 4
    # tokens see 11 .. 16 positions; 64 products each for scores and for values
    assert work["attention"].products == layers * 2 * 64 * (11 + 12 + 13 + 14 + 15 + 16)


def test_every_kernel_is_timed(tmp_path: Path) -> None:
    runner = load_runner(make_tiny(tmp_path / "tiny.l3r"))
    try:
        work = roofline.decode(runner, 20, "int8-v1")
    finally:
        runner.close()
    assert all(found.seconds > 0 for found in work.values())
    parts = [found.seconds for kind, found in work.items() if kind != "all"]
    assert sum(parts) == pytest.approx(work["all"].seconds)


def test_rows_are_per_step_and_relative_to_the_peaks() -> None:
    work = {"o": Work(seconds=0.004, nbytes=20e6, products=8e6), "everything else": Work(0.001)}
    found = list(roofline.rows("decode 7", work, 2, Peaks(bandwidth=10, products=4)))
    assert found == [
        "| decode 7 | o | 2.00 | 10.0 | 5.0 (50%) | 4 | 2.0 (50%) |",
        "| decode 7 | everything else | 0.50 | 0.0 |  | 0 |  |",
    ]


def test_peaks_of_this_machine_are_numbers() -> None:
    found = roofline.measure_peaks(1)
    assert found.bandwidth > 0.1
    assert found.products >= 0
