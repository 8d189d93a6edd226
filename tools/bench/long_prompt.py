# SPDX-License-Identifier: Apache-2.0
"""A prompt of tens of thousands of tokens through a live server: speed, memory, progress, and giving up.

    python -m tools.bench.long_prompt MODEL.l3r --tokens 32768 [--profile int8-v1 --threads 2]

Memory is compared with what the server says that its pages and checkpoints take. A second prompt is given up
in the middle: until the server is free again a chunk of the prompt may pass, and no more.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cecilia.engine.load import DEFAULT_CHUNK
from cecilia.engine.recipes import DEFAULT_PROFILE
from cecilia.engine.window import cache_costs
from cecilia.errors import CeciliaError
from tools.bench import report
from tools.soak import PATIENCE, Client, Held, Server, SoakError, request

POLL_SECONDS = 0.5
TEMPLATE_TOKENS = 256  # room for the chat template and the answer
ANSWER = 4
MIB = 1 << 20


@dataclass(frozen=True)
class Sample:
    """One look at the server: seconds since the request, prompt tokens read, bytes that are resident and that
    are kept of tokens, in pages and checkpoints."""

    seconds: float
    read: int
    resident: int
    kept: int


def text_of(tokens: int, seed: int) -> str:
    """Random letters, one token each for a byte tokenizer; no two seeds share a prefix worth reusing."""
    return "".join(random.Random(seed).choices(string.ascii_letters, k=tokens))


def health(server: Server) -> dict[str, Any]:
    """What /health says."""
    return get(server, "/health")


def get(server: Server, path: str) -> dict[str, Any]:
    """The JSON object at `path`."""
    client = Client(server.address)
    client.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    try:
        found: dict[str, Any] = json.loads(client.finish().body)
    finally:
        client.close()
    return found


def settled(server: Server) -> int:
    """Resident bytes of an idle server once its weights have stopped moving into huge pages."""
    before, now = -1, Held.of(server.pid).rss_kib
    while before != now:
        time.sleep(2.0)
        before, now = now, Held.of(server.pid).rss_kib
    return now * 1024


def ask(server: Server, tokens: int, seed: int) -> Client:
    """Send the prompt; the answer streams. Raises SoakError when the server does not take it."""
    head, body = request(stream=True, tokens=ANSWER, text=text_of(tokens, seed))
    client = Client(server.address)
    client.send(head + body)
    sent = time.monotonic()
    while "generation" not in health(server):  # it is not there at once
        if time.monotonic() - sent > PATIENCE:
            client.close()
            raise SoakError("the server did not take the prompt: " + "".join(server.log[-1:]).strip())
        time.sleep(0.005)
    return client


def watch(server: Server, total: int) -> Iterator[Sample]:
    """Looks at the server until the prompt is read."""
    started = time.monotonic()
    while (generation := health(server).get("generation")) is not None:
        seconds = time.monotonic() - started
        left, begun = int(generation["prompt_left"]), generation["prompt_left"] or generation["completion"]
        if begun:  # the prompt has been made into tokens
            kept = get(server, "/engine/v1/memory")["cache"]["allocated_bytes"]
            yield Sample(seconds, total - left, Held.of(server.pid).rss_kib * 1024, int(kept))
        if begun and left == 0:
            return
        time.sleep(POLL_SECONDS)


def comments(stream: bytes) -> list[str]:
    """The SSE comments in what a client received."""
    return [line[1:].decode().strip() for line in stream.split(b"\n") if line.startswith(b":")]


def read_whole(server: Server, tokens: int) -> tuple[list[Sample], list[str]]:
    """One prompt to its end: samples, and the comments the client saw."""
    client = ask(server, tokens, seed=1)
    samples = list(watch(server, tokens))
    answer = client.finish()
    client.close()
    if answer.status != 200 or b"[DONE]" not in answer.body:
        raise SoakError(f"{answer.status}: {answer.body[-200:]!r}")
    return samples, comments(answer.body)


def give_up(server: Server, tokens: int) -> float:
    """Leave in the middle of a prompt; seconds until the server is free."""
    client = ask(server, tokens, seed=2)
    for sample in watch(server, tokens):
        if sample.read >= min(tokens // 4, 8 * DEFAULT_CHUNK):
            break
    client.reset()
    left = time.monotonic()
    while "generation" in health(server):
        time.sleep(0.005)
    return time.monotonic() - left


def table(samples: Sequence[Sample], tokens: int, idle: int) -> list[str]:
    """An eighth of the prompt a row; memory beyond the idle server and what is kept of the tokens read."""
    names = ("read", "seconds", "tok/s since the row before", "resident MiB", "kept MiB", "beyond both MiB")
    rows = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    before = Sample(0.0, 0, idle, 0)
    for eighth in range(1, 9):
        reached = [sample for sample in samples if sample.read >= tokens * eighth // 8]
        if not reached or reached[0] == before:
            continue
        now = reached[0]
        speed = (now.read - before.read) / max(now.seconds - before.seconds, 1e-9)
        beyond = now.resident - idle - now.kept
        memory = " | ".join(f"{nbytes / MIB:.0f}" for nbytes in (now.resident, now.kept, beyond))
        rows.append(f"| {now.read} | {now.seconds:.1f} | {speed:.1f} | {memory} |")
        before = now
    return rows


def measure(args: argparse.Namespace) -> str:
    """The section for docs/BENCH.md. Raises CeciliaError and SoakError."""
    window = args.tokens + TEMPLATE_TOKENS
    cost = cache_costs(args.model, window)["recipes"][args.profile]["bytes_per_token"]
    options = ["--profile", args.profile, "--threads", str(args.threads), "--context", str(window)]
    server = Server(str(args.model), options)
    try:
        idle = settled(server)
        samples, said = read_whole(server, args.tokens)
        seconds = give_up(server, args.tokens)
    finally:
        server.stop()
    chunk = DEFAULT_CHUNK / (samples[-1].read / samples[-1].seconds)
    facts = [f"`{report.command('tools.bench.long_prompt', args.argv)}`", f"{cost} bytes of cache a token"]
    body = [
        *table(samples, args.tokens, idle),
        "",
        f"- the client saw {len(said)} comments, among them `{said[len(said) // 2] if said else 'none'}`",
        f"- given up in the middle of a prompt: free after {seconds:.2f} s; "
        f"a chunk of {DEFAULT_CHUNK} tokens takes about {chunk:.2f} s",
    ]
    title = f"a prompt of {args.tokens} tokens, {args.model.stem}"
    return report.section(title, facts, body)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, append to docs/BENCH.md; exit codes: those of cecilia.errors, 1 for a lost server."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.long_prompt", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model", type=Path, metavar="FILE.l3r")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--profile", default=DEFAULT_PROFILE)
    parser.add_argument("--threads", type=int, default=2)
    report.add_log_option(parser)
    args = parser.parse_args(argv)
    args.argv = argv
    try:
        text = measure(args)
    except CeciliaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (SoakError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    report.publish(text, no_log=args.no_log)
    return 0


if __name__ == "__main__":
    sys.exit(main())
