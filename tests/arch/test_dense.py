# SPDX-License-Identifier: Apache-2.0
"""The dense decoders against the plain numpy forward, and against itself: every path gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cecilia._kernels import isa, threads
from cecilia.arch import llama
from cecilia.engine.load import load_runner
from cecilia.engine.recipes import profiles_of
from cecilia.engine.runner import Runner
from cecilia.formats.l3r import open_model
from cecilia.formats.quant import dequantise, unpack
from tests.reference import qwen as reference
from tools.make_tiny import make_tiny

Array = npt.NDArray[np.float32]

PROMPT_TOKENS = 150  # two full KV pages and part of a third
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one head each, tied": {"kv_heads": 4, "tied": True},
    "one KV head": {"kv_heads": 1, "layers": 3},
    "odd sizes": {"width": 80, "head_dim": 48, "heads": 3, "kv_heads": 1, "ff": 100, "vocab": 259},
    "biases": {"architecture": "qwen2"},
    "biases, odd sizes": {
        "architecture": "qwen2",
        "width": 80,
        "head_dim": 48,
        "heads": 3,
        "kv_heads": 1,
        "ff": 100,
        "vocab": 259,
    },
    "normed heads": {"architecture": "qwen3", "head_dim": 32, "tied": True},
    "normed heads, odd sizes": {
        "architecture": "qwen3",
        "width": 80,
        "head_dim": 48,
        "ff": 100,
        "vocab": 259,
    },
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tiny model file of given format and shape, once each."""
    made: dict[str, Path] = {}

    def make(quant: str, shape: str = "grouped") -> Path:
        name = f"{quant} {shape}".replace(",", "").replace(" ", "-")
        if name not in made:
            made[name] = tmp_path_factory.mktemp("dense") / f"{name}.l3r"
            make_tiny(made[name], quant=quant, seed=5, **SHAPES[shape])
        return made[name]

    return make


@pytest.fixture(params=isa.available())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    before = isa.name()
    isa.use(request.param)
    yield request.param
    isa.use(before)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return np.random.default_rng(11).integers(0, 256, PROMPT_TOKENS).tolist()


def reference_logits(path: Path, ids: Sequence[int]) -> Array:
    """Logits [T, V] by the numpy forward in f64 on the file's dequantised weights."""
    weights: dict[str, Any] = {}
    with open_model(path) as file:
        for name, t in file.tensors.items():
            data = file.data(name)
            if t.rank == 1:
                weights[name] = np.frombuffer(data, np.float32).copy()
            else:
                weights[name] = dequantise(unpack(data, t.format, t.rows, t.cols))
        logits = reference.forward(
            file.metadata["architecture"], weights, file.metadata["hyper"], ids, np.float64
        )
    return np.asarray(logits, np.float32)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("quant", ["f32", "bf16"])
def test_float_weights_give_the_reference_logits(
    tiny: Callable[..., Path], quant: str, shape: str, prompt: list[int]
) -> None:
    path = tiny(quant, shape)
    runner = load_runner(path, profile="f32", threads=1)
    logits = runner.evaluate(prompt)
    runner.close()
    np.testing.assert_allclose(logits, reference_logits(path, prompt), atol=1e-4, rtol=0)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(("profile", "bound"), [("bf16-v1", 0.02), ("int8-v1", 0.03)])
def test_a_kv_recipe_costs_little(
    tiny: Callable[..., Path], profile: str, bound: float, prompt: list[int]
) -> None:
    """Error relative to the size of the logits: 8 bits of mantissa, and 7 bits of the largest of a vector."""
    path = tiny("f32")
    runner = load_runner(path, profile=profile, threads=1)
    error = runner.evaluate(prompt) - (exact := reference_logits(path, prompt))
    runner.close()
    assert np.sqrt((error**2).mean() / (exact**2).mean()) < bound


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("quant", ["q8_32", "q4_32", "q4a_32"])
def test_quantised_weights_cost_their_activations_rounding(
    tiny: Callable[..., Path], quant: str, prompt: list[int]
) -> None:
    """The weights are exact here; activations keep 7 bits of the largest of a block."""
    path = tiny(quant)
    runner = load_runner(path, profile="f32", threads=1)
    error = runner.evaluate(prompt) - (exact := reference_logits(path, prompt))
    runner.close()
    assert np.sqrt((error**2).mean() / (exact**2).mean()) < 0.03


def token_by_token(runner: Runner, prompt: Sequence[int]) -> bytes:
    runner.reset()
    return b"".join(runner.feed([token]).tobytes() for token in prompt)


ALL_PATHS = [(count, chunk) for count in (1, 2) for chunk in (1, 7, 64, None)]
# Real weights take seconds a path: each chunking and each thread count once, the tiny model has all pairs.
FEW_PATHS = [(2, 1), (1, 7), (2, 64), (2, None)]


def assert_one_arithmetic(runner: Runner, prompt: list[int], paths: list[tuple[int, int | None]]) -> None:
    """The bytes of all logits are the same on all `paths` (threads, chunk) and when the session is reused."""
    threads.set_threads(1)
    whole = runner.evaluate(prompt).tobytes()
    width = 4 * runner.vocab
    for count, chunk in paths:
        threads.set_threads(count)
        assert runner.evaluate(prompt, chunk=chunk).tobytes() == whole, f"{chunk=} threads={count}"
    threads.set_threads(1)
    other = prompt[:100] + [token ^ 1 for token in prompt[100:]]
    runner.evaluate(other)
    assert runner.session.sync(prompt) == 100
    assert runner.feed(prompt[100:]).tobytes() == whole[-width:]
    assert runner.session.sync(prompt) == len(prompt) - 1
    assert runner.feed(prompt[-1:]).tobytes() == whole[-width:]


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("profile", profiles_of(llama))
@pytest.mark.parametrize(
    ("quant", "shape"),
    [
        *((quant, "grouped") for quant in ("f32", "bf16", "q8_32", "q4_32", "q4a_32")),
        *((quant, shape) for quant in ("f32", "q8_32") for shape in ("biases", "normed heads")),
    ],
)
def test_one_arithmetic(
    tiny: Callable[..., Path], quant: str, shape: str, profile: str, prompt: list[int]
) -> None:
    runner = load_runner(tiny(quant, shape), profile=profile, threads=1)
    assert_one_arithmetic(runner, prompt, ALL_PATHS)
    assert token_by_token(runner, prompt) == runner.evaluate(prompt).tobytes()
    runner.close()


@pytest.mark.model
@pytest.mark.parametrize("profile", profiles_of(llama))
def test_one_arithmetic_on_real_weights(
    model_path: Path, fixtures_dir: Path, profile: str, instruction_set: str
) -> None:
    if instruction_set == "scalar":
        pytest.skip("the reference kernels take minutes here; they are covered by the tiny model")
    ids = np.load(fixtures_dir / "smollm2" / "golden_llamacpp.npz")["ids"][0, :PROMPT_TOKENS].tolist()
    runner = load_runner(model_path, profile=profile, threads=1, context=256)
    assert_one_arithmetic(runner, ids, FEW_PATHS)
    runner.close()
