# SPDX-License-Identifier: Apache-2.0
"""`--check`: one line for each thing a server needs here, with the remedy beside whatever is wrong."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from cecilia.errors import CeciliaError, DeviceError
from server import listen
from server.config import Config

GREEN, RED, PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[0m"

# By error code; what is not listed says in its message what would do.
REMEDIES = {
    "kernels_missing": "compile them: make build",
    "model_not_found": "name a file with --model, or get the default one: make run",
    "no_tokenizer": "convert again, with a tokenizer (tools.convert --tokenizer)",
    "insufficient_memory": "take a smaller --context or another --profile, or end other programs",
    "context_too_large": "take a smaller --context, or leave it out",
    "port_in_use": "end that program, or choose another --port",
    "port_denied": "choose a --port above 1023",
    "address_unavailable": "choose a --host of this machine, e.g. 127.0.0.1",
}
MODEL_REMEDY = "fetch or convert the file again"
OTHER_REMEDY = "see the message"


@dataclass(frozen=True, slots=True)
class Line:
    """One result; `remedy` is set when it is bad."""

    name: str
    fact: str
    remedy: str | None = None


def check(config: Config, show: Callable[[str], object], *, colour: bool) -> int:
    """Run every check; returns 0 when all is well, else 1."""
    bad = 0
    for line in _lines(config):
        bad += line.remedy is not None
        mark, tint = ("ok  ", GREEN) if line.remedy is None else ("FAIL", RED)
        show(
            f"{tint}{mark}{PLAIN} {line.name:<8} {line.fact}"
            if colour
            else f"{mark} {line.name:<8} {line.fact}"
        )
        if line.remedy is not None:
            show(f"     {'':<8} remedy: {line.remedy}")
    return 1 if bad else 0


def _lines(config: Config) -> Iterator[Line]:
    libc = " ".join(platform.libc_ver())
    yield Line("system", f"{platform.machine()}, python {platform.python_version()}, {libc}")
    cpu = _tried("cpu", _cpu, OTHER_REMEDY)
    yield cpu
    if cpu.remedy is None:
        yield from _cores()
    yield _tried("port", lambda: _port(config), OTHER_REMEDY)
    if cpu.remedy is None:
        model = _tried("model", lambda: _model(config), MODEL_REMEDY)
        yield model
        if model.remedy is None:
            yield _tried("load", lambda: _memory(config), OTHER_REMEDY)


def _tried(name: str, run: Callable[[], str], remedy: str) -> Line:
    try:
        return Line(name, run())
    except CeciliaError as error:
        return Line(name, str(error), REMEDIES.get(error.code, remedy))


def _cpu() -> str:
    try:
        from cecilia._kernels import isa
    except ImportError as error:
        raise DeviceError("kernels_missing", f"the kernels cannot be loaded: {error}") from None
    return f"kernels {isa.name()}; this CPU has {' '.join(isa.available())}"


def _cores() -> Iterator[Line]:
    from cecilia.engine import clocks, cpus

    usable = cpus.usable_cpus()
    yield Line("cores", cpus.describe(usable, cpus.cpu_quota()))
    if told := clocks.core_clocks(usable):
        yield Line("clocks", told)
    if told := clocks.memory_clock():
        yield Line("memory", told)


def _port(config: Config) -> str:
    sockets = listen.bind(config.host, config.port)
    address = listen.url(sockets)
    for opened in sockets:
        opened.close()
    return f"{address} is free"


def _model(config: Config) -> str:
    from cecilia.formats.l3r import open_model

    with open_model(config.model, verify=True) as file:
        size = sum(entry.nbytes for entry in file.tensors.values())
        facts: dict[str, Any] = file.metadata
        return (
            f"{config.model}: {facts['architecture']}, weights {facts['weights']}, {size / 2**20:.0f} MiB, "
            f"every digest is right ({file.digest[:12]})"
        )


def _memory(config: Config) -> str:
    """Loading is the check: it adds up what is needed and compares it with what is there."""
    from cecilia.engine import memory
    from cecilia.engine.load import load

    engine = load(
        config.model,
        profile=config.profile,
        context=config.context,
        force_context=config.force_context,
        threads=config.threads,
        weights=config.weights,
    )
    window, threads = engine.context, engine.info["threads"]
    engine.close()
    return f"{memory.available() / 2**20:.0f} MiB available, enough for {window} tokens; {threads} threads"
