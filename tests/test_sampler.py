# SPDX-License-Identifier: Apache-2.0
"""The sampler against a plain numpy reference, published random vectors and the statistics it promises."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cecilia._kernels import sampling
from cecilia.errors import CeciliaError, UsageError
from cecilia.sampler import Sampler, SamplingParams, philox4x32, uniform

V = 49_152


def reference(
    logits: npt.NDArray[np.float32], temperature: float, top_k: int, top_p: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Kept ids, ascending, and their probabilities: a stable sort in f64, nothing clever."""
    exact = logits.astype(np.float64)
    order = np.argsort(-exact, kind="stable")
    if top_k:
        order = order[:top_k]
    weights = np.exp((exact[order] - exact.max()) / temperature)
    if top_p < 1:
        reached = np.cumsum(weights)
        order = order[: int(np.searchsorted(reached, top_p * reached[-1])) + 1]
        weights = weights[: len(order)]
    ascending = np.argsort(order)
    return order[ascending], weights[ascending] / weights.sum()


def kept(
    logits: npt.NDArray[np.float32], temperature: float, top_k: int, top_p: float
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    ids = np.empty(logits.size, np.int32)
    weights = np.empty(logits.size, np.float32)
    count = sampling.keep(logits, temperature, top_k, top_p, ids, weights)
    return ids[:count], weights[:count].astype(np.float64) / weights[:count].astype(np.float64).sum()


# The known-answer vectors published with Random123 1.09 for philox4x32, 10 rounds.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == expected


def test_uniform_is_a_53_bit_fraction_of_the_first_two_words() -> None:
    assert uniform(0, 0) == (0x6627E8D5E169C58D >> 11) / 2**53
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
    assert uniform(1 << 32, 0) != uniform(1, 0)
    assert uniform(0, 1 << 32) != uniform(0, 1)


@pytest.mark.parametrize("scale", [0.5, 4.0])
@pytest.mark.parametrize("top_k", [0, 40, V - 1, 2 * V])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 1e-9])
def test_keeps_what_the_reference_keeps(scale: float, top_k: int, top_p: float) -> None:
    logits = (np.random.default_rng(7).standard_normal(V) * scale).astype(np.float32)
    ids, probabilities = kept(logits, 0.8, top_k, top_p)
    expected_ids, expected = reference(logits, 0.8, top_k, top_p)
    # Weights are f32: the border of top_p may fall a few tokens off where thousands share the last percent.
    assert abs(len(ids) - len(expected_ids)) <= 1 + len(expected_ids) // 10_000
    both, mine, theirs = np.intersect1d(ids, expected_ids, return_indices=True)
    assert len(both) == min(len(ids), len(expected_ids))
    assert probabilities[mine] == pytest.approx(expected[theirs], rel=2e-5, abs=1e-30)


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.integers(-3, 3), min_size=1, max_size=70),
    top_k=st.integers(0, 70),
    top_p=st.sampled_from([1.0, 0.9, 0.6, 0.3, 0.05]),
)
def test_ties_go_to_the_lowest_ids(values: list[int], top_k: int, top_p: float) -> None:
    logits = np.array(values, np.float32)
    ids, _ = kept(logits, 0.7, top_k, top_p)
    expected, probabilities = reference(logits, 0.7, top_k, top_p)
    assert list(np.sort(ids)) == list(ids)
    if top_p == 1 or len(probabilities) == 1:
        assert list(ids) == list(expected)
    # Whatever rounding does at the border, no token left out is nearer than one kept, or equal and lower.
    worst = max((-float(logits[i]), int(i)) for i in ids)
    assert all((-float(logits[i]), i) > worst for i in range(len(values)) if i not in set(ids.tolist()))
    assert abs(len(ids) - len(expected)) <= 1


def test_equal_logits_keep_the_first_ones() -> None:
    logits = np.zeros(1000, np.float32)
    assert list(kept(logits, 1.0, 3, 1.0)[0]) == [0, 1, 2]
    assert list(kept(logits, 1.0, 0, 0.0095)[0]) == list(range(10))


