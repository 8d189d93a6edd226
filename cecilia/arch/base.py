# SPDX-License-Identifier: Apache-2.0
"""What an architecture is: the protocol its module fulfils, and the strict checks all of them share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from cecilia.errors import ModelFileError
from cecilia.formats.l3r import TensorEntry
from cecilia.formats.quant import FORMATS
from cecilia.layers.weights import Weights
from cecilia.state.state import State

MAX_INTEGER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor of the file must be. A vector has rank 1, one row, and format f32; layer -1 is none."""

    rank: int
    rows: int
    cols: int
    layer: int
    formats: frozenset[str]


@dataclass(frozen=True, slots=True)
class Hints:
    """What an architecture's text needs: think tags, stop strings."""

    think: tuple[str, str] | None = None
    stops: tuple[str, ...] = ()


class Spec(Protocol):
    """Hyper-parameters: a frozen dataclass of an architecture's own, of which all others know only this."""

    @property
    def vocab(self) -> int: ...
    @property
    def context(self) -> int: ...


class Model(Protocol):
    """Weights bound to operands for at most `chunk` tokens a call; the sequence's state is the caller's."""

    @property
    def chunk(self) -> int: ...

    def forward(
        self, tokens: Sequence[int], state: State, first: int, *, last_only: bool
    ) -> NDArray[np.float32]:
        """Evaluate tokens [T] at positions first, first + 1 ... and return logits f32 [T, V].

        `state` holds the first `first` positions, and its pages have room for T more. With `last_only`:
        [1, V], a view that the next call overwrites.
        """


S = TypeVar("S", bound=Spec)


class Architecture(Protocol[S]):
    """A module of this package; its first lines state the layer recipe."""

    HINTS: Hints
    RECIPES: tuple[str, ...]
    """The KV recipes it has; `kv` below is one of them."""

    def spec_from(self, hyper: Mapping[str, object]) -> S:
        """The spec of a file's `hyper`. Raises ModelFileError `bad_hyper` naming the key."""

    def tensors(self, spec: S) -> dict[str, TensorSpec]:
        """All tensors of the file, by checkpoint name."""

    def looked_up(self, spec: S) -> frozenset[str]:
        """The tensors of which a token reads one row and nothing else."""

    def longest_window(self, spec: S) -> int:
        """Most positions of a window, with RoPE stretched where the model's makers say how."""

    def for_window(self, spec: S, window: int) -> S:
        """The spec for a window of at most `longest_window`: the same, or with stretched RoPE.

        A stretched model computes something else from the first position on.
        """

    def rope_mode(self, spec: S) -> str:
        """How RoPE is stretched: "default", or for example "yarn-2". States of two modes never mix."""

    def page_bytes(self, spec: S, kv: str) -> int:
        """Bytes of a KV page, before anything is bound: what a context will cost."""

    def state_bytes(self, spec: S) -> int:
        """Bytes of a sequence's state that do not grow with it; 0 when there is none."""

    def bind(self, spec: S, weights: Weights, *, kv: str, chunk: int) -> Model:
        """The model over checked weights, with a cache of recipe `kv`."""


def vector(cols: int, layer: int = -1) -> TensorSpec:
    """A norm's weight."""
    return TensorSpec(1, 1, cols, layer, frozenset({"f32"}))


def matrix(rows: int, cols: int, layer: int = -1) -> TensorSpec:
    """A linear layer's weight: any format whose block divides the columns."""
    formats = frozenset(name for name, fmt in FORMATS.items() if cols % fmt.block == 0)
    return TensorSpec(2, rows, cols, layer, formats)


D = TypeVar("D")


def parse_hyper(
    cls: type[D], hyper: Mapping[str, object], *, zero: Sequence[str] = (), negative: Sequence[str] = ()
) -> D:
    """Fill the dataclass `cls` of int (1 .. 2**31 - 1), float (finite, above 0) and bool fields from `hyper`.

    The ints named in `zero` may be 0, and the floats named in `negative` are below 0 instead. Raises
    ModelFileError `bad_hyper` for an unknown or missing key and for a value of another type or range.
    """
    known = {field.name: field.type for field in fields(cls)}  # type: ignore[arg-type]
    for key in sorted(hyper.keys() - known.keys()):
        raise bad_hyper(key, "is unknown")
    values: dict[str, Any] = {}
    for key, kind in known.items():
        if key not in hyper:
            raise bad_hyper(key, "is missing")
        value = hyper[key]
        if key in negative and isinstance(value, int | float):
            value = -value
        if not (_is_valid(kind, value) or (key in zero and value == 0 and type(value) is int)):
            raise bad_hyper(key, f"is {str(hyper[key])[:40]!r}, expected a {kind} within its range")
        values[key] = float(hyper[key]) if kind == "float" else hyper[key]  # type: ignore[arg-type]
    return cls(**values)


def _is_valid(kind: object, value: object) -> bool:
    if kind == "bool" or isinstance(value, bool):
        return kind == "bool" and isinstance(value, bool)
    if kind == "int":
        return isinstance(value, int) and 1 <= value <= MAX_INTEGER
    return isinstance(value, int | float) and value > 0 and math.isfinite(value)


def bad_hyper(key: str, fact: str) -> ModelFileError:
    """The error for hyper-parameter `key`, to be raised by the caller."""
    return ModelFileError("bad_hyper", f"hyper-parameter {key} {fact}")


def check_tensors(expected: Mapping[str, TensorSpec], found: Mapping[str, TensorEntry]) -> None:
    """Raises ModelFileError `missing_tensor`, `unknown_tensor` or `bad_tensor` at the first difference."""
    for name, spec in expected.items():
        entry = found.get(name)
        if entry is None:
            raise ModelFileError(
                "missing_tensor", f"tensor {name} ({spec.rows} x {spec.cols}) is not in the file"
            )
        _check_tensor(name, spec, entry)
    for name in sorted(found.keys() - expected.keys()):
        raise ModelFileError("unknown_tensor", f"tensor {name} does not belong to this architecture")


def _check_tensor(name: str, spec: TensorSpec, entry: TensorEntry) -> None:
    if (entry.rank, entry.rows, entry.cols) != (spec.rank, spec.rows, spec.cols):
        found = f"has rank {entry.rank} and is {entry.rows} x {entry.cols}"
        wanted = f"rank {spec.rank} and {spec.rows} x {spec.cols}"
    elif entry.layer != spec.layer:
        found, wanted = f"is filed under layer {entry.layer}", str(spec.layer)
    elif entry.format not in spec.formats:
        found, wanted = f"has format {entry.format}", f"one of: {' '.join(sorted(spec.formats))}"
    else:
        return
    raise ModelFileError("bad_tensor", f"tensor {name} {found}, expected {wanted}")
