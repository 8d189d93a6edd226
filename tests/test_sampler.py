# SPDX-License-Identifier: Apache-2.0
"""The sampler against a plain numpy reference, published random vectors and the statistics it promises."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cecilia._kernels import sampling
from cecilia.errors import CeciliaError, UsageError
from cecilia.sampler import UNLIKELY, Sampler, SamplingParams, philox4x32, uniform

Logits = npt.NDArray[np.float32]

V = 49_152


@dataclass(frozen=True)
class Cut:
    """What reduces the tokens to draw from."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 0.8


def reference(logits: npt.NDArray[Any], cut: Cut) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Kept ids, ascending, and their probabilities: a stable sort in f64, nothing clever."""
    exact = logits.astype(np.float64)
    order = np.argsort(-exact, kind="stable")
    if cut.top_k:
        order = order[: cut.top_k]
    weights = np.exp(exact[order] - exact.max())
    if cut.top_p < 1:
        reached = np.cumsum(weights)
        order = order[: int(np.searchsorted(reached, cut.top_p * reached[-1])) + 1]
    order = order[weights[: len(order)] >= cut.min_p]
    ids = np.sort(order)
    heated = np.exp((exact[ids] - exact.max()) / cut.temperature)
    return ids, heated / heated.sum()


def kept(logits: Logits, cut: Cut) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    ids = np.empty(logits.size, np.int32)
    weights = np.empty(logits.size, np.float32)
    count = sampling.keep(
        logits,
        ids,
        weights,
        top_k=cut.top_k,
        top_p=cut.top_p,
        reach=-math.log(cut.min_p) if cut.min_p else math.inf,
        temperature=cut.temperature,
    )
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


def spread(shape: str, size: int) -> Logits:
    """Logits as they come: broad, nearly flat, one far above the others, the likely ones side by side."""
    logits = np.random.default_rng(7).standard_normal(size) * {"flat": 0.5, "peaked": 0.3}.get(shape, 4)
    if shape == "peaked":
        logits[size // 3] = 18
    if shape == "sorted":
        logits = -np.sort(-logits)
    return logits.astype(np.float32)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000, V])
@pytest.mark.parametrize("shape", ["broad", "flat", "peaked", "sorted"])
@pytest.mark.parametrize("top_k", [0, 40, V - 1, 2 * V])
@pytest.mark.parametrize(
    ("top_p", "min_p"), [(1.0, 0), (0.95, 0), (1e-9, 0), (1 - 1e-12, 0), (0.9, 0.03), (1, 0.1)]
)
def test_keeps_what_the_reference_keeps(
    size: int, shape: str, top_k: int, top_p: float, min_p: float
) -> None:
    logits = spread(shape, size)
    cut = Cut(top_k, top_p, min_p)
    ids, probabilities = kept(logits, cut)
    expected_ids, expected = reference(logits, cut)
    # Weights are f32: the border of top_p may fall a few tokens off where thousands share the last percent.
    assert abs(len(ids) - len(expected_ids)) <= 1 + len(expected_ids) // 10_000
    both, mine, theirs = np.intersect1d(ids, expected_ids, return_indices=True)
    assert len(both) == min(len(ids), len(expected_ids))
    np.testing.assert_allclose(probabilities[mine], expected[theirs], rtol=2e-5, atol=1e-30)


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.integers(-3, 3), min_size=1, max_size=200),
    top_k=st.integers(0, 200),
    top_p=st.sampled_from([1.0, 0.9, 0.6, 0.3, 0.05]),
    min_p=st.sampled_from([0, 0.04, 0.3]),
)
def test_ties_go_to_the_lowest_ids(values: list[int], top_k: int, top_p: float, min_p: float) -> None:
    logits = np.array(values, np.float32)
    cut = Cut(top_k, top_p, min_p)
    ids, _ = kept(logits, cut)
    expected, probabilities = reference(logits, cut)
    assert list(np.sort(ids)) == list(ids)
    if top_p == 1 or len(probabilities) == 1:
        assert list(ids) == list(expected)
    # Whatever rounding does at the border, no token left out is nearer than one kept, or equal and lower.
    worst = max((-float(logits[i]), int(i)) for i in ids)
    assert all((-float(logits[i]), i) > worst for i in range(len(values)) if i not in set(ids.tolist()))
    assert abs(len(ids) - len(expected)) <= 1


def test_equal_logits_keep_the_first_ones() -> None:
    logits = np.zeros(1000, np.float32)
    assert list(kept(logits, Cut(top_k=3))[0]) == [0, 1, 2]
    assert list(kept(logits, Cut(top_p=0.0095))[0]) == list(range(10))
    assert list(kept(logits, Cut(top_k=500, min_p=1))[0]) == list(range(500))


def test_top_p_counts_at_temperature_one_and_within_top_k() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float64)).astype(np.float32)
    # 0.4 + 0.3 reach 0.69 of all; of the three nearest, 0.9 together, they reach 0.77.
    assert list(kept(logits, Cut(top_p=0.69, temperature=100))[0]) == [0, 1]
    assert list(kept(logits, Cut(top_p=0.71, temperature=0.01))[0]) == [0, 1, 2]
    assert list(kept(logits, Cut(top_k=3, top_p=0.77, temperature=100))[0]) == [0, 1]
    # min_p is a share of the largest: 0.2 is half of 0.4.
    assert list(kept(logits, Cut(min_p=0.49))[0]) == [0, 1, 2]
    assert list(kept(logits, Cut(min_p=0.51))[0]) == [0, 1]


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
    "bad",
    [
        *({"temperature": value} for value in (0, -1, np.nan)),
        *({"top_p": value} for value in (0, 1.1)),
        {"top_k": -1},
        {"min_p": 1.1},
    ],
)
def test_kernel_refuses_values_out_of_range(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="invalid_sampling"):
        kept(np.zeros(4, np.float32), Cut(**bad))


@pytest.mark.parametrize("size", [63, 64, 65, 128, 129, 1000])
def test_draw_finds_the_place_in_any_block(size: int) -> None:
    weights = np.random.default_rng(size).integers(0, 9, size).astype(np.float32)  # sums are exact
    weights[-1] = 1
    whole = np.cumsum(weights.astype(np.float64))
    for share in (0, 0.3, 0.5, 0.9, 1 - 2**-40):
        expected = int(np.argmax(whole > share * whole[-1]))
        assert sampling.draw(weights, size, share) == expected


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
    _, probabilities = reference(logits, Cut(temperature=0.9))
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


# -- what is done to the logits before the choice ---------------------------------------------------------


def adjusted(
    logits: Logits, params: SamplingParams, prompt: list[int], answer: list[int]
) -> npt.NDArray[np.float64]:
    """Bias and penalties token by token, in f64, as the module's text has them."""
    out = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        out[token] += bias
    history = prompt + answer
    reach = len(history) if params.repeat_last_n < 0 else params.repeat_last_n
    for token in set(history[len(history) - min(reach, len(history)) :]):
        out[token] *= params.repeat_penalty if out[token] <= 0 else 1 / params.repeat_penalty
    for token in set(answer):
        out[token] -= params.presence_penalty + params.frequency_penalty * answer.count(token)
    return out


