# SPDX-License-Identifier: Apache-2.0
"""From a request to text: what ends a generation, what is counted, and that the session survives it.

The expected text comes from the token ids of `Runner.greedy`, decoded and cut here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cecilia.engine.generate import Engine
from cecilia.engine.job import ChatRequest, Delta, Event, Finished, Prefill, Prompt, TokenLogprob
from cecilia.engine.load import load
from cecilia.errors import CeciliaError, MemoryLimitError, RequestError
from cecilia.sampler import SamplingParams
from cecilia.text.chat import ChatTemplate
from cecilia.text.tokenizer import Tokenizer
from tests.engine.conftest import runner_of
from tools.make_tiny import make_tiny

GREEDY = SamplingParams()


def request(text: str = "Hello", **changes: Any) -> ChatRequest:
    asked = ChatRequest([{"role": "user", "content": text}], GREEDY, max_tokens=12)
    return replace(asked, **changes)


def prompt_ids(text: str) -> list[int]:
    """ChatML over bytes, by hand: 257 opens a message and 258 closes it."""
    return [257, *f"user\n{text}".encode(), 258, *b"\n", 257, *b"assistant\n"]


def run(
    engine: Engine, prompt: Prompt, cancelled: Callable[[], bool] = lambda: False
) -> tuple[list[Event], Finished]:
    events: list[Event] = []
    finished = engine.generate(prompt, events.append, cancelled)
    return events, finished


def text_of(events: list[Event]) -> str:
    return "".join(event.content for event in events if isinstance(event, Delta))


def assert_consistent(engine: Engine) -> None:
    """The pages in use are those of the tokens held."""
    runner = runner_of(engine)
    assert runner.pool.in_use == -(-len(runner.session.tokens) // 64)


def greedy_bytes(engine: Engine, text: str, n: int) -> bytes:
    ids = runner_of(engine).greedy(prompt_ids(text), n)
    runner_of(engine).reset()
    return b"".join(bytes([i]) if i < 256 else b"" for i in ids)


def ended_by(engine: Engine, eos_ids: set[int]) -> Engine:
    """The same engine with other end tokens."""
    runner = runner_of(engine)
    tokenizer = Tokenizer(runner.file.tokenizer, bos_id=None, add_bos=False, eos_ids=eos_ids)
    return Engine(runner, tokenizer, engine._template, engine._hints, engine.info)


def test_prepare_renders_and_counts(engine: Engine) -> None:
    prompt = engine.prepare(request("Hi"))
    assert list(prompt.tokens) == prompt_ids("Hi")
    assert (prompt.max_tokens, prompt.cached_tokens) == (12, 0)


def test_max_tokens_is_clamped_to_the_window(engine: Engine) -> None:
    room = 256 - len(prompt_ids("Hello"))
    assert engine.prepare(request(max_tokens=None)).max_tokens == room
    assert engine.prepare(request(max_tokens=100_000)).max_tokens == room
    assert engine.prepare(request(max_tokens=1)).max_tokens == 1


def test_a_prompt_that_fills_the_window_is_refused(engine: Engine) -> None:
    empty = len(prompt_ids(""))
    assert engine.prepare(request("x" * (255 - empty))).max_tokens == 1
    with pytest.raises(RequestError) as refusal:
        engine.prepare(request("x" * (256 - empty)))
    assert refusal.value.code == "context_length_exceeded"
    assert refusal.value.facts == {"n_prompt_tokens": 256, "n_ctx": 256}
    assert "this model's maximum context length is 256 tokens" in refusal.value.message
    assert "exceeds the context window" in refusal.value.message


def test_a_hopeless_prompt_is_refused_before_it_is_tokenised(engine: Engine) -> None:
    """Megabytes of text cost seconds and memory to encode; their length alone shows that they cannot fit."""
    with (
        mock.patch.object(Tokenizer, "split_control", side_effect=AssertionError("encoded")),
        mock.patch.object(Tokenizer, "encode_text", side_effect=AssertionError("encoded")),
        pytest.raises(RequestError) as refusal,
    ):
        engine.prepare(request("x" * 1_000_000))
    assert refusal.value.code == "context_length_exceeded"
    assert "of at least" in refusal.value.message
    assert engine.context < refusal.value.facts["n_prompt_tokens"] <= 1_000_100


def test_length_ends_and_is_counted(engine: Engine) -> None:
    prompt = engine.prepare(request(max_tokens=12))
    expected = greedy_bytes(engine, "Hello", 12).decode("utf-8", "replace")
    events, finished = run(ended_by(engine, set()), prompt)
    assert text_of(events) == expected
    assert (finished.reason, finished.cause) == ("length", "length")
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (len(prompt.tokens), 12)
    assert events[0] == Prefill(len(prompt.tokens), len(prompt.tokens))
    counts = [event.tokens for event in events if isinstance(event, Delta)]
    assert counts == sorted(counts)
    assert_consistent(engine)


def test_the_end_token_is_counted_and_silent(engine: Engine) -> None:
    ids = runner_of(engine).greedy(prompt_ids("Hello"), 12)
    position = next(i for i in range(3, 12) if ids[i] not in ids[:i])
    expected = bytes(i for i in ids[:position] if i < 256).decode("utf-8", "replace")
    runner_of(engine).reset()
    ending = ended_by(engine, {ids[position]})
    events, finished = run(ending, ending.prepare(request()))
    assert text_of(events) == expected
    assert (finished.reason, finished.cause) == ("stop", "eos")
    assert finished.usage.completion_tokens == position + 1


def test_a_stop_string_ends_and_is_withheld(engine: Engine) -> None:
    whole = greedy_bytes(engine, "Hello", 40).decode("utf-8", "replace")
    stop = whole[5:8]
    stopping = ended_by(engine, set())
    events, finished = run(stopping, stopping.prepare(request(max_tokens=40, stop=(stop, "never said"))))
    assert text_of(events) == whole[: whole.index(stop)]
    assert (finished.reason, finished.cause) == ("stop", "stop")
    assert finished.usage.completion_tokens < 40


def test_text_held_back_for_a_stop_comes_out_at_the_end(engine: Engine) -> None:
    whole = greedy_bytes(engine, "Hello", 12).decode("utf-8", "replace")
    stopping = ended_by(engine, set())
    events, finished = run(stopping, stopping.prepare(request(stop=(whole[-1] + "\0 never",))))
    assert (text_of(events), finished.cause) == (whole, "length")


@pytest.mark.parametrize("polls", range(8))
def test_cancel_at_each_poll(engine: Engine, polls: int) -> None:
    """Poll 0 is before the prompt's only chunk; poll n stops before the n-th token."""
    runs = itertools.count()
    cancelling = ended_by(engine, set())
    prompt = cancelling.prepare(request())
    events, finished = run(cancelling, prompt, lambda: next(runs) == polls)
    assert (finished.reason, finished.cause) == ("stop", "cancelled")
    assert finished.usage.completion_tokens == max(0, polls - 1)
    assert len(runner_of(engine).session.tokens) == (len(prompt.tokens) + polls - 1 if polls else 0)
    assert_consistent(engine)
    after, _ = run(cancelling, cancelling.prepare(request()))
    runner_of(engine).reset()
    fresh, _ = run(cancelling, cancelling.prepare(request()))
    assert text_of(after) == text_of(fresh)
    assert text_of(fresh).startswith(text_of(events).rstrip("�"))


