# SPDX-License-Identifier: Apache-2.0
"""Tensors of a model file as operands of the kernels, by their checkpoint names."""

from __future__ import annotations

from cecilia._kernels.buffer import Activations, Vector
from cecilia._kernels.linear import Linear, Weight
from cecilia.formats.l3r import ModelFile


class Weights:
    """Operands over tensors that were checked before, wherever they are."""

    def __init__(self, file: ModelFile) -> None:
        self._source = file

    def weight(self, name: str) -> Weight:
        """The matrix `name`, in place."""
        entry = self._source.tensors[name]
        return Weight(self._source.data(name), entry.format, entry.rows, entry.cols)

    def parts(self, name: str, count: int) -> list[Weight]:
        """The rows of the matrix `name` as `count` matrices, in place."""
        whole = self.weight(name)
        rows = whole.rows // count
        return [whole.part(i * rows, rows) for i in range(count)]

    def vector(self, *names: str) -> Vector:
        """The vectors `names` one after another, copied."""
        return Vector(b"".join(self._source.data(name) for name in names))

    def linear(self, *names: str) -> Linear:
        """One layer of the matrices `names`, its output their outputs side by side."""
        return Linear([self.weight(name) for name in names])


def activations(rows: int, cols: int) -> Activations:
    """Input of linear layers, quantised too where the width allows it."""
    return Activations(rows, cols, ints=cols % 32 == 0)
