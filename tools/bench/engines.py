# SPDX-License-Identifier: Apache-2.0
"""The engines of the side-by-side benches: how each is started, and what its answer means.

Every run is a fresh process that times a list of tests and reports tokens/s by their names: `prefill 512`,
`decode 1024` (32 tokens behind 1,024 others).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cecilia.errors import CeciliaError
from tools.bench import ours, system
from tools.bench.peer_build import IK_LLAMA_CPP, LLAMA_CPP, Recipe, program

ROOT = Path(__file__).resolve().parents[2]
SAMPLE_SECONDS = 0.05
PROMPT = 512

Speeds = dict[str, float]


@dataclass(frozen=True)
class Finished:
    """A process that ended well: its output, how long it ran, its peak memory in KiB."""

    stdout: str
    stderr: str
    seconds: float
    peak_kib: dict[str, int]


@dataclass(frozen=True)
class Pair:
    """The same weights for both kinds of engine."""

    model: Path
    gguf: Path


class Engine(Protocol):
    """One contender."""

    @property
    def name(self) -> str: ...

    def speeds(self, pair: Pair, threads: int, prefill: Sequence[int], depths: Sequence[int]) -> Speeds:
        """Time the tests once. Raises CeciliaError `bench_failed`."""

    def facts(self, pair: Pair) -> str:
        """What it really used, its start from a run of one token, its memory from a prompt of PROMPT."""


def watch(command: Sequence[str]) -> Finished:
    """Run a command and sample its memory. Raises CeciliaError `bench_failed`, with how it ended."""
    peak: dict[str, int] = {}
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT)
        while process.poll() is None:
            for name, kib in system.memory_kib(process.pid).items():
                peak[name] = max(kib, peak.get(name, 0))
            time.sleep(SAMPLE_SECONDS)
        seconds = time.perf_counter() - start
        out.seek(0)
        err.seek(0)
        texts = out.read(), err.read()
    if process.returncode:
        last = (texts[1].strip().splitlines() or [""])[-1]
        raise CeciliaError("bench_failed", f"{command[0]} ended with {process.returncode}: {last}")
    return Finished(*texts, seconds, peak)


@dataclass(frozen=True)
class Ours:
    """This engine, through `tools.bench.ours`."""

    profile: str
    name: str = "ours"

    def _run(self, pair: Pair, threads: int, prefill: Sequence[int], depths: Sequence[int]) -> Finished:
        command = [sys.executable, "-m", "tools.bench.ours", str(pair.model), "--json", "--repeats=1"]
        command += [f"--threads={threads}", f"--profile={self.profile}"]
        return watch([*command, f"--prefill={_list(prefill)}", f"--depths={_list(depths)}"])

    def speeds(self, pair: Pair, threads: int, prefill: Sequence[int], depths: Sequence[int]) -> Speeds:
        """See Engine."""
        told = json.loads(self._run(pair, threads, prefill, depths).stdout)
        return {name: values[0] for name, values in told["speed"].items()}

    def facts(self, pair: Pair) -> str:
        """See Engine."""
        run = self._run(pair, 2, [1], [])
        told = json.loads(run.stdout)
        load, first = told["load_seconds"], told["first_token_seconds"]
        start = f"load {load:.2f} s, first token after {load + first:.2f} s, process {run.seconds:.1f} s"
        memory = _memory(self._run(pair, 2, [PROMPT], []).peak_kib)
        return f"{told['isa']}, {told['profile']}; {start}; {memory}"


@dataclass(frozen=True)
class Peer:
    """A llama-bench. `switches` are its best ones."""

    name: str
    recipe: Recipe
    build: Path | None
    switches: tuple[str, ...] = ()
    combined: bool = False
    """Whether one process takes all tests, those at depth as `-gp P,N`; else these have their own, `-d P`."""

    def _command(self, pair: Pair, threads: int) -> list[str]:
        bench = program(self.recipe, self.build)
        library = f"LD_LIBRARY_PATH={bench.parent}"
        told = ["-m", str(pair.gguf), "-t", str(threads), "-r", "1", "-o", "json", *self.switches]
        return ["env", library, str(bench), *told]

    def speeds(self, pair: Pair, threads: int, prefill: Sequence[int], depths: Sequence[int]) -> Speeds:
        """See Engine."""
        found: Speeds = {}
        for tests in self._tests(prefill, depths):
            found |= peer_speeds(watch([*self._command(pair, threads), *tests]).stdout)
        return found

    def _tests(self, prefill: Sequence[int], depths: Sequence[int]) -> list[list[str]]:
        """The arguments of each process that is needed."""
        prompts = ["-p", _list(prefill) if prefill else "0", "-n", "0"]
        if self.combined:
            return [prompts + [word for d in depths for word in ("-gp", f"{d},{ours.DECODED}")]]
        deep = ["-p", "0", "-n", str(ours.DECODED), "-d", _list(depths)]
        return [tests for tests, wanted in ((prompts, prefill), (deep, depths)) if wanted]

    def facts(self, pair: Pair) -> str:
        """See Engine."""
        run, prompt = (watch([*self._command(pair, 2), "-p", str(n), "-n", "0", "-v"]) for n in (1, PROMPT))
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
        has = [name for name in ("avx2", "avx512f", "avx512_vnni", "amx_int8") if name in flags]
        # Loading says which kind of memory each weight went to; AMX has one of its own.
        amx = ", weights laid out for AMX" if "AMX model buffer" in run.stderr else ""
        version = f"{self.recipe.package} {self.recipe.version}"
        start = " ".join(["llama-bench", *self.switches])
        return (
            f"{version}, native build on a CPU with {' '.join(has)}{amx}; `{start}`; "
            f"process {run.seconds:.1f} s; {_memory(prompt.peak_kib)}"
        )


def llama_cpp(build: Path | None = None) -> Peer:
    """The peer that users know, with its defaults, which are its best switches here."""
    return Peer("llama.cpp", LLAMA_CPP, build)


def ik_llama_cpp(build: Path | None = None) -> Peer:
    """The faster fork: repacks at load and asks for huge pages when told to."""
    return Peer("ik_llama.cpp", IK_LLAMA_CPP, build, ("-rtr", "1", "-thp", "1"), combined=True)


def peer_speeds(stdout: str) -> Speeds:
    """Tokens/s by the names of tools.bench.ours, from the JSON of either llama-bench."""
    found = {}
    for row in json.loads(stdout):
        depth = row.get("n_depth", row["n_prompt"])
        name = f"decode {depth}" if row["n_gen"] else f"prefill {row['n_prompt']}"
        found[name] = float(row["samples_ts"][0])
    return found


def _list(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


def _memory(peak: dict[str, int]) -> str:
    named = (("VmHWM", "peak"), ("RssAnon", "anonymous"), ("RssFile", "file"))
    return "memory " + ", ".join(f"{label} {peak.get(name, 0) / 1024:.0f} MiB" for name, label in named)