def test_an_error_of_the_listener_leaves_the_session_usable(engine: Engine) -> None:
    def refuse(event: Event) -> None:
        raise ConnectionError(type(event).__name__)

    with pytest.raises(ConnectionError, match="Prefill"):
        engine.generate(engine.prepare(request()), refuse, lambda: False)
    assert_consistent(engine)
    assert engine.prepare(request()).cached_tokens == len(prompt_ids("Hello")) - 1


def test_the_next_turn_reuses_the_last_one(engine: Engine) -> None:
    run(engine, engine.prepare(request("Hello there")))
    prompt = engine.prepare(request("Hello you"))
    common = len([257, *b"user\nHello "])
    assert prompt.cached_tokens == common
    warm, finished = run(engine, prompt)
    assert finished.usage.cached_tokens == common
    runner_of(engine).reset()
    cold, finished = run(engine, engine.prepare(request("Hello you")))
    assert finished.usage.cached_tokens == 0
    assert text_of(warm) == text_of(cold)


def test_a_seed_gives_one_text_on_any_thread_count(tiny_path: Path) -> None:
    texts = set()
    for threads in (1, 2):
        engine = load(tiny_path, threads=threads)
        for _ in range(2):
            asked = request(sampling=SamplingParams(temperature=1.0, top_p=0.9, seed=7), max_tokens=40)
            texts.add(text_of(run(engine, engine.prepare(asked))[0]))
        engine.close()
    assert len(texts) == 1


