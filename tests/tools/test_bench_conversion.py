# SPDX-License-Identifier: Apache-2.0
"""The conversion bench on micro sizes: its checkpoint is one the converter takes, its two ways agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from cecilia.errors import CeciliaError
from tools.bench import conversion
from tools.shapes import MICRO


@pytest.fixture(autouse=True)
def micro(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few values, but several shards."""

    def small(_architecture: str, *, full: bool, changes: dict[str, int]) -> dict[str, object]:
        assert full
        return {**MICRO["ling3"], **changes, "yarn_context": 4096}

    monkeypatch.setattr(conversion, "hyper", small)
    monkeypatch.setattr(conversion, "SHARD_BYTES", 100_000)


def test_both_layouts_give_one_result(tmp_path: Path) -> None:
    runs, tensors, different = conversion.measure(tmp_path, 4)
    assert (len(runs), different) == (2, [])
    # Two embeddings and a norm; 3 KDA layers of 13, an MLA layer of 10, two norms each; 3 dense matrices, and
    # in 3 layers a router of 2, 16 experts and a shared one of 3.
    assert tensors == 3 + 3 * 13 + 10 + 4 * 2 + 3 + 3 * (2 + 17 * 3)
    for run in runs.values():
        assert min(run.read, run.written, run.resident) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_difference_is_told() -> None:
    run = conversion.Run(1, 1, 1.0, 1)
    assert conversion.lines({"a": run}, 9, ["x", "y"])[-1] == "2 of 9 tensors differ, the first one is x."


def test_a_conversion_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CeciliaError) as failure:
        conversion.convert_apart(tmp_path, tmp_path / "x.l3r", "keep")
    assert failure.value.code == "bench_failed"
