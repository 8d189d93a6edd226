# SPDX-License-Identifier: Apache-2.0
"""`python -m server` as a process: exit codes, one line on stderr, data on stdout."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cecilia.errors import ModelFileError
from server import check
from server.config import Config
from tools.make_tiny import make_tiny

MISSING = "models/there-is-none.l3r"


def run(root: Path, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CECILIA_")}
    return subprocess.run(
        [sys.executable, "-m", "server", *argv],
        cwd=root,
        env=clean | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def one_line(text: str) -> str:
    assert text.count("\n") == 1
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["--prot", "1"], 2, "did you mean --port?"),
        (["--port", "x"], 2, "--port must be"),
        (["--context", "4M"], 2, "4K"),
        (["--model", MISSING, "--port", "0"], 3, "model_not_found"),
    ],
)
def test_failures(root: Path, argv: list[str], code: int, text: str) -> None:
    done = run(root, *argv)
    assert (done.returncode, done.stdout) == (code, "")
    assert text in one_line(done.stderr)


def test_a_session_directory_that_cannot_be(root: Path, tmp_path: Path) -> None:
    model = tmp_path / "never-read.l3r"
    model.write_bytes(b"")
    done = run(root, "--port", "0", "--model", str(model), "--session-dir", str(model / "sessions"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "bad_session_dir" in one_line(done.stderr)
    assert "Not a directory" in done.stderr


def test_a_port_in_use(root: Path, tmp_path: Path) -> None:
    model = tmp_path / "never-read.l3r"
    model.write_bytes(b"")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run(root, "--port", port, "--model", str(model))
    assert done.returncode == 5
    assert re.match(rf"error: port_in_use: 127\.0\.0\.1 port {port} ", one_line(done.stderr))
    assert "--port" in done.stderr


@pytest.mark.parametrize("content", [b"", b"GGUF" + bytes(100), bytes(70_000)])
def test_a_file_that_is_no_model(root: Path, tmp_path: Path, content: bytes) -> None:
    model = tmp_path / "broken.l3r"
    model.write_bytes(content)
    done = run(root, "--port", "0", "--model", str(model))
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


def test_print_config(root: Path) -> None:
    done = run(root, "--print-config", "--context", "64K", "--model", MISSING, CECILIA_PORT="1234")
    assert (done.returncode, done.stderr) == (0, "")
    settings = json.loads(done.stdout)
    assert settings["context"] == {"value": 65536, "source": "flag"}
    assert settings["port"] == {"value": 1234, "source": "env"}
    assert settings["host"] == {"value": "127.0.0.1", "source": "default"}


def test_print_config_shows_what_the_cache_costs(root: Path, tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "tiny.l3r", context=4096)
    done = run(root, "--print-config", "--context", "4K", "--model", str(model))
    assert (done.returncode, done.stderr) == (0, "")
    cache = json.loads(done.stdout)["cache"]
    # 2 layers, keys and values, 2 KV heads of 16 f32
    assert cache["recipes"]["f32"]["window_bytes"] == 4096 * 2 * 2 * 2 * 16 * 4


def test_version(root: Path) -> None:
    done = run(root, "--version")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["cecilia", "kernels", "python", "libc"]


def test_check_names_a_remedy_for_everything_that_is_wrong(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run(root, "--check", "--model", MISSING, "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    bad = [line.split()[1] for line in lines if line.startswith("FAIL")]
    assert bad == ["port", "model"]
    for at, line in enumerate(lines):
        if line.startswith("FAIL"):
            assert "remedy: " in lines[at + 1]
    assert "\x1b" not in done.stdout


def test_check_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_config: Config) -> str:
        raise ModelFileError("bad_digest", "a leaf is not what it was")

    monkeypatch.setattr(check, "_cpu", lambda: "scalar")
    monkeypatch.setattr(check, "_cores", lambda: iter(()))
    monkeypatch.setattr(check, "_model", broken)
    shown: list[str] = []
    assert check.check(Config(port=0), shown.append, colour=True) == 1
    tints = [line[:5] for line in shown if line.startswith("\x1b")]
    assert tints == [check.GREEN, check.GREEN, check.GREEN, check.RED]


@pytest.mark.model
def test_check_of_a_good_model(root: Path, model_path: Path) -> None:
    done = run(root, "--check", "--model", str(model_path), "--port", "0")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(line.startswith("ok ") for line in done.stdout.splitlines())
