# SPDX-License-Identifier: Apache-2.0
"""`python -m portable.verify FOLDER --model FILE.l3r`: try a built bundle on an empty machine. Needs root.

It reads every binary's needs; then, in a root that holds the bundle, a static shell and the model alone,
imports every module, checks the digests, serves a streamed chat and ends by SIGTERM; does the same from the
single file; and breaks copies of the bundle to see that each is refused in one sentence.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cecilia.errors import CeciliaError
from portable import debian
from portable.audit import audit
from portable.machine import Machine
from portable.target import TARGETS, Target, native

ROOT = Path(__file__).resolve().parent.parent
_READY_SECONDS, _STOP_SECONDS = 300, 30
_QUESTION = {
    "messages": [{"role": "user", "content": "2 + 3 = ?"}],
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}
_IMPORT_ALL = """\
import importlib, pkgutil, sys
names = [found.name for top in ("cecilia", "server", "tools")
         for found in pkgutil.walk_packages(importlib.import_module(top).__path__, top + ".")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
import gguf, safetensors
left_out = {"huggingface_hub", "requests"} & sys.modules.keys()
assert not left_out, left_out
print(len(names))
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run every trial, print one line for each; 0 when all went well."""
    parser = argparse.ArgumentParser(prog="python -m portable.verify", description="Try a built bundle.")
    parser.add_argument("bundle", type=Path, help="the folder in portable/dist")
    parser.add_argument("--model", type=Path, required=True, help="a .l3r file that chats")
    parser.add_argument("--work", type=Path, default=ROOT / "build/portable", help="default: build/portable")
    args = parser.parse_args(argv)
    try:
        for name, fact in verify(args.bundle.resolve(), args.model.resolve(), args.work.resolve()):
            print(f"ok   {name:<12} {fact}", flush=True)
    except CeciliaError as error:
        print(f"FAIL {error}", file=sys.stderr)
        return error.exit_code
    return 0


def verify(bundle: Path, model: Path, work: Path) -> Iterator[tuple[str, str]]:
    """(trial, what was seen) of each; CeciliaError `verify_failed` for the first that goes wrong."""
    target = _target_of(bundle)
    yield "binaries", _audit(bundle, target)
    with empty_machine(target, work) as machine:
        _put_model(machine, model)
        yield "imports", _imports(machine, bundle)
        yield "digests", _check(machine, bundle)
        yield "serves", _serves(machine, bundle, f"{Machine.BUNDLE}/cecilia-server")
        yield from _broken(machine, bundle)
        single = bundle.with_name(bundle.name + ".run")
        if single.is_file():
            shutil.copy(single, machine.root / "opt/cecilia.run")
            yield "single file", _serves(machine, bundle, "/opt/cecilia.run") + " at first"
            yield "single file", _serves(machine, bundle, "/opt/cecilia.run") + " later"
            yield "single file", _flipped_single(machine, bundle)


def _target_of(bundle: Path) -> Target:
    for name, target in TARGETS.items():
        if name in bundle.name:
            return target
    raise CeciliaError("verify_failed", f"{bundle.name} names no architecture")


@contextmanager
def empty_machine(target: Target, work: Path) -> Iterator[Machine]:
    """A machine that is gone at the end; `work` keeps the package its shell comes from."""
    apt = debian.Apt(work / "apt")
    apt.update()
    busybox = debian.unpack(apt.download(["busybox-static"], native()), work / "roots") / "bin/busybox"
    with tempfile.TemporaryDirectory(prefix="cecilia-machine-") as folder:
        yield Machine(Path(folder) / "root", target, busybox=busybox)


def _put_model(machine: Machine, model: Path) -> None:
    for folder in ("models", "opt/models"):
        (machine.root / folder).mkdir(parents=True)
        shutil.copy(model, machine.root / folder / model.name)


def _audit(bundle: Path, target: Target) -> str:
    found = audit(bundle, target)
    _require(not found.complaints, "; ".join(found.complaints))
    highest = ".".join(map(str, found.highest_glibc))
    return f"{found.binaries}, all they need is inside; highest glibc symbol {highest}, of {found.asked_by}"


def _imports(machine: Machine, bundle: Path) -> str:
    done = machine.run(bundle, ["/opt/bundle/bin/python", "-c", _IMPORT_ALL])
    _require(done.returncode == 0, done.stderr.strip().splitlines()[-1:] and done.stderr.strip())
    return f"{done.stdout.strip()} modules, neither huggingface_hub nor requests"


def _check(machine: Machine, bundle: Path) -> str:
    command = ["/opt/bundle/cecilia-server", "--check", "--port", "0", "--threads", "1"]
    done = machine.run(bundle, command, {"CECILIA_MODELS": "/models"})
    _require(done.returncode == 0, done.stdout + done.stderr)
    return f"{len(done.stdout.splitlines())} lines of --check are all ok"


@dataclass(frozen=True, slots=True)
class _Run:
    """A server that has said where it listens."""

    process: subprocess.Popen[str]
    port: int
    seconds: float


@contextmanager
def _served(machine: Machine, bundle: Path, program: str) -> Iterator[_Run]:
    started = time.monotonic()
    command = [program, "--port", "0", "--threads", "1"]
    with machine.start(bundle, command, {"CECILIA_MODELS": "/models"}) as process:
        try:
            port = _port(process, started)
            yield _Run(process, port, time.monotonic() - started)
        finally:
            process.kill()


def _port(process: subprocess.Popen[str], started: float) -> int:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if match := re.match(r"service_ready address=http://[\d.]+:(\d+)", line):
            return int(match[1])
        _require(time.monotonic() - started < _READY_SECONDS, "not ready in time")
    raise CeciliaError("verify_failed", f"the server ended: {''.join(lines).strip()}")


def _serves(machine: Machine, bundle: Path, program: str) -> str:
    """Start, ask, stop; the times hold for this machine only, and under an emulator for none."""
    with _served(machine, bundle, program) as server:
        text, chunks = _chat(server.port)
        _require("5" in text, f"2 + 3 was answered with {text!r}")
        server.process.send_signal(signal.SIGTERM)
        _, rest = server.process.communicate(timeout=_STOP_SECONDS)
        _require(server.process.returncode == 0, f"SIGTERM: exit code {server.process.returncode}: {rest}")
        _require("service_stopped clean=True" in rest, f"it did not stop cleanly: {rest}")
    return f"ready in {server.seconds:.2f} s, {chunks} chunks: {text!r}, stopped cleanly"


def _chat(port: int) -> tuple[str, int]:
    """The streamed answer and the number of its chunks."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_READY_SECONDS)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(_QUESTION))
        response = connection.getresponse()
        body = response.read().decode("utf-8")
    finally:
        connection.close()
    _require(response.status == 200, f"{response.status}: {body}")
    *data, done = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
    _require(done == "[DONE]", f"the stream ends with {done!r}")
    chunks: list[dict[str, Any]] = [json.loads(line) for line in data]
    pieces = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    _require(bool(chunks[-1].get("usage")), "the last chunk has no usage")
    return "".join(pieces), len(chunks)


def _broken(machine: Machine, bundle: Path) -> Iterator[tuple[str, str]]:
    """Refusals of a copy with one fault each, by the one line they print."""
    copy = machine.root.parent / "broken"
    shutil.copytree(bundle, copy, symlinks=True)
    victim = copy / "site/numpy/__init__.pyc"
    whole = victim.read_bytes()
    victim.unlink()
    yield "lacks a file", _refusal(machine, copy, "damaged_bundle", [])
    victim.write_bytes(_flipped(whole))
    yield "flipped byte", _refusal(machine, copy, "damaged_bundle", ["--check"])
    victim.write_bytes(whole)
    # Another architecture's bundle is refused without its emulator; this one's where the kernel says 32 bits.
    without = {"CECILIA_RUNNER": ""}
    yield "wrong machine", _refusal(machine, copy, "wrong_architecture", [], without, through=("linux32",))


def _flipped_single(machine: Machine, bundle: Path) -> str:
    file = machine.root / "opt/cecilia.run"
    file.write_bytes(_flipped(file.read_bytes()))
    done = machine.run(bundle, ["/opt/cecilia.run", "--extract", "/tmp/extracted"])
    return _one_line(done, "damaged_file")


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def _refusal(
    machine: Machine,
    bundle: Path,
    code: str,
    flags: list[str],
    environment: dict[str, str] | None = None,
    through: Sequence[str] = (),
) -> str:
    environment = {"CECILIA_MODELS": "/models", **(environment or {})}
    command = [f"{Machine.BUNDLE}/cecilia-server", *flags]
    return _one_line(machine.run(bundle, command, environment, through=through), code)


def _one_line(done: subprocess.CompletedProcess[str], code: str) -> str:
    lines = (done.stdout + done.stderr).splitlines()
    right = done.returncode != 0 and len(lines) == 1 and lines[0].startswith(f"error: {code}: ")
    _require(right, f"exit code {done.returncode}, it said: {lines}")
    return f"refused: {lines[0]}"


def _require(condition: object, otherwise: object) -> None:
    if not condition:
        raise CeciliaError("verify_failed", str(otherwise))


if __name__ == "__main__":
    sys.exit(main())
