# SPDX-License-Identifier: Apache-2.0
"""Whatever was kept, forked, evicted, saved or restored in between, an answer is the one of a cold engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cecilia.engine.generate import Engine
from cecilia.engine.job import ChatRequest, Delta, Event, Finished, Prompt
from cecilia.engine.load import load
from cecilia.engine.snapshots import note_of
from cecilia.errors import RequestError
from cecilia.sampler import SamplingParams
from cecilia.state.snapshot import SnapshotFile
from tests.engine.conftest import runner_of
from tools.make_tiny import make_tiny

CASES = [
    *(("llama", profile) for profile in ("int8-v1", "bf16-v1", "f32")),
    *(("ling3", profile) for profile in ("int8-v1", "latent-int8-v1", "latent-bf16-v1")),
]
SYSTEM = {"role": "system", "content": "You are terse and never repeat yourself, whatever happens."}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("sessions")
    return {
        "llama": make_tiny(directory / "llama.l3r", vocab=259, context=1024),
        "ling3": make_tiny(directory / "ling3.l3r", architecture="ling3"),
    }


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def start(request: pytest.FixtureRequest, files: dict[str, Path]) -> Iterator[Callable[..., Engine]]:
    """Load an engine; each one is another process as far as it can tell."""
    architecture, profile = request.param
    engines: list[Engine] = []

    def begin(**options: Any) -> Engine:
        engines.append(load(files[architecture], profile=profile, threads=1, context=1024, **options))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


def turn(*texts: str, **changes: Any) -> ChatRequest:
    """A request with the given turns, of user and assistant alternately."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    sampling = SamplingParams(temperature=0.8, seed=7)
    return replace(ChatRequest([SYSTEM, *messages], sampling, max_tokens=24), **changes)


def run(
    engine: Engine, request: ChatRequest, poll: Callable[[], bool] = lambda: False
) -> tuple[str, Finished]:
    return proceed(engine, engine.prepare(request), poll)


def proceed(engine: Engine, prompt: Prompt, poll: Callable[[], bool] = lambda: False) -> tuple[str, Finished]:
    events: list[Event] = []
    finished = engine.generate(prompt, events.append, poll)
    deltas = [event for event in events if isinstance(event, Delta)]
    return "".join(f"{event.reasoning}|{event.content}" for event in deltas), finished


def cold(start: Callable[..., Engine], request: ChatRequest) -> str:
    return run(start(), request)[0]


def test_follow_up_turns_answer_as_from_cold(start: Callable[..., Engine]) -> None:
    engine = start()
    first = turn("Tell me of the sea. " * 10)
    run(engine, first)
    second = turn("Tell me of the sea. " * 10, "It is wide.", "And of the sky?")
    answer, finished = run(engine, second)
    assert answer == cold(start, second)
    assert finished.usage.cached_tokens > 0.6 * finished.usage.prompt_tokens


def test_a_title_between_two_turns_costs_the_chat_nothing(start: Callable[..., Engine]) -> None:
    engine = start()
    run(engine, turn("Tell me of the sea. " * 10))
    run(engine, turn("Find a title."))
    second = turn("Tell me of the sea. " * 10, "It is wide.", "And of the sky?")
    answer, finished = run(engine, second)
    assert answer == cold(start, second)
    assert finished.usage.cached_tokens > 0.6 * finished.usage.prompt_tokens


def test_two_users_with_one_prefix_get_their_own_answers(start: Callable[..., Engine]) -> None:
    engine = start()
    requests = [turn(f"My name is {name}. What is it?") for name in ("Ada", "Bob")]
    expected = [cold(start, request) for request in requests]
    for _ in range(3):
        assert [run(engine, request)[0] for request in requests] == expected


def test_evictions_in_between_change_no_answer(start: Callable[..., Engine]) -> None:
    engine = start(cache_bytes=0)
    requests = [turn(f"{name} " * 60) for name in ("sea", "sky", "ice")]
    expected = [cold(start, request) for request in requests]
    for _ in range(2):
        assert [run(engine, request)[0] for request in requests] == expected
    pool = runner_of(engine).pool
    assert pool.used_bytes <= pool.limit_bytes


def test_regeneration_and_branches_answer_as_from_cold(start: Callable[..., Engine]) -> None:
    engine = start()
    long, other = turn("sea " * 40, "wide", "sky?"), turn("sea " * 40, "wide", "ice?")
    expected = cold(start, long), cold(start, other)
    for _ in range(2):
        assert (run(engine, long)[0], run(engine, other)[0]) == expected


