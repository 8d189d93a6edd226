# SPDX-License-Identifier: Apache-2.0
"""The soak program, briefly: a live process, a tiny model, clients that leave at every point."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import soak
from tools.soak import Held, Server, SoakError, Storm, complaints


@pytest.fixture
def server(root: Path, tmp_path: Path) -> Iterator[Server]:
    model = tmp_path / "tiny.l3r"
    command = [sys.executable, "-m", "tools.make_tiny", "--out", str(model), "--context", "2048"]
    subprocess.run(command, cwd=root, check=True, capture_output=True, timeout=60)
    server = Server(str(model), ["--threads", "1"])
    yield server
    assert server.stop() == 0  # SIGTERM


def test_a_short_storm_leaves_nothing_behind(server: Server) -> None:
    idle = Held.of(server.pid)
    storm = Storm(server, seed=3)
    for _ in range(40):
        storm.one()
    assert storm.outcomes["next"] > 0
    assert soak.settled(server.pid, idle.descriptors).descriptors == idle.descriptors
    assert not any("Traceback" in line for line in server.log)


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(SoakError, match="model_not_found"):
        Server(str(tmp_path / "none.l3r"), [])


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (Held(10, 3, 105_119), []),
        (Held(11, 3, 100_000), ["descriptors"]),
        (Held(10, 2, 100_000), ["threads"]),
        (Held(10, 3, 105_120), ["memory"]),
        (Held(9, 4, 200_000), ["descriptors", "threads", "memory"]),
    ],
)
def test_what_is_complained_about(last: Held, words: list[str]) -> None:
    assert [line.split()[0] for line in complaints(Held(10, 3, 100_000), last)] == words
