# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.sse_client "question"`: a small client that shows how acknowledged streams are read.

It acknowledges what it has printed and adapts its window: half as wide while the reader is waited for, twice
as wide while the model is. On a terminal, p pauses, r resumes and q cancels.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import termios
import threading
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

FIRST_WINDOW, LARGEST_WINDOW = 4, 256
KEYS = {"p": "generation/pause", "r": "generation/resume", "q": "cancel"}


class Client:
    """One server."""

    def __init__(self, base_url: str) -> None:
        found = urlsplit(base_url)
        self._address = (found.hostname or "127.0.0.1", found.port or 80)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and JSON of a short request."""
        connection = http.client.HTTPConnection(*self._address, timeout=30)
        try:
            connection.request("POST", path, json.dumps(body))
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def stream(self, body: dict[str, Any]) -> Stream:
        """Ask for a streamed answer. Raises RuntimeError with the server's error."""
        return Stream(self, self._address, body)


class Stream:
    """A streamed answer, to be iterated over once: pieces of text, acknowledged when the next is asked for.

    `window` adapts between 1 and LARGEST_WINDOW. `id` is that of the generation, `last` the last chunk.
    """

    def __init__(self, client: Client, address: tuple[str, int], body: dict[str, Any]) -> None:
        self.window = FIRST_WINDOW
        self.last: dict[str, Any] = {}
        self._client = client
        self._connection = http.client.HTTPConnection(*address, timeout=None)
        flow = {"stream": True, "flow": {"mode": "ack", "window": self.window}}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body | flow))
        self._response = self._connection.getresponse()
        if self._response.status != 200:
            answer = json.loads(self._response.read())
            self.close()
            raise RuntimeError(answer["error"]["message"])
        self.id = self._response.headers["X-Cecilia-Generation-Id"]

    def __iter__(self) -> Iterator[str]:
        try:
            for chunk in self._chunks():
                self.last = chunk
                yield "".join(_text(choice["delta"]) for choice in chunk.get("choices", ()))
                seq = chunk.get("cecilia", {}).get("seq")
                if seq is not None:
                    self.acknowledge(seq)
        finally:
            self.close()

    def acknowledge(self, seq: int) -> None:
        """Tell the server that everything up to `seq` is printed, and what may be under way from now on."""
        _, answer = self._client.post(
            "/engine/v1/flow/ack", {"generation_id": self.id, "seq": seq, "window": self.window}
        )
        # All credit in use means that the reader is what it waits for; none in use, that the model is.
        waiting = answer.get("sent_seq", seq) - seq
        if waiting >= self.window:
            self.window = max(self.window // 2, 1)
        elif waiting == 0:
            self.window = min(self.window * 2, LARGEST_WINDOW)

    def press(self, key: str) -> None:
        """Pause, resume or cancel; other keys do nothing."""
        if key in KEYS:
            self._client.post(f"/engine/v1/{KEYS[key]}", {"generation_id": self.id})

    def close(self) -> None:
        """Hang up, which cancels what is not finished."""
        self._response.close()
        self._connection.close()

    def _chunks(self) -> Iterator[dict[str, Any]]:
        for raw in iter(self._response.readline, b""):
            line = raw.decode().strip()
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                yield chunk


def _text(delta: dict[str, Any]) -> str:
    return (delta.get("reasoning_content") or "") + (delta.get("content") or "")


@contextmanager
def keys(stream: Stream) -> Iterator[None]:
    """Give the keys pressed on a terminal to `stream`, which may be silent meanwhile."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    threading.Thread(target=_press_all, args=(stream,), daemon=True).start()
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _press_all(stream: Stream) -> None:
    for key in iter(lambda: sys.stdin.read(1), ""):
        stream.press(key)


def main(argv: Sequence[str] | None = None) -> int:
    """Print an answer as it comes; 1 when the server refuses."""
    parser = argparse.ArgumentParser(prog="python -m tools.sse_client", description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--base-url", default="http://127.0.0.1:9091")
    parser.add_argument("--session-id")
    args = parser.parse_args(argv)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": args.question}]}
    if args.session_id is not None:
        body["session_id"] = args.session_id
    try:
        stream = Client(args.base_url).stream(body)
        with keys(stream):
            for piece in stream:
                print(piece, end="", flush=True)
        print()
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
