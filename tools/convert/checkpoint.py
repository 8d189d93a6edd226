# SPDX-License-Identifier: Apache-2.0
"""A published checkpoint as the converter sees it, whatever container it came in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cecilia.arch.base import TensorSpec
from cecilia.errors import ModelFileError


class Rows(Protocol):
    """Rows of a tensor that can be read piece by piece: a tensor of the source, or a view of one."""

    @property
    def name(self) -> str:
        """The tensor's name in the source."""

    @property
    def type_name(self) -> str:
        """Its type, a key of `tensor_types.TYPES`."""

    def read(self, first: int, end: int) -> np.ndarray:
        """Rows first .. end, u8 [R, row bytes]. Raises ModelFileError."""


@dataclass(frozen=True)
class SourceTensor:
    """One tensor; its rows (of the last axis) lie one by one from byte `offset` on. A vector is one row."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.nbytes // math.prod(self.shape[:-1])

    def read(self, first: int, end: int) -> np.ndarray:
        """Rows first .. end, u8 [R, row bytes]. Raises ModelFileError if the file has become shorter."""
        count = (end - first) * self.row_bytes
        raw = np.fromfile(self.path, np.uint8, count, offset=self.offset + first * self.row_bytes)
        if raw.size != count:
            raise ModelFileError(
                "truncated_model", f"the file ended inside the tensor {self.name!r} while it was read"
            )
        return raw.reshape(-1, self.row_bytes)

    def shaped(self, *shape: int) -> SourceTensor:
        """The same bytes in another shape of as many values; block types need the last axis to stay."""
        return replace(self, shape=shape)

    def part(self, index: int) -> SourceTensor:
        """One of the matrices [R, K] stacked in a tensor [E, R, K]."""
        nbytes = self.nbytes // self.shape[0]
        return replace(self, shape=self.shape[1:], offset=self.offset + index * nbytes, nbytes=nbytes)


Values = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Mapped:
    """A tensor of the target and where it comes from.

    `values` changes the f32 values of a vector on their way.
    """

    name: str
    spec: TensorSpec
    source: Rows
    values: Values | None = None


def check_shape(name: str, found: tuple[int, ...], spec: TensorSpec) -> None:
    """Raise ModelFileError unless a source's tensor has the shape of the target's."""
    expect_shape(name, found, (spec.cols,) if spec.rank == 1 else (spec.rows, spec.cols))


def expect_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise ModelFileError unless the two shapes are one."""
    if found != expected:
        raise ModelFileError("wrong_shape", f"the tensor {name} is {list(found)}; expected {list(expected)}")


@dataclass(frozen=True)
class Vocabulary:
    """The text side of a model; `tokenizer` is a tokenizer.json, None when the file is to have none.

    `text`: the metadata object of that name.
    """

    tokenizer: bytes | None
    chat_template: str | None
    text: dict[str, Any]


def text_metadata(
    bos_id: int | None, add_bos: bool, eos_ids: list[int], pad_id: int | None
) -> dict[str, Any]:
    """The metadata object `text`."""
    return {"bos_id": bos_id, "add_bos": add_bos, "eos_ids": eos_ids, "pad_id": pad_id}


@dataclass(frozen=True)
class Checkpoint:
    """An opened source, every tensor of it accounted for.

    `files` are all the files it consists of, `vocabulary` makes its text side (given the --tokenizer choice),
    `notes` say what of it the target leaves out.
    """

    files: list[Path]
    architecture: str
    hyper: dict[str, Any]
    tensors: list[Mapped]
    vocabulary: Callable[[str | None], Vocabulary]
    name: str
    license: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def shown(value: Any) -> str:
    """A value from a file as one short line for an error message."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