@pytest.mark.parametrize("params", [{}, {"temperature": 1, "top_k": 1}, {"temperature": 1, "top_p": 0}])
def test_greedy_takes_the_first_largest_and_draws_nothing(params: dict[str, float]) -> None:
    sampler = Sampler(SamplingParams(**params))  # type: ignore[arg-type]
    logits = np.array([1, 5, -np.inf, 5, 2], np.float32)
    assert sampler.sample(logits) == 1
    assert sampler.step == 0


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 31, 1000])
def test_argmax_at_every_place(size: int) -> None:
    for place in {0, size // 2, size - 1}:
        logits = np.full(size, -np.inf, np.float32)
        logits[place] = -3
        assert sampling.argmax(logits) == place


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-9])
def test_tiny_temperatures_are_greedy_without_nan(temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature, top_p=0.9))
    logits = np.array([0, 3.4e38, -3.4e38, -np.inf, 3.3e38], np.float32)
    assert [sampler.sample(logits) for _ in range(5)] == [1] * 5


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.full(100, -np.inf, np.float32)
    logits[[3, 50]] = 1
    sampler = Sampler(SamplingParams(temperature=2.0, top_k=40, seed=5))
    assert {sampler.sample(logits) for _ in range(200)} == {3, 50}


@pytest.mark.parametrize(
    "bad", [[np.nan, 1], [1, np.nan], [np.inf, 0], [-np.inf, -np.inf], [np.nan] * 40, [0.0] * 20 + [np.nan]]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_numeric_trouble_is_an_error(bad: list[float], temperature: float) -> None:
    with pytest.raises(CeciliaError) as caught:
        Sampler(SamplingParams(temperature=temperature)).sample(np.array(bad, np.float32))
    assert caught.value.code == "numeric_error"


def test_no_logits_is_an_error() -> None:
    with pytest.raises(CeciliaError, match="numeric_error"):
        sampling.argmax(np.empty(0, np.float32))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0, 0, 1), (-1, 0, 1), (np.nan, 0, 1), (1, -1, 1), (1, 0, 0), (1, 0, 1.1)],
)
def test_kernel_refuses_values_out_of_range(temperature: float, top_k: int, top_p: float) -> None:
    with pytest.raises(UsageError, match="invalid_sampling"):
        kept(np.zeros(4, np.float32), temperature, top_k, top_p)


def test_draw_walks_the_running_sum() -> None:
    weights = np.array([0, 1, 0, 3, 4, 0], np.float32)
    assert [sampling.draw(weights, 6, u) for u in (0, 0.1249, 0.125, 0.4999, 0.5, 1 - 2**-53)] == [
        1,
        1,
        3,
        3,
        4,
        4,
    ]


def test_frequencies_are_the_probabilities() -> None:
    """Pearson's statistic over 19 degrees of freedom; 43.8 is exceeded once in a thousand seeds."""
    logits = np.random.default_rng(3).standard_normal(20).astype(np.float32)
    _, probabilities = reference(logits, 0.9, 0, 1.0)
    sampler = Sampler(SamplingParams(temperature=0.9, seed=2026))
    draws = 20_000
    seen = np.bincount([sampler.sample(logits) for _ in range(draws)], minlength=20)
    expected = probabilities * draws
    assert float(((seen - expected) ** 2 / expected).sum()) < 43.8


def test_a_seed_fixes_the_sequence_and_step_resumes_it() -> None:
    rng = np.random.default_rng(11)
    rows = (rng.standard_normal((30, 500)) * 2).astype(np.float32)
    params = SamplingParams(temperature=1.0, top_k=100, top_p=0.9, seed=-42)
    first, second, resumed = Sampler(params), Sampler(params), Sampler(params)
    ids = [first.sample(row) for row in rows]
    assert [second.sample(row) for row in rows] == ids
    resumed.step = 10
    assert [resumed.sample(row) for row in rows[10:]] == ids[10:]
    other = Sampler(SamplingParams(temperature=1.0, top_k=100, top_p=0.9, seed=43))
    assert [other.sample(row) for row in rows] != ids
