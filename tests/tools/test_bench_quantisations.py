# SPDX-License-Identifier: Apache-2.0
"""What the table of quantisations is computed from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tools.bench import quantisations
from tools.bench.quantisations import Variant
from tools.make_tiny import make_tiny

IDS = np.arange(512) % 2


class Fixed:
    """Answers every row with the same log-odds of token 0 over token 1."""

    def __init__(self, odds: float) -> None:
        self.odds = odds

    def evaluate(self, ids: list[int]) -> np.ndarray:
        return np.tile(np.float32([self.odds, 0.0]), (len(ids), 1))


def test_a_row_gives_divergence_and_likelihood() -> None:
    found = [Variant("reference", Path("a")), Variant("other", Path("b"))]
    quantisations.take_row(found, [Fixed(0.0), Fixed(np.log(3))], IDS)  # type: ignore[list-item]
    assert found[0].kl == [0.0] * 64
    # of a fair coin to one of 3 : 1: -ln 2 - (ln 3/4 + ln 1/4) / 2 = ln(2 / sqrt 3)
    assert found[1].kl == pytest.approx([np.log(2 / np.sqrt(3))] * 64, abs=1e-6)
    # positions 256 to 511 are predicted, half of them each token
    (nll,) = found[1].nll
    assert len(nll) == 256
    assert nll.mean() == pytest.approx(-(np.log(3 / 4) + np.log(1 / 4)) / 2)


def test_a_row_of_the_table(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "tiny.l3r", quant="f32")
    variant = Variant("x", path, [0.1, 0.3], [np.log([4.0, 9.0])], {"prefill 512": 100.4, "decode 128": 7.6})
    size = path.stat().st_size / 1e6
    assert variant.row() == f"| x | 32.00 | {size:.0f} MB | 6.0000 | 0.20000 +- 0.10000 | 100 | 8 |"
