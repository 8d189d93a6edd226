# SPDX-License-Identifier: Apache-2.0
"""A published checkpoint as the converter sees it, whatever container it came in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cecilia.arch.base import TensorSpec
from cecilia.errors import ModelFileError


@dataclass(frozen=True)
class SourceTensor:
    """One matrix or vector, read piece by piece: its rows lie one after another from byte `offset` on."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    row_bytes: int

    def read(self, first: int, end: int) -> np.ndarray:
        """Rows first .. end, u8 [R, row bytes]; a vector is one row. Raises ModelFileError if they went."""
        count = (end - first) * self.row_bytes
        raw = np.fromfile(self.path, np.uint8, count, offset=self.offset + first * self.row_bytes)
        if raw.size != count:
            raise ModelFileError(
                "truncated_model", f"the file ended inside the tensor {self.name!r} while it was read"
            )
        return raw.reshape(-1, self.row_bytes)


@dataclass(frozen=True)
class Mapped:
    """A tensor of the target and where it comes from.

    `interleaved_heads`: the heads whose rows the source keeps interleaved, 0 when rows stay where they are.
    """

    name: str
    spec: TensorSpec
    source: SourceTensor
    interleaved_heads: int = 0

    def read(self, first: int, end: int) -> np.ndarray:
        """Rows first .. end of the target, u8 [R, row bytes] in the source's type."""
        if not self.interleaved_heads:
            return self.source.read(first, end)
        rows = _halves_of_pairs(self.spec.rows, self.interleaved_heads)[first:end]
        low = int(rows.min())
        return self.source.read(low, int(rows.max()) + 1)[rows - low]


def _halves_of_pairs(rows: int, heads: int) -> np.ndarray:
    """[R]: for every row of the target, the row of the source that holds it.

    The source keeps pairs that rotate together side by side (x0 y0 x1 y1 ...), the target the halves apart
    (x0 x1 ... y0 y1 ...). A row moves whole, so no value changes.
    """
    pairs = np.arange(rows).reshape(heads, -1, 2)  # [H, pair, member]
    return pairs.transpose(0, 2, 1).reshape(-1)  # [H, member, pair]


def check_shape(name: str, found: tuple[int, ...], spec: TensorSpec) -> None:
    """Raise ModelFileError unless a source's tensor has the shape of the target's."""
    expected = (spec.cols,) if spec.rank == 1 else (spec.rows, spec.cols)
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


@dataclass(frozen=True)
class Checkpoint:
    """An opened source, every tensor of it accounted for.

    `files` are all the files it consists of, `vocabulary` makes its text side (given the --tokenizer choice).
    """

    files: list[Path]
    architecture: str
    hyper: dict[str, Any]
    tensors: list[Mapped]
    vocabulary: Callable[[str | None], Vocabulary]
    name: str
    license: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


def shown(value: Any) -> str:
    """A value from a file as one short line for an error message."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
