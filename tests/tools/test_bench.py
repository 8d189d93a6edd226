# SPDX-License-Identifier: Apache-2.0
"""The arithmetic and the bookkeeping of the benches; no speed is asserted."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cecilia.errors import CeciliaError, UsageError
from tools.bench import (
    engines,
    layout,
    neighbour,
    ours,
    peer_build,
    peers,
    quantisations,
    report,
    rounds,
    system,
)


class Counter:
    """Stands for an engine: notes how many tokens it was fed since the last reset, call by call."""

    vocab = 50

    def __init__(self) -> None:
        self.sessions: list[list[int]] = []

    def reset(self) -> None:
        self.sessions.append([])

    def feed(self, tokens: Sequence[int]) -> Any:
        assert all(0 <= token < self.vocab for token in tokens)
        self.sessions[-1].append(len(tokens))
        return np.arange(self.vocab, dtype=np.float32)


def test_what_is_timed() -> None:
    engine = Counter()
    found = ours.measure(engine, [128], [7], repeats=2)
    warm_up, *measured = engine.sessions
    assert warm_up[0] == ours.WARM_UP
    assert measured == [[128], [128], [7] + [1] * 32, [7] + [1] * 32]
    assert {name: len(values) for name, values in found.items()} == {"prefill 128": 2, "decode 7": 2}


def test_lists_of_numbers() -> None:
    assert ours.numbers("1,20") == [1, 20]
    assert ours.numbers("") == []
    for bad in ("0", "1,-2", "x"):
        with pytest.raises(ValueError, match=r"^0$|^1,-2$|invalid literal"):
            ours.numbers(bad)


def test_nothing_is_done_less_than_once() -> None:
    assert ours.times("3") == 3
    for module, option in (
        (ours, "--repeats"),
        (peers, "--rounds"),
        (neighbour, "--rounds"),
        (quantisations, "--repeats"),
        (quantisations, "--rows"),
    ):
        for bad in ("0", "-1"):
            with pytest.raises(SystemExit) as error:
                module.main([f"{option}={bad}"])
            assert error.value.code == 2


def round_of(probe: float, mine: float, peer: float, other: float = 1) -> rounds.Round:
    speeds = {"ours": mine, "llama.cpp": peer, "ik_llama.cpp": other}
    return rounds.Round(probe, {name: {"decode 128": value} for name, value in speeds.items()})


def test_rounds_with_a_slow_probe_are_dropped() -> None:
    turns = [round_of(p, 1, 1) for p in (10.0, 7.0, 6.9, 10.0, 12.0)]  # the median is 10
    assert [r.probe for r in rounds.kept(turns)] == [10.0, 7.0, 10.0, 12.0]


def test_the_ratio_is_that_of_the_medians_to_the_faster_peer() -> None:
    turns = [round_of(1, 30, 10, 5), round_of(1, 20, 40, 7), round_of(1, 10, 16, 6)]
    cells = "10.0 / 20.0 / 30.0 | 10.0 / 16.0 / 40.0 | 5.0 / 6.0 / 7.0"
    assert peers.table(turns, 2) == [f"| decode 128 | 2 | {cells} | 1.25 |"]
    turns = [round_of(1, 20, 16, 25)]
    assert peers.table(turns, 1)[0].endswith("| 0.80 |")


class Steady:
    """An engine of one speed."""

    def __init__(self, name: str, speed: float) -> None:
        self.name, self.speed = name, speed

    def speeds(self, *_: object) -> dict[str, float]:
        return {"decode 128": self.speed}


def turns_of(file: Path | None, *field: Steady) -> list[rounds.Round]:
    args = peers.parser().parse_args(["--rounds=2", *([f"--add-to={file}"] if file else [])])
    pair = engines.Pair(Path("a.l3r"), Path("a.gguf"))
    return peers.take_turns(pair, 2, args, field)  # type: ignore[arg-type]


def test_rounds_of_several_runs_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system.BandwidthProbe.__init__, "__defaults__", (1 << 20,))
    file = tmp_path / "rounds.json"
    assert len(turns_of(None, Steady("ours", 1), Steady("x", 5))) == 2
    turns_of(file, Steady("ours", 1), Steady("x", 5))
    turns = turns_of(file, Steady("ours", 3), Steady("x", 7))
    assert [r.speeds["ours"]["decode 128"] for r in turns] == [1, 1, 3, 3]
    assert [r.speeds["x"]["decode 128"] for r in turns] == [5, 5, 7, 7]
    with pytest.raises(UsageError, match="other engines or tests for a, 2 threads") as error:
        turns_of(file, Steady("ours", 1), Steady("y", 5))
    assert error.value.code == "other_rounds"
    assert len(turns_of(file, Steady("ours", 3), Steady("x", 7))) == 6  # the refused ones left no trace


def test_answers_of_llama_bench() -> None:
    rows = """[
        {"n_prompt": 512, "n_gen": 0, "n_depth": 0, "samples_ts": [700.5]},
        {"n_prompt": 0, "n_gen": 32, "n_depth": 1024, "samples_ts": [27.25]}
    ]"""
    assert engines.peer_speeds(rows) == {"prefill 512": 700.5, "decode 1024": 27.25}


def test_answers_of_the_fork_whose_depth_is_the_prompt() -> None:
    rows = """[
        {"test": "pp16", "n_prompt": 16, "n_gen": 0, "samples_ts": [250.25]},
        {"test": "tg4@pp32", "n_prompt": 32, "n_gen": 4, "samples_ts": [75.5]}
    ]"""
    assert engines.peer_speeds(rows) == {"prefill 16": 250.25, "decode 32": 75.5}


def test_tests_of_a_peer_in_one_process_or_two() -> None:
    ik, mainline = engines.ik_llama_cpp(), engines.llama_cpp()
    assert ik._tests([1, 2], [7, 8]) == [["-p", "1,2", "-n", "0", "-gp", "7,32", "-gp", "8,32"]]
    assert ik._tests([], [7]) == [["-p", "0", "-n", "0", "-gp", "7,32"]]
    assert mainline._tests([1, 2], [7, 8]) == [
        ["-p", "1,2", "-n", "0"],
        ["-p", "0", "-n", "32", "-d", "7,8"],
    ]
    assert mainline._tests([1], []) == [["-p", "1", "-n", "0"]]


def test_the_neighbour_is_there_during_the_disturbed_case_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbour, "BUSY_LOOP", ["sleep", "1000"])
    children = Path(f"/proc/self/task/{os.getpid()}/children")

    class Probe:
        name = "probe"

        def speeds(self, *_: object) -> dict[str, float]:
            return {neighbour.TEST: len(children.read_text().split()) - before}

    before = len(children.read_text().split())
    rates: dict[str, neighbour.Rates] = {"probe": {}}
    neighbour.one_round([Probe()], rates)  # type: ignore[list-item]
    assert rates["probe"] == {"1 thread": [0], "2 threads": [0], "2 threads, disturbed": [1]}
    assert len(children.read_text().split()) == before


def test_the_disturbed_rate_is_compared_with_one_thread() -> None:
    rates = dict(zip(neighbour.CASES, ([10.0, 20.0, 30.0], [40.0], [16.0, 18.0, 20.0]), strict=True))
    cells = "10.0 / 20.0 / 30.0 | 40.0 / 40.0 / 40.0 | 16.0 / 18.0 / 20.0"
    assert neighbour.table({"x": rates})[-1] == f"| x | {cells} | 0.90 |"


def test_a_process_that_fails_is_named_with_its_last_words() -> None:
    done = engines.watch([sys.executable, "-c", "print('out')"])
    assert done.stdout == "out\n"
    with pytest.raises(CeciliaError, match="ended with 3: last words") as error:
        engines.watch([sys.executable, "-c", "import sys; print('last words', file=sys.stderr); sys.exit(3)"])
    assert error.value.code == "bench_failed"


def test_memory_of_a_process() -> None:
    found = system.memory_kib()
    assert found["VmHWM"] >= found["RssAnon"] > 0
    assert system.memory_kib(os.getpid()).keys() == {"VmHWM", "RssAnon", "RssFile"}
    assert system.memory_kib(2**22 + 1) == {}  # above the largest pid there can be


def test_the_log_names_no_folder_of_this_machine() -> None:
    given = ["--llama-cpp-build", "/home/me/build", "--no-log", "--rounds", "5"]
    assert report.command("tools.bench.peers", given) == (
        "python -m tools.bench.peers --llama-cpp-build build --rounds 5"
    )


def test_a_section_is_printed_and_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "BENCH.md"
    log.write_text("before\n")
    monkeypatch.setattr(report, "LOG", log)
    text = report.section("a title", ["`command`", "fact"], ["| row |"])
    lines = text.split("\n")
    assert re.fullmatch(r"### \d{4}-\d\d-\d\d \d\d:\d\d UTC, a title", lines[0])
    assert lines[1:] == ["", f"`command`; fact; {system.machine()}", "", "| row |", ""]
    report.publish(text, no_log=True)
    assert log.read_text() == "before\n"
    report.publish(text, no_log=False)
    assert log.read_text() == f"before\n\n{text}"
    assert capsys.readouterr().out == 2 * f"{text}\n"


def test_a_missing_peer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="llama-bench is not there"):
        peer_build.program(peer_build.LLAMA_CPP, tmp_path)


def test_the_mends_are_put_in_once(tmp_path: Path) -> None:
    for mend in peer_build.AMX_MENDS:
        path = tmp_path / mend.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{{\n{mend.anchor}\n}}\n")
    for _ in range(2):
        peer_build.mend_amx(tmp_path)
        for mend in peer_build.AMX_MENDS:
            assert (tmp_path / mend.file).read_text() == f"{{\n{mend.text}{mend.anchor}\n}}\n"
    (tmp_path / peer_build.AMX_MENDS[0].file).write_text("something else")
    with pytest.raises(CeciliaError, match="_tile_loadconfig"):
        peer_build.mend_amx(tmp_path)


def test_a_missing_file_is_added_and_an_existing_one_kept(tmp_path: Path) -> None:
    peer_build.add_build_info(tmp_path)
    added = tmp_path / peer_build.BUILD_INFO_FILE
    assert "LLAMA_BUILD_NUMBER = 0;" in added.read_text()
    added.write_text("newer")
    peer_build.add_build_info(tmp_path)
    assert added.read_text() == "newer"


def test_marked_loops_are_taken_out_of_an_assembly() -> None:
    text = '// LLVM-MCA-BEGIN q4_16x4\n// 0 "" 2\n#NO_APP\n\tadd\tx0, x0, 1\n#APP\n// LLVM-MCA-END\n\tret\n'
    assert list(layout.regions(text)) == [("q4_16x4", "\tadd\tx0, x0, 1\n")]


def test_weights_per_cycle() -> None:
    assert layout.weights_per_cycle("q8_16x4", "...\nBlock RThroughput: 20.0\n") == pytest.approx(
        16 * 32 / 20
    )
    with pytest.raises(CeciliaError):
        layout.weights_per_cycle("q8_16x4", "nothing")
