# SPDX-License-Identifier: Apache-2.0
"""Views of a source's tensor: some of its rows, its rows in another order, its heads transposed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cecilia.formats.quant import dequantise

from .checkpoint import Rows, SourceTensor
from .tensor_types import REQUANTISED, source_type


@dataclass(frozen=True)
class Reordered:
    """Rows of the source, chosen: `order` [R] names the source's row for every row of the view."""

    source: SourceTensor
    order: np.ndarray

    @property
    def name(self) -> str:
        """The source's."""
        return self.source.name

    @property
    def type_name(self) -> str:
        """The source's."""
        return self.source.type_name

    def read(self, first: int, end: int) -> np.ndarray:
        """Rows first .. end of the view, u8 [R, row bytes]."""
        rows = self.order[first:end]
        low = int(rows.min())
        return self.source.read(low, int(rows.max()) + 1)[rows - low]


@dataclass(frozen=True)
class Transposed:
    """Each head's matrix [R, C] as [C, R]: the view is [heads * C, R] of a source of plain numbers."""

    source: Rows
    per_head: int  # R
    cols: int  # C

    @property
    def name(self) -> str:
        """The source's."""
        return self.source.name

    @property
    def type_name(self) -> str:
        """The source's."""
        return self.source.type_name

    def read(self, first: int, end: int) -> np.ndarray:
        """Rows first .. end of the view, u8 [rows, row bytes]."""
        heads = range(first // self.cols, (end - 1) // self.cols + 1)
        whole = self.source.read(heads.start * self.per_head, heads.stop * self.per_head)
        numbers = whole.reshape(len(heads), self.per_head, self.cols, -1)  # the last axis: bytes of a number
        turned = numbers.transpose(0, 2, 1, 3).reshape(len(heads) * self.cols, -1)
        return turned[first - heads.start * self.cols : end - heads.start * self.cols]


@dataclass(frozen=True)
class Decoded:
    """The values of a quantised tensor of `cols` columns, f32, for a view to cut: its blocks are gone."""

    source: SourceTensor
    cols: int

    @staticmethod
    def if_blocks(source: SourceTensor, cols: int) -> Rows:
        """`source` itself if it holds plain numbers."""
        plain = source_type(source.name, source.type_name).keep in ("f32", "bf16")
        return source if plain else Decoded(source, cols)

    @property
    def name(self) -> str:
        """The source's."""
        return self.source.name

    @property
    def type_name(self) -> str:
        """A type of its own."""
        return REQUANTISED

    def read(self, first: int, end: int) -> np.ndarray:
        """Rows first .. end, u8 [R, 4 * cols]."""
        kind = source_type(self.name, self.source.type_name)
        values = dequantise(kind.decode(self.source.read(first, end), self.cols))
        return np.ascontiguousarray(values, "<f4").view(np.uint8)


def halves_of_pairs(rows: int, heads: int) -> np.ndarray:
    """[R]: for every row of the target, the row of the source that holds it.

    The source keeps pairs that rotate together side by side (x0 y0 x1 y1 ...), the target the halves apart
    (x0 x1 ... y0 y1 ...). A row moves whole, so no value changes.
    """
    pairs = np.arange(rows).reshape(heads, -1, 2)  # [H, pair, member]
    return pairs.transpose(0, 2, 1).reshape(-1)  # [H, member, pair]


def rows_of_heads(heads: int, per_head: int, first: int, end: int) -> np.ndarray:
    """[H * (end - first)]: rows first .. end of every head of `per_head` rows."""
    return np.arange(heads * per_head).reshape(heads, per_head)[:, first:end].reshape(-1)