def test_different_seeds_differ(engine: Engine) -> None:
    texts = set()
    for seed in range(4):
        asked = request(sampling=SamplingParams(temperature=1.0, seed=seed), max_tokens=40)
        texts.add(text_of(run(engine, engine.prepare(asked))[0]))
    assert len(texts) == 4


def test_rows_of_the_head_without_a_word_are_never_chosen(tmp_path: Path) -> None:
    padded = load(make_tiny(tmp_path / "padded.l3r", vocab=2000), threads=1)  # the tokenizer has 259 words
    asked = request(sampling=SamplingParams(temperature=2.0, seed=1), max_tokens=60, logprobs=20)
    events, finished = run(ended_by(padded, set()), padded.prepare(asked))
    entries = entries_of(events)
    assert finished.usage.completion_tokens == len(entries) == 60
    assert all(shown.token < 259 for entry in entries for shown in (entry, *entry.top))
    with pytest.raises(RequestError, match="this model has 0 to 258"):
        padded.prepare(request(sampling=SamplingParams(logit_bias=((259, 1.0),))))
    padded.close()


def test_timings_come_from_the_clock(engine: Engine) -> None:
    ticks = itertools.count(100.0, 0.25)
    timed = Engine(
        runner_of(engine), engine._tokenizer, engine._template, engine._hints, {}, clock=lambda: next(ticks)
    )
    _, finished = run(timed, timed.prepare(request()))
    assert (finished.timings.prompt_ms, finished.timings.predicted_ms) == (250.0, 250.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_fail_and_are_forgotten(
    engine: Engine, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = runner_of(engine).session
    evaluate = session.evaluate

    def poisoned(tokens: list[int]) -> Any:
        logits = evaluate(tokens)
        if len(tokens) == 1:
            logits[0, 3] = bad
        return logits

    monkeypatch.setattr(session, "evaluate", poisoned)
    with pytest.raises(CeciliaError) as failure:
        run(engine, engine.prepare(request()))
    assert failure.value.code == "numeric_error"
    assert session.tokens == []
    assert_consistent(engine)


def test_a_request_without_memory_is_refused_before_any_work(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = load(runner_of(engine).file.path, threads=1)
    monkeypatch.setattr("cecilia.engine.memory.available", lambda: 1 << 20)
    with pytest.raises(MemoryLimitError) as refusal:
        fresh.prepare(request())
    assert refusal.value.code == "insufficient_memory"
    assert runner_of(fresh).pool.allocated == 0
    fresh.close()


# -- sampling and log-probabilities -----------------------------------------------------------------------


def entries_of(events: list[Event]) -> list[TokenLogprob]:
    return [entry for event in events if isinstance(event, Delta) for entry in event.logprobs]


def speak(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    """Make the next answer say `text`, one byte a token."""
    monkeypatch.setattr("cecilia.sampler.Sampler.sample", mock.Mock(side_effect=text))


def expected_logprobs(engine: Engine, text: str, ids: list[int]) -> list[np.ndarray[Any, Any]]:
    """The log-softmax at each place of the answer, from one evaluation of the whole text."""
    prompt = prompt_ids(text)
    rows = runner_of(engine).evaluate([*prompt, *ids])[len(prompt) - 1 : -1].astype(np.float64)
    runner_of(engine).reset()
    return [row - np.logaddexp.reduce(row) for row in rows]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.5, seed=3, repeat_penalty=1.3)])
@pytest.mark.parametrize("top", [0, 5])
def test_each_token_has_its_logprob(engine: Engine, sampling: SamplingParams, top: int) -> None:
    endless = ended_by(engine, set())
    events, finished = run(endless, endless.prepare(request(sampling=sampling, logprobs=top, max_tokens=30)))
    entries = entries_of(events)
    assert len(entries) == finished.usage.completion_tokens == 30
    assert b"".join(entry.bytes for entry in entries).decode("utf-8", "replace") == text_of(events)
    rows = expected_logprobs(engine, "Hello", [entry.token for entry in entries])
    for entry, row in zip(entries, rows, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token], rel=1e-9)
        likeliest = np.argsort(-row, kind="stable")[:top].tolist()
        assert [other.token for other in entry.top] == likeliest
        assert [other.logprob for other in entry.top] == pytest.approx(row[likeliest].tolist(), rel=1e-9)
        assert all(other.bytes == endless._tokenizer.token_bytes(other.token) for other in entry.top)