ADJUSTING = [
    {"logit_bias": ((3, 2.5), (7, -100.0), (0, 100.0))},
    {"repeat_penalty": 1.3},
    {"repeat_penalty": 0.8},
    {"repeat_penalty": 1.3, "repeat_last_n": 5},
    {"repeat_penalty": 1.3, "repeat_last_n": -1},
    {"repeat_penalty": 1.3, "repeat_last_n": 0},
    {"presence_penalty": 0.9},
    {"frequency_penalty": 0.4},
    {"presence_penalty": -0.5, "frequency_penalty": 0.3, "repeat_penalty": 1.1, "logit_bias": ((5, 1.0),)},
]


@pytest.mark.parametrize("fields", ADJUSTING, ids=str)
def test_greedy_follows_bias_and_penalties(fields: dict[str, Any]) -> None:
    rng = np.random.default_rng(5)
    params = SamplingParams(**fields)
    prompt = rng.integers(0, 20, 90).tolist()
    sampler, answer = Sampler(params, prompt), list[int]()
    for _ in range(200):
        logits = (rng.standard_normal(20) * 0.5).astype(np.float32)
        before = logits.copy()
        expected = adjusted(logits, params, prompt, answer)
        answer.append(sampler.sample(logits))
        assert answer[-1] == int(expected.argmax())
        assert (logits == before).all()
    assert sampler.step == 0


