# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.bench.start FILE.l3r FILE.gguf`: from starting a server to its first token; its memory.

This server beside llama-server on the same weights, in turns, files in the page cache. Times count from the
start of the process: until /health answers 200, and until the first piece of an answer to a prompt of a few
tokens that is sent then. Memory is looked at after a prompt of PROMPT tokens, once it no longer changes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cecilia.errors import CeciliaError
from tools.bench import ours, report, system
from tools.bench.peer_build import LLAMA_CPP, program

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0
POLL_SECONDS = 0.01
SETTLED_SECONDS = 2.0
WINDOW = 2048
PROMPT = 512
MB = 1e6


@dataclass(frozen=True)
class Start:
    """Seconds until ready and until the first token; bytes resident afterwards, by kind, and their peak."""

    ready: float
    first: float
    memory: dict[str, int]


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def our_command(model: Path, threads: int, port: int) -> list[str]:
    """`python -m server`."""
    options = {"model": model, "threads": threads, "port": port, "context": WINDOW}
    return [sys.executable, "-m", "server", *(f"--{name}={value}" for name, value in options.items())]


def peer_command(bench: Path, model: Path, threads: int, port: int) -> list[str]:
    """llama-server with one slot, otherwise as it comes."""
    options = ["-m", str(model), "-t", str(threads), "--port", str(port), "-c", str(WINDOW), "-np", "1"]
    return ["env", f"LD_LIBRARY_PATH={bench.parent}", str(bench), *options]


def is_ready(port: int) -> bool:
    """Whether /health answers 200."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        link.request("GET", "/health")
        return link.getresponse().status == 200
    except ConnectionError:
        return False
    finally:
        link.close()


def first_piece(port: int, text: str) -> None:
    """Ask for one token and wait until a piece of the answer has come. Raises CeciliaError `bench_failed`."""
    message = {"role": "user", "content": text}
    body = json.dumps({"messages": [message], "max_tokens": 1, "stream": True})
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        link.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = link.getresponse()
        for line in answer:
            if line.startswith(b"data: {") and _has_token(json.loads(line[6:])):
                return
        raise CeciliaError("bench_failed", f"{answer.status}: an answer without a token")
    finally:
        link.close()


def _has_token(chunk: dict[str, list[dict[str, str | dict[str, str] | None]]]) -> bool:
    """Whether text or the end has come: a token of half a letter has no text of its own."""
    choice = chunk["choices"][0]
    delta = choice["delta"]
    return bool(choice["finish_reason"]) or (
        isinstance(delta, dict) and bool(delta.get("content") or delta.get("reasoning_content"))
    )


def settled_memory(pid: int) -> dict[str, int]:
    """Bytes by kind, once the resident ones stand still."""
    before: dict[str, int] = {}
    while (now := system.memory_kib(pid)) != before:
        before = now
        time.sleep(SETTLED_SECONDS)
    return {name: kib * 1024 for name, kib in now.items()}


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a server to end, and make it end when it does not listen."""
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def measure(command: Sequence[str], port: int) -> Start:
    """Start a server, use it, end it. Raises CeciliaError `bench_failed`."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    try:
        while not is_ready(port):
            if process.poll() is not None or time.perf_counter() - begun > PATIENCE:
                raise CeciliaError("bench_failed", f"the server did not start: {' '.join(command)}")
            time.sleep(POLL_SECONDS)
        ready = time.perf_counter() - begun
        first_piece(port, "hello")
        first = time.perf_counter() - begun
        first_piece(port, "a" * PROMPT)
        return Start(ready, first, settled_memory(process.pid))
    finally:
        end(process)


def row(name: str, threads: int, found: Sequence[Start]) -> str:
    """Of the Markdown table."""
    times = (report.spread([s.ready for s in found], 2), report.spread([s.first for s in found], 2))
    kinds = [[s.memory[kind] for s in found] for kind in ("RssAnon", "RssFile", "VmHWM")]
    resident = statistics.median(a + f for a, f in zip(kinds[0], kinds[1], strict=True))
    cells = (resident, *(statistics.median(kind) for kind in kinds))
    return f"| {name} | {threads} | {' | '.join(times)} | {' | '.join(f'{c / MB:.0f}' for c in cells)} |"


def table(args: argparse.Namespace) -> list[str]:
    """Both servers in turns."""
    bench = program(LLAMA_CPP, args.llama_cpp_build, "llama-server")
    heads = ("server", "threads", "ready, s", "first token, s", "resident, MB", "anonymous", "file", "peak")
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for threads in args.threads:
        found: dict[str, list[Start]] = {"ours": [], "llama-server": []}
        for _ in range(args.rounds):
            port = free_port()
            found["ours"].append(measure(our_command(args.model, threads, port), port))
            port = free_port()
            found["llama-server"].append(measure(peer_command(bench, args.gguf, threads, port), port))
        rows += [row(name, threads, starts) for name, starts in found.items()]
    return rows


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m tools.bench.start", description="Start and memory.")
    found.add_argument("model", type=Path, metavar="FILE.l3r")
    found.add_argument("gguf", type=Path, metavar="FILE.gguf")
    found.add_argument("--llama-cpp-build", type=Path, metavar="DIR", help="DIR/bin/llama-server is there")
    found.add_argument("--threads", type=ours.numbers, default=[1, 2], metavar="N,N")
    found.add_argument("--rounds", type=ours.times, default=3)
    report.add_log_option(found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, append to docs/BENCH.md; exit codes are those of cecilia.errors."""
    args = parser().parse_args(argv)
    raised = system.raise_priority()
    facts = [
        f"`{report.command('tools.bench.start', argv)}`",
        f"{os.stat(args.model).st_size / MB:.0f} MB and {os.stat(args.gguf).st_size / MB:.0f} MB of weights",
        f"a prompt of {PROMPT} tokens in a window of {WINDOW}",
        f"priority {'raised' if raised else 'normal'}",
        "min / median / max",
    ]
    try:
        body = table(args)
    except CeciliaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    report.publish(report.section("from start to the first token", facts, body), no_log=args.no_log)
    return 0


if __name__ == "__main__":
    sys.exit(main())
