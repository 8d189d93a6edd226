# SPDX-License-Identifier: Apache-2.0
"""What counts as a start, and the memory that is told; no speed is asserted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from cecilia.errors import CeciliaError
from tools.bench import start
from tools.bench.start import Start

ROLE: dict[str, Any] = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
TEXT: dict[str, Any] = {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}
THOUGHT: dict[str, Any] = {"choices": [{"delta": {"reasoning_content": "a"}, "finish_reason": None}]}
END: dict[str, Any] = {"choices": [{"delta": {}, "finish_reason": "length"}]}


class Scripted(BaseHTTPRequestHandler):
    """Answers with the chunks of its server, and keeps what it was asked."""

    chunks: ClassVar[list[dict[str, Any]]] = []
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b": a comment\n\n")
        for chunk in self.chunks:
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(Scripted, "asked", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found.server_port
        found.shutdown()


@pytest.mark.parametrize("last", [TEXT, THOUGHT, END])
def test_text_a_thought_or_the_end_is_the_first_piece(
    server: int, monkeypatch: pytest.MonkeyPatch, last: dict[str, Any]
) -> None:
    monkeypatch.setattr(Scripted, "chunks", [ROLE, last])
    start.first_piece(server, "hello")
    (asked,) = Scripted.asked
    assert asked["messages"] == [{"role": "user", "content": "hello"}]
    assert asked["stream"] is True


def test_an_empty_answer_is_no_first_piece(server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "chunks", [ROLE])
    with pytest.raises(CeciliaError, match="without a token") as error:
        start.first_piece(server, "hello")
    assert error.value.code == "bench_failed"


def test_a_server_is_ready_when_health_says_so(server: int) -> None:
    assert start.is_ready(server)
    assert not start.is_ready(start.free_port())


def test_a_server_that_ends_is_not_waited_for() -> None:
    with pytest.raises(CeciliaError, match="did not start"):
        start.measure([sys.executable, "-c", "pass"], start.free_port())


def test_a_server_that_does_not_listen_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "PATIENCE", 0.05)
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it is deaf by now
        start.end(process)
        assert process.returncode == -signal.SIGKILL


def test_a_row_has_medians_and_the_sum_of_both_kinds_of_memory() -> None:
    found = [
        Start(ready, ready + 1, {"RssAnon": anon, "RssFile": file, "VmHWM": 9_000_000})
        for ready, anon, file in (
            (1.0, 2_000_000, 5_000_000),
            (3.0, 4_000_000, 1_000_000),
            (2.0, 3_000_000, 3_000_000),
        )
    ]
    assert start.row("ours", 2, found) == (
        "| ours | 2 | 1.00 / 2.00 / 3.00 | 2.00 / 3.00 / 4.00 | 6 | 3 | 3 | 9 |"
    )
