# SPDX-License-Identifier: Apache-2.0
"""Disconnect storm: a live server, clients that leave at every point, and a look for what they left behind.

After the first requests the server must hold the same number of file descriptors and threads at the end, must
not have grown, and after every client that left the next one must be served. Exit code 1 when not.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL = "models/smollm2-135m-instruct.l3r"
PATIENCE = 60.0
"""Seconds to wait for an answer, or for the slot, before calling it lost."""
GROWTH_KIB = 5 * 1024
QUESTIONS = ("2 + 3 = ?", "Name three rivers.", "Write a line about rain.", "What is a board?")


class SoakError(Exception):
    """The server did not do what it must."""


@dataclass(frozen=True)
class Held:
    """What a process holds, from /proc."""

    descriptors: int
    threads: int
    rss_kib: int

    @classmethod
    def of(cls, pid: int) -> Held:
        status = Path(f"/proc/{pid}/status").read_text()
        numbers = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+)", status, re.M)}
        return cls(len(list(Path(f"/proc/{pid}/fd").iterdir())), numbers["Threads"], numbers["VmRSS"])

    def __str__(self) -> str:
        return f"{self.descriptors} descriptors, {self.threads} threads, {self.rss_kib / 1024:.1f} MiB"


class Server:
    """`python -m server` on a free port; its log is kept for the case of failure."""

    def __init__(self, model: str, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "server", "--port", "0", "--model", model, *arguments]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._ready = threading.Event()
        self.log: list[str] = []
        self.address = ("", 0)
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        if not self._ready.wait(PATIENCE) or not self.address[1]:
            self.stop()
            raise SoakError("the server did not start: " + "".join(self.log[-3:]).strip())

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self.log.append(line)
                if found := re.search(r"^service_ready address=http://([^ :]+):(\d+)", line):
                    self.address = (found[1], int(found[2]))
                    self._ready.set()
        self._ready.set()

    def stop(self) -> int:
        """Ask it to end; returns the exit code."""
        self._process.terminate()
        code = self._process.wait(PATIENCE)
        self._reader.join()
        return code


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    """One connection, on a plain socket so that it can misbehave."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, timeout=PATIENCE)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self) -> bytes:
        return self._socket.recv(65536)

    def finish(self) -> Answer:
        """Read to the end; the request has asked for `Connection: close`."""
        data = b""
        while piece := self.receive():
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        if not lines[0].startswith("HTTP/1.1 "):
            raise SoakError(f"no answer, but {data[:80]!r}")
        return Answer(int(lines[0].split()[1]), headers, body)

    def half_close(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()

    def reset(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


def request(*, stream: bool, tokens: int, text: str) -> tuple[bytes, bytes]:
    """The head and the body of a chat request."""
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "stream": stream,
    }
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode(), body


class Storm:
    """Clients of every kind, drawn from one seed."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self._random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.longest_wait = 0.0

    def one(self) -> None:
        """One client; when it has left in the middle, the next one must be served."""
        kind = self._random.choice(
            ("whole", "streamed", "half-closed", "too long", "head", "body", "sent", "prefill", "mid-stream")
        )
        if kind in ("whole", "streamed", "half-closed"):
            self._complete(kind)
        elif kind == "too long":
            self._too_long()
        else:
            self._leave(kind)
            self._complete("next")

    def _complete(self, kind: str) -> None:
        """A request that must be answered; while the slot is taken, wait as long as the server says."""
        stream = kind in ("streamed", "half-closed")
        started = time.monotonic()
        while True:
            head, body = request(stream=stream, tokens=self._random.randint(1, 6), text=self._question())
            client = Client(self._server.address)
            client.send(head + body)
            if kind == "half-closed":
                client.half_close()
            answer = client.finish()
            client.close()
            waited = time.monotonic() - started
            if answer.status != 429:
                break
            if waited > PATIENCE:
                raise SoakError(f"still busy after {waited:.0f} s: the slot was never given back")
            time.sleep(min(int(answer.headers["retry-after-ms"]) / 1000, int(answer.headers["retry-after"])))
        self.longest_wait = max(self.longest_wait, waited)
        self._check(answer, stream=stream)
        self.outcomes[kind] += 1

    def _check(self, answer: Answer, *, stream: bool) -> None:
        if answer.status != 200:
            raise SoakError(f"{answer.status}: {answer.body[:200]!r}")
        if stream and not answer.body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            raise SoakError(f"a stream without its end: {answer.body[-80:]!r}")
        if not stream and json.loads(answer.body)["choices"][0]["finish_reason"] not in ("stop", "length"):
            raise SoakError("an answer without a finish_reason")

    def _too_long(self) -> None:
        """A body large enough to be parsed off the event loop, for a prompt that no window takes."""
        head, body = request(stream=False, tokens=1, text="word " * 20_000)
        client = Client(self._server.address)
        client.send(head + body)
        answer = client.finish()
        client.close()
        if answer.status not in (400, 429):
            raise SoakError(f"a prompt that cannot fit was answered with {answer.status}")
        self.outcomes["too long"] += 1

    def _leave(self, kind: str) -> None:
        stream = kind in ("prefill", "mid-stream") or self._random.random() < 0.5
        long = kind == "prefill"
        text = self._question() * (self._random.randint(10, 30) if long else 1)
        head, body = request(stream=stream, tokens=self._random.randint(8, 40), text=text)
        client = Client(self._server.address)
        if kind == "head":
            client.send(head[: self._random.randrange(1, len(head))])
        elif kind == "body":
            client.send(head + body[: self._random.randrange(len(body))])
        else:
            client.send(head + body)
        if kind == "prefill":
            client.receive()
        elif kind == "mid-stream":
            for _ in range(self._random.randint(1, 8)):
                if not client.receive():
                    break
        how = self._random.choice(("reset", "close"))
        if how == "reset":
            client.reset()
        else:
            client.close()
        self.outcomes[f"{kind} {how}"] += 1

    def _question(self) -> str:
        return self._random.choice(QUESTIONS)


def settled(pid: int, descriptors: int) -> Held:
    """What the process holds; waits a little for it to notice the connections that were left."""
    end = time.monotonic() + 5.0
    while (held := Held.of(pid)).descriptors != descriptors and time.monotonic() < end:
        time.sleep(0.05)
    return held


def soak(server: Server, *, requests: int, warm_up: int, seed: int) -> list[str]:
    """Run the storm; returns complaints."""
    storm = Storm(server, seed)
    idle = Held.of(server.pid)
    print(f"idle            {idle}", flush=True)
    first: Held | None = None
    started = time.monotonic()
    for count in range(1, requests + 1):
        storm.one()
        if count == warm_up:
            first = settled(server.pid, idle.descriptors)
            print(f"after {count:<9} {first}", flush=True)
    assert first is not None
    last = settled(server.pid, first.descriptors)
    print(f"after {requests:<9} {last}")
    print(f"{time.monotonic() - started:.0f} s; longest wait for a slot {storm.longest_wait:.2f} s")
    for kind, times in sorted(storm.outcomes.items()):
        print(f"  {kind:<20} {times}")
    return complaints(first, last)


def complaints(first: Held, last: Held) -> list[str]:
    """What `last` holds more of than it may."""
    found = []
    if last.descriptors != first.descriptors:
        found.append(f"descriptors went from {first.descriptors} to {last.descriptors}")
    if last.threads != first.threads:
        found.append(f"threads went from {first.threads} to {last.threads}")
    if last.rss_kib - first.rss_kib >= GROWTH_KIB:
        found.append(f"memory grew by {(last.rss_kib - first.rss_kib) / 1024:.1f} MiB")
    return found


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL, help=f"model file (default: {MODEL})")
    parser.add_argument("--requests", type=int, default=1000, help="how many clients (default: 1000)")
    parser.add_argument(
        "--warm-up", type=int, default=200, help="clients before the first count (default: 200)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the draw of clients (default: 1)")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of the server (default: 1)")
    options = parser.parse_args()
    if not 1 <= options.warm_up <= options.requests:
        parser.error("--warm-up must be from 1 to --requests")
    server = None
    try:
        server = Server(options.model, ["--threads", str(options.threads)])
        found = soak(server, requests=options.requests, warm_up=options.warm_up, seed=options.seed)
    except (SoakError, OSError) as error:
        found = [str(error)]
    if server is not None and (code := server.stop()) != 0:
        found.append(f"the server ended with exit code {code}")
    for complaint in found:
        print(f"FAIL {complaint}")
    if found and server is not None:
        print("last lines of the server's log:", *server.log[-5:], sep="\n  ")
    print("failed" if found else "ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
