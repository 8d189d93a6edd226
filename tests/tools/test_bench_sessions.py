# SPDX-License-Identifier: Apache-2.0
"""The bench of sessions computes only what is new, whatever came between."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.bench import sessions
from tools.make_tiny import make_tiny


@pytest.mark.parametrize("architecture", ["llama", "ling3"])
def test_only_new_tokens_are_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], architecture: str
) -> None:
    changes = {"context": 2048} if architecture == "llama" else {}
    model = make_tiny(tmp_path / "tiny.l3r", architecture=architecture, **changes)
    assert sessions.main([str(model), "--threads", "1", "--histories", "300", "--no-log"]) == 0
    rows = re.findall(r"^\| (.+?) \| (\d+) of (\d+) \|", capsys.readouterr().out, re.M)
    new = sessions.NEW
    assert rows == [
        ("the history, cold", str(300 + new), str(300 + new)),
        ("a follow-up", str(new), str(300 + 2 * new)),
        ("a foreign request", "200", "200"),
        ("a follow-up after it", str(new), str(300 + 3 * new)),
        ("another last turn", str(new), str(300 + new)),
        ("back to the first branch, and a turn", str(new), str(300 + 4 * new)),
        ("a turn after it", str(new), str(300 + 5 * new)),
    ]


def test_a_missing_model_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sessions.main([str(tmp_path / "none.l3r"), "--no-log"]) == 3
    assert "none.l3r" in capsys.readouterr().err