def test_no_logprobs_unless_asked_and_the_text_is_the_same(engine: Engine) -> None:
    endless = ended_by(engine, set())
    plain, _ = run(endless, endless.prepare(request()))
    asked, _ = run(endless, endless.prepare(request(logprobs=2)))
    assert entries_of(plain) == []
    assert text_of(plain) == text_of(asked)


def test_entries_wait_for_the_text_of_their_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are bytes here: a character of three, a text that might have become a stop, the end."""
    speak(monkeypatch, "\u20acab.".encode())
    endless = ended_by(engine, {ord(".")})
    events, finished = run(endless, endless.prepare(request(logprobs=0, stop=("abc",))))
    deltas = [event for event in events if isinstance(event, Delta)]
    assert [(delta.content, bytes(entry.token for entry in delta.logprobs)) for delta in deltas] == [
        ("€", "€".encode()),
        ("ab", b"ab"),
    ]
    assert (finished.cause, finished.usage.completion_tokens) == ("eos", 6)


def test_tokens_of_a_stop_string_have_no_entry(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    speak(monkeypatch, b"xyabc")
    endless = ended_by(engine, set())
    events, finished = run(endless, endless.prepare(request(logprobs=0, stop=("abc",))))
    assert (text_of(events), bytes(entry.token for entry in entries_of(events))) == ("xy", b"xy")
    assert finished.usage.completion_tokens == 5


@pytest.mark.parametrize(("opens", "spoken"), [(False, b"<think>a</think>"), (True, b"a</think>")])
def test_tokens_without_text_bring_their_entries_at_the_end(
    engine: Engine, opens: bool, spoken: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    speak(monkeypatch, spoken)
    hints = replace(engine._hints, think=("<think>", "</think>"))
    tokenizer = ended_by(engine, set())._tokenizer
    template = ChatTemplate(
        "{{ messages[0]['content'] }}{{ '<think>\n' if enable_thinking else '<think></think>' }}"
    )
    thinking = Engine(runner_of(engine), tokenizer, template, hints, engine.info)
    asked = request(logprobs=0, max_tokens=len(spoken), enable_thinking=opens)
    events, _ = run(thinking, thinking.prepare(asked))
    assert bytes(entry.token for entry in entries_of(events)) == spoken
    last = events[-1]
    assert isinstance(last, Delta)
    assert (last.content, last.reasoning, len(last.logprobs)) == ("", "", len("</think>"))


@pytest.mark.parametrize("asked", ["<think>", "x<think>\n"])
def test_a_user_cannot_open_a_think_block(engine: Engine, asked: str) -> None:
    hints = replace(engine._hints, think=("<think>", "</think>"))
    template = ChatTemplate("{{ messages[0]['content'] }}")
    thinking = Engine(runner_of(engine), engine._tokenizer, template, hints, engine.info)
    assert not thinking.prepare(request(asked)).opens_in_think


def test_bias_decides_and_must_name_tokens_of_the_model(engine: Engine) -> None:
    forced = ended_by(engine, set())
    biased = SamplingParams(logit_bias=((ord("z"), 100.0),))
    events, _ = run(forced, forced.prepare(request(sampling=biased, max_tokens=4)))
    assert text_of(events) == "zzzz"
    for token in (-1, 259):
        with pytest.raises(RequestError) as refusal:
            forced.prepare(request(sampling=SamplingParams(logit_bias=((token, 1.0),))))
        assert (refusal.value.code, refusal.value.param) == ("invalid_value", "logit_bias")


def test_repeat_penalty_sees_the_prompt(engine: Engine) -> None:
    """The bias leaves y and z; each is in one of the prompts, and the other one is said."""
    two = ((ord("y"), 80.0), (ord("z"), 80.0))
    endless = ended_by(engine, set())
    for asked, said in (("yy", "z"), ("zz", "y")):
        penalised = SamplingParams(logit_bias=two, repeat_penalty=2.0)
        events, _ = run(endless, endless.prepare(request(asked, sampling=penalised, max_tokens=1)))
        assert text_of(events) == said
