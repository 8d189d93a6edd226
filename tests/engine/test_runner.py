# SPDX-License-Identifier: Apache-2.0
"""The runner's own rules: what it refuses, and that closing it lets go of everything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cecilia.engine.load import load_runner
from cecilia.engine.runner import Runner
from cecilia.errors import UsageError
from tools.make_tiny import make_tiny


@pytest.fixture
def runner(tiny_path: Path) -> Iterator[Runner]:
    runner = load_runner(tiny_path, threads=1, context=100)
    yield runner
    runner.close()


@pytest.mark.parametrize(
    ("tokens", "code"),
    [
        ([], "no_tokens"),
        ([0] * 101, "context_exceeded"),
        ([-1], "token_out_of_range"),
        ([259], "token_out_of_range"),
    ],
)
def test_tokens_that_cannot_be_fed(runner: Runner, tokens: list[int], code: str) -> None:
    with pytest.raises(UsageError) as refusal:
        runner.feed(tokens)
    assert refusal.value.code == code
    assert runner.session.tokens == []


@pytest.mark.parametrize("chunk", [0, 101])
def test_chunks_beyond_the_work_buffers_are_refused(runner: Runner, chunk: int) -> None:
    with pytest.raises(UsageError, match="invalid_chunk"):
        runner.evaluate([1, 2, 3], chunk=chunk)


def test_the_window_can_be_filled_to_the_last_token(runner: Runner) -> None:
    runner.feed([5] * 100)
    with pytest.raises(UsageError, match=r"context_exceeded.*101 tokens"):
        runner.feed([5])


def test_last_logits_are_the_last_of_all(runner: Runner) -> None:
    tokens = list(range(60))
    every = runner.evaluate(tokens)
    assert every.shape == (60, 259)
    assert runner.evaluate(tokens, all_logits=False).tobytes() == every[-1:].tobytes()
    runner.reset()
    assert runner.feed(np.array(tokens)).tobytes() == every[-1].tobytes()


def test_greedy_takes_the_largest_logit_each_time(runner: Runner) -> None:
    tokens = list(b"In the beginning")
    expected: list[int] = []
    for _ in range(5):
        expected.append(int(runner.evaluate(tokens + expected)[-1].argmax()))
    assert runner.greedy(tokens, 5) == expected


def test_nothing_is_left_open(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "own.l3r")

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    maps = Path("/proc/self/maps")
    for _ in range(3):
        runner = load_runner(path, threads=1)
        runner.feed([1])
        runner.close()
        del runner
    assert descriptors() == before
    assert str(path) not in maps.read_text()