def test_draws_follow_bias_and_penalties() -> None:
    """Pearson's statistic against the reference's probabilities; over 43.8 once in a thousand seeds."""
    logits = np.random.default_rng(3).standard_normal(20).astype(np.float32)
    prompt, answer = [1, 2, 2, 3], [4, 5, 5, 5]
    params = SamplingParams(
        temperature=0.9,
        seed=11,
        logit_bias=((6, 1.5),),
        repeat_penalty=1.4,
        presence_penalty=0.3,
        frequency_penalty=0.2,
    )
    _, probabilities = reference(adjusted(logits, params, prompt, answer), Cut(temperature=0.9))
    seen = np.zeros(20)
    draws = 10_000
    for step in range(draws):
        sampler = Sampler(params, prompt)
        for token in answer:
            sampler.accept(token)
        sampler.step = step
        seen[sampler.sample(logits)] += 1
    expected = probabilities * draws
    assert float(((seen - expected) ** 2 / expected).sum()) < 43.8


def test_a_resumed_generation_goes_on_the_same() -> None:
    rows = (np.random.default_rng(1).standard_normal((40, 100)) * 2).astype(np.float32)
    params = SamplingParams(temperature=1.0, seed=3, repeat_penalty=1.5, frequency_penalty=0.5)
    whole = Sampler(params, [1, 2, 3])
    ids = [whole.sample(row) for row in rows]
    resumed = Sampler(params, [1, 2, 3])
    for token in ids[:15]:
        resumed.accept(token)
    resumed.step = 15
    assert [resumed.sample(row) for row in rows[15:]] == ids[15:]


def bits(size: int, allowed: set[int]) -> npt.NDArray[np.uint32]:
    words = [sum(1 << (i % 32) for i in allowed if i // 32 == word) for word in range(-(-size // 32))]
    return np.array(words, np.uint32)


@pytest.mark.parametrize("fields", [{}, {"temperature": 5.0}, {"temperature": 5.0, "top_k": 2}], ids=str)
@pytest.mark.parametrize("size", [31, 32, 33, 100])
def test_a_mask_leaves_what_it_allows(fields: dict[str, Any], size: int) -> None:
    allowed = {0, 7, size - 1}
    sampler = Sampler(SamplingParams(**fields, repeat_penalty=1.1, logit_bias=((5, 100.0),)))
    rng = np.random.default_rng(size)
    seen = set()
    for _ in range(200):
        logits = rng.standard_normal(size).astype(np.float32)
        token = sampler.sample(logits, bits(size, allowed))
        assert token in allowed
        seen.add(token)
    assert seen == allowed
    assert sampler.sample(np.eye(1, size, 5, dtype=np.float32)[0]) == 5  # the next one without a mask


def test_a_mask_that_allows_nothing_or_does_not_fit() -> None:
    sampler, logits = Sampler(SamplingParams()), np.zeros(40, np.float32)
    with pytest.raises(CeciliaError, match="numeric_error"):
        sampler.sample(logits, bits(40, set()))
    for bad in (bits(32, {1}), bits(40, {1}).astype(np.int64)):
        with pytest.raises(UsageError, match="invalid_mask"):
            sampler.sample(logits, bad)


# -- log-probabilities ------------------------------------------------------------------------------------


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_logprobs_are_the_log_softmax_of_untouched_logits(top: int) -> None:
    logits = (np.random.default_rng(9).standard_normal(1000) * 4).astype(np.float32)
    sampler = Sampler(SamplingParams(temperature=0.3, top_k=2, logit_bias=((17, 50.0),)))
    token = sampler.sample(logits)
    assert token == 17
    exact = logits.astype(np.float64)
    expected = exact - np.logaddexp.reduce(exact)
    likeliest = np.argsort(-exact, kind="stable")[:top].tolist()
    entries = sampler.logprobs(logits, token, top)
    assert [each for each, _ in entries] == [token, *likeliest]
    assert [value for _, value in entries] == pytest.approx(expected[[token, *likeliest]].tolist(), rel=1e-12)


def test_logprobs_of_ties_and_of_few_tokens() -> None:
    logits = np.log(np.array([1, 2, 2, 1, 2], np.float64)).astype(np.float32)
    entries = Sampler(SamplingParams()).logprobs(logits, 3, 20)
    assert [token for token, _ in entries] == [3, 1, 2, 4, 0, 3]
    assert [math.exp(value) for _, value in entries] == pytest.approx(
        [1 / 8, 1 / 4, 1 / 4, 1 / 4, 1 / 8, 1 / 8], rel=1e-6
    )


def test_unlikely_tokens_have_a_finite_logprob() -> None:
    logits = np.array([3e4, 0, -np.inf, 3e4 - 9000], np.float32)
    entries = Sampler(SamplingParams()).logprobs(logits, 2, 4)
    assert entries == [(2, UNLIKELY), (0, 0.0), (3, -9000.0), (1, UNLIKELY), (2, UNLIKELY)]
    assert UNLIKELY == -9999.0
