# SPDX-License-Identifier: Apache-2.0
"""What `python -m tools.inspect` prints and how it exits."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.formats.samples import METADATA, PLAN, write_sample
from tools.inspect import main


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("inspect") / "sample.l3r")


@pytest.fixture
def damaged(sample: Path, tmp_path: Path) -> Path:
    """The sample with its very last byte, padding of the last slice, flipped."""
    path = tmp_path / "damaged.l3r"
    path.write_bytes(sample.read_bytes()[:-1] + b"\1")
    return path


def test_json_holds_every_fact(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(sample), "--json", "--tensors", "--verify"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    raw = sample.read_bytes()
    assert err == ""
    assert report["bytes"] == len(raw)
    assert report["digest"] == hashlib.sha256(raw[:2016]).hexdigest()
    assert report["verified"] is True
    assert report["metadata"] == METADATA
    for s in report["sections"]:
        assert s["sha256"] == hashlib.sha256(raw[s["offset"] : s["offset"] + s["bytes"]]).hexdigest()
    assert [s["name"] for s in report["sections"]] == [
        "metadata",
        "tokenizer",
        "chat_template",
        "directory",
        "leaves",
    ]
    assert [(t["name"], t["format"], t["layer"]) for t in report["tensors"]] == [
        (t.name, t.format, t.layer) for t in PLAN
    ]
    # 3 tiles of 16 x 96 bytes of values and 16 x 3 scales of 2 bytes, padded from 1632 to 1664
    expected = {"tensors": 1, "weights": 33 * 96, "bytes": 3 * 1664, "bits_per_weight": 12.606}
    assert report["formats"]["q8_32"] == expected
    assert report["total"]["tensors"] == len(PLAN)
    assert report["total"]["weights"] == sum(t.rows * t.cols for t in PLAN)
    assert (report["slices"], report["leaves"]) == (4, 5)


def test_text_names_tensors_only_on_request(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(sample)]) == 0
    short = capsys.readouterr().out
    assert main([str(sample), "--tensors"]) == 0
    long = capsys.readouterr().out
    assert all(t.name not in short and t.name in long for t in PLAN)
    assert "all but tensor data" in short
    assert '"name": "s\\u00e4mple"' in short


def test_damaged_data_shows_only_under_verify(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(damaged)]) == 0
    assert capsys.readouterr().err == ""
    assert main([str(damaged), "--verify"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("data_corrupt: ")
    assert err.count("\n") == 1


def test_a_missing_file_is_one_line_and_exit_code_3(tmp_path: Path, root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.inspect", str(tmp_path / "none.l3r")],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr == f"file_unreadable: {tmp_path / 'none.l3r'}: No such file or directory\n"


@pytest.mark.parametrize("argv", [[], ["a", "b"], ["a", "--fast"]])
def test_wrong_usage_is_exit_code_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_a_closed_pipe_is_no_error(sample: Path, root: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.inspect", str(sample)],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0