def test_a_probe_tells_what_a_run_will_find(start: Callable[..., Engine]) -> None:
    engine = start()
    run(engine, turn("sea " * 40, session_id="mine"))
    second = turn("sea " * 40, "wide", "sky?", session_id="mine")
    probe = engine.sessions.probe(engine.tokens(second), name="mine")
    _, finished = run(engine, second)
    assert probe.cached_tokens == finished.usage.cached_tokens <= probe.common_tokens
    assert (probe.source, probe.prompt_tokens) == ("mine", finished.usage.prompt_tokens)
    assert probe.cached_tokens + probe.recompute_tokens == probe.prompt_tokens


def test_another_salt_finds_nothing_and_answers_the_same(start: Callable[..., Engine]) -> None:
    engine = start()
    expected = run(engine, turn("sea", cache_salt="a"))[0]
    answer, finished = run(engine, turn("sea", cache_salt="b"))
    assert (answer, finished.usage.cached_tokens) == (expected, 0)


def test_a_fork_goes_its_own_way(start: Callable[..., Engine]) -> None:
    engine = start()
    run(engine, turn("sea " * 40, session_id="one"))
    fork = engine.sessions.fork("one", "two")
    assert fork.shared_bytes > 0
    assert fork.bytes - fork.shared_bytes <= sum(
        state.nbytes for each in runner_of(engine).session.cache for state in each.checkpoints.values()
    )
    left = turn("sea " * 40, "wide", "sky?", session_id="one")
    right = turn("sea " * 40, "wide", "ice?", session_id="two")
    expected = cold(start, left), cold(start, right)
    assert (run(engine, right)[0], run(engine, left)[0]) == expected[::-1]
    names = {entry.session_id for entry in engine.sessions.entries()}
    assert {"one", "two"} <= names


def test_forks_that_cannot_be_are_refused(start: Callable[..., Engine]) -> None:
    engine = start()
    with pytest.raises(RequestError) as refusal:
        engine.sessions.fork(None, "x")
    assert refusal.value.code == "session_not_found"
    run(engine, turn("sea " * 40, session_id="one"))
    for name, new, at, code in (
        ("none", "x", None, "session_not_found"),
        ("one", "one", None, "session_exists"),
        ("one", "x", 0, "position_not_restorable"),
        ("one", "x", 100_000, "position_not_restorable"),
    ):
        with pytest.raises(RequestError) as refusal:
            engine.sessions.fork(name, new, at=at)
        assert refusal.value.code == code
    nearest = refusal.value.facts["nearest_below"]
    assert engine.sessions.fork("one", "y", at=nearest).tokens == nearest


def test_clearing_by_scope(start: Callable[..., Engine]) -> None:
    engine = start()
    run(engine, turn("sea", session_id="one"))
    run(engine, turn("sky", session_id="two"))
    with pytest.raises(RequestError, match="no session 'three'"):
        engine.sessions.clear("session", "three")
    freed, removed = engine.sessions.clear("session", "one")
    assert freed > 0
    assert removed == 1
    assert {entry.session_id for entry in engine.sessions.entries()} == {"two"}
    engine.sessions.clear("all")
    assert (engine.sessions.entries(), engine.sessions.totals().used_bytes) == ([], 0)


def test_a_sequence_at_work_is_not_cleared(start: Callable[..., Engine]) -> None:
    engine = start()
    run(engine, turn("sky"))
    refusals: list[str] = []

    def poll() -> bool:
        if engine.sessions.entries()[0].in_use and not refusals:
            with pytest.raises(RequestError) as refusal:
                engine.sessions.clear("all")
            refusals.append(refusal.value.code)
            engine.sessions.clear("idle")
        return False

    request = turn("sea")
    assert run(engine, request, poll)[0] == cold(start, request)
    assert refusals == ["in_use"]


# -- snapshots --------------------------------------------------------------------------------------------


def save(engine: Engine, name: str, path: Path) -> None:
    engine.sessions.freeze(name).write(path)


def restore(engine: Engine, name: str, path: Path) -> None:
    with SnapshotFile(path) as file:
        file.verify()
        engine.sessions.restore(file, name)


def test_a_restored_session_goes_on_as_from_cold(start: Callable[..., Engine], tmp_path: Path) -> None:
    path = tmp_path / "one.snapshot"
    engine = start()
    run(engine, turn("sea " * 40, session_id="one"))
    save(engine, "one", path)
    another = start()
    restore(another, "one", path)
    second = turn("sea " * 40, "wide", "sky?", session_id="one")
    answer, finished = run(another, second)
    assert answer == cold(start, second)
    assert finished.usage.cached_tokens > 0.6 * finished.usage.prompt_tokens
    assert finished.usage.cached_tokens == run(engine, second)[1].usage.cached_tokens


