# SPDX-License-Identifier: Apache-2.0
"""tools.compare, with an engine that is a table: expected figures are worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cecilia.engine import load
from cecilia.errors import ModelFileError, UsageError
from tools import compare

# Three tokens; after token t the probabilities are the softmax of TABLE[t].
TABLE = np.log(np.array([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]], np.float32))


class Table:
    """An engine that answers from TABLE, `shift` added to the logit of token 0."""

    def __init__(self, shift: float = 0.0) -> None:
        self.table = TABLE + np.array([shift, 0, 0], np.float32)
        self.closed = False

    def evaluate(self, tokens: Sequence[int]) -> Any:
        return self.table[list(tokens)]

    def greedy(self, tokens: Sequence[int], n: int) -> list[int]:
        out = [tokens[-1]]
        for _ in range(n):
            out.append(int(self.table[out[-1]].argmax()))
        return out[1:]

    def close(self) -> None:
        self.closed = True


def save(path: Path, **arrays: Any) -> Path:
    np.savez(path, **{name: np.asarray(value) for name, value in arrays.items()})
    return path


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """ids [6], logits of every position, and the greedy continuation of the first two."""
    ids = [0, 1, 2, 0, 0, 1]
    return save(tmp_path / "dense.npz", ids=ids, logits=TABLE[ids], greedy=[2, 1, 2])


def test_equal_logits_are_no_error(dense: Path) -> None:
    found = compare.compare(Table(), compare.read_golden(dense))
    assert (found.max_error, found.argmax_agreement, found.mean_kl) == (0.0, 1.0, 0.0)
    assert found.positions == 6
    assert found.greedy == (3, 3)
    assert found.perplexity is None


def test_a_shifted_logit_gives_its_error_and_divergence(dense: Path) -> None:
    found = compare.compare(Table(shift=2.0), compare.read_golden(dense))
    assert found.max_error == pytest.approx(2.0, abs=1e-6)
    # KL(p || p shifted by s at token 0) = log(1 + p0 (e^s - 1)) - p0 s
    p0 = [0.5, 0.2, 0.1, 0.5, 0.5, 0.2]
    want = sum(math.log(1 + p * (math.exp(2) - 1)) - p * 2 for p in p0) / 6
    assert found.mean_kl == pytest.approx(want, abs=1e-6)
    # with e^2 on token 0 the likeliest after 0, 1, 2 is 0, 0 (0.2 e^2 = 1.48 > 0.6), 1 (0.1 e^2 = 0.74 < 0.8)
    assert found.argmax_agreement == pytest.approx(4 / 6)
    assert found.greedy == (0, 3)


def test_stored_positions_nll_and_rows(tmp_path: Path) -> None:
    ids = np.array([[0, 1, 2], [2, 1, 0]])
    nll = -np.log([[0.25, 0.6], [0.8, 0.2]])
    path = save(tmp_path / "g.npz", ids=ids, nll=nll, logits=TABLE[[1, 2]], logits_at=[[1, 1], [0, 2]])
    golden = compare.read_golden(path)
    both = compare.compare(Table(), golden)
    assert both.max_error == 0.0
    assert both.positions == 2
    assert both.perplexity == pytest.approx((0.25 * 0.6 * 0.8 * 0.2) ** (-1 / 4), rel=1e-6)
    assert both.golden_perplexity == pytest.approx(both.perplexity, rel=1e-6)
    first = compare.compare(Table(), golden, rows=1)
    assert first.positions == 1
    assert first.perplexity == pytest.approx((0.25 * 0.6) ** (-1 / 2), rel=1e-6)


def test_long_rows_count_from_position_256() -> None:
    nll = np.zeros((2, 511))
    nll[:, 255:] = math.log(3)
    assert compare.perplexity(nll) == pytest.approx(3.0)
    assert compare.perplexity(nll[:, :510]) < 3.0  # rows of another length count whole


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"logits": TABLE}, "holds no ids"),
        ({"ids": [0, 1, 2]}, "none of"),
        ({"ids": [0, 1], "logits": TABLE}, "2 positions"),
        ({"ids": [0, 1], "nll": [[0.1, 0.2, 0.3]]}, "does not belong"),
        ({"ids": [0, 1], "logits": TABLE[:1], "logits_at": [[0, 2]]}, "outside"),
        ({"ids": [1.5], "logits": TABLE[:1]}, "ids holds float64"),
        ({"ids": np.zeros((0, 3), int), "logits": TABLE}, "no rows"),
        ({"ids": np.zeros((1, 1, 1), int), "logits": TABLE[:1]}, "no rows"),
        ({"ids": [0], "logits": [["a"]]}, "logits holds <U1"),
        ({"ids": [0], "logits": TABLE[:1], "logits_at": [0]}, "no pairs"),
        ({"ids": [0, 1, 2], "greedy": 7}, "greedy has the shape"),
    ],
)
def test_an_unfit_golden_is_named(tmp_path: Path, arrays: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        compare.read_golden(save(tmp_path / "g.npz", **arrays))
    assert error.value.code == "invalid_golden"
    assert "\n" not in error.value.message


def test_not_an_npz_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "g.npz").write_bytes(b"PK\x03\x04 not a zip file")
    with pytest.raises(UsageError):
        compare.read_golden(tmp_path / "g.npz")
    with pytest.raises(UsageError):
        compare.read_golden(tmp_path / "absent.npz")
    np.save(tmp_path / "bare.npy", np.arange(3))
    with pytest.raises(UsageError):
        compare.read_golden(tmp_path / "bare.npy")


def test_another_vocabulary_is_named(dense: Path) -> None:
    engine = Table()
    engine.table = np.zeros((3, 4), np.float32)
    with pytest.raises(UsageError, match="3 tokens, the model has 4"):
        compare.compare(engine, compare.read_golden(dense))


@pytest.mark.parametrize(("shift", "code"), [(0.0, 0), (0.4, 0), (0.6, 1), (math.nan, 1)])
def test_exit_code_of_a_tolerance(
    dense: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shift: float, code: int
) -> None:
    engine = Table(shift)
    monkeypatch.setattr(load, "load_runner", lambda *_, **__: engine)
    assert compare.main(["m.l3r", "--golden", str(dense), "--tolerance", "0.5"]) == code
    assert engine.closed
    assert capsys.readouterr().err.startswith("tolerance_exceeded" if code else "")


def test_exit_codes_of_errors(
    dense: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ModelFileError("bad_magic", "m.l3r: not a model file")

    monkeypatch.setattr(load, "load_runner", refuse)
    assert compare.main(["m.l3r", "--golden", str(dense)]) == 3
    assert capsys.readouterr().err == "bad_magic: m.l3r: not a model file\n"
    assert compare.main(["m.l3r", "--golden", str(dense), "--rows", "0"]) == 2
    assert compare.main(["m.l3r", "--golden", "absent.npz"]) == 2