@pytest.mark.parametrize("polls", [2, 3, 5, 9, 20])
def test_an_interrupted_generation_is_delivered_to_its_end(
    start: Callable[..., Engine], tmp_path: Path, polls: int
) -> None:
    """Saved between two steps, thrown away, restored elsewhere: both parts make the undisturbed text."""
    path = tmp_path / "one.snapshot"
    request = turn(
        "sea " * 40, session_id="one", stop=("zq", "\ufffd\ufffd\ufffd\ufffd\ufffd"), max_tokens=40
    )
    expected, undisturbed = run(start(), request)
    engine = start()
    asked = 0

    def poll() -> bool:
        nonlocal asked
        asked += 1
        if asked == polls:
            save(engine, "one", path)
        return asked == polls

    events: list[Event] = []

    def emit(event: Event) -> None:
        if asked < polls:  # what comes after is lost with the process
            events.append(event)

    engine.generate(engine.prepare(request), emit, poll)
    first = "".join(f"{e.reasoning}|{e.content}" for e in events if isinstance(e, Delta))
    another = start()
    restore(another, "one", path)
    rest, finished = proceed(
        another, another.prepare(ChatRequest([], SamplingParams(), None, session_id="one", continues=True))
    )
    assert first + rest == expected
    assert finished.usage.completion_tokens == undisturbed.usage.completion_tokens
    with pytest.raises(RequestError) as refusal:
        another.prepare(ChatRequest([], SamplingParams(), None, session_id="one", continues=True))
    assert refusal.value.code == "generation_not_resumable"


def interrupted(engine: Engine, path: Path, request: ChatRequest, polls: int) -> None:
    """Save `request`'s session between two steps, and give it up."""
    asked = 0

    def poll() -> bool:
        nonlocal asked
        asked += 1
        if asked == polls:
            save(engine, "one", path)
        return asked == polls

    engine.generate(engine.prepare(request), lambda _: None, poll)


def test_a_smaller_window_cuts_what_is_left_of_a_generation(files: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "one.snapshot"
    wide = load(files["llama"], threads=1, context=1024)
    endless = SamplingParams(temperature=0.8, seed=7, logit_bias=((256, -100.0), (258, -100.0)))  # no end
    request = turn("sea", session_id="one", max_tokens=500, sampling=endless)
    interrupted(wide, path, request, polls=6)
    wide.close()
    goes_on = ChatRequest([], SamplingParams(), None, session_id="one", continues=True)
    narrow = load(files["llama"], threads=1, context=160)
    restore(narrow, "one", path)
    prompt = narrow.prepare(goes_on)
    assert len(prompt.tokens) + prompt.max_tokens == 160
    _, finished = proceed(narrow, prompt)
    assert finished.cause == "length"
    assert len(runner_of(narrow).session.tokens) <= 160
    narrow.close()
    held = len(prompt.tokens) + len(prompt.generated)
    full = load(files["llama"], threads=1, context=held)
    with pytest.raises(RequestError, match=f"at {held} tokens, the window {held}") as refusal:
        restore(full, "one", path)
    assert refusal.value.code == "snapshot_mismatch"
    assert full.sessions.entries() == []
    full.close()


@pytest.mark.parametrize(
    "change",
    [{"tokens": [1, 2, 9999]}, {"tokens": [-1]}, {"tokens": []}, {"stop": None}, {"sampling": {"x": 1}}],
)
def test_a_generation_that_is_none_is_refused(
    tmp_path: Path, files: dict[str, Path], change: dict[str, Any]
) -> None:
    path = tmp_path / "one.snapshot"
    engine = load(files["llama"], threads=1, context=1024)
    request = turn("sea", session_id="one")
    run(engine, request)
    frozen = engine.sessions.freeze("one")
    note, _ = note_of(replace(engine.prepare(request), generated=(1, 2)))
    replace(frozen, note={"session": "one", "generation": note | {"prompt_tokens": 1} | change}).write(path)
    with pytest.raises(RequestError) as refusal:
        restore(engine, "one", path)
    assert refusal.value.code == "snapshot_damaged"
    assert engine.sessions.entries()[0].session_id == "one"  # as it was
    engine.close()


def test_nothing_to_go_on_with_is_refused(start: Callable[..., Engine]) -> None:
    with pytest.raises(RequestError) as refusal:
        start().prepare(ChatRequest([], SamplingParams(), None, session_id="none", continues=True))
    assert refusal.value.code == "session_not_found"
