# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence

from typing_extensions import Buffer

from cecilia._kernels.buffer import Activations, Matrix

class Weight:
    rows: int
    cols: int
    format: str
    def __init__(self, data: Buffer, format: str, rows: int, cols: int) -> None: ...
    def part(self, first: int, rows: int) -> Weight: ...
    def gather(self, ids: Sequence[int], out: Matrix) -> None: ...

class Linear:
    rows: int
    cols: int
    ints: bool
    def __init__(self, weights: Sequence[Weight]) -> None: ...
    def __call__(self, x: Activations, tokens: int, y: Matrix, *, add: bool = False) -> None: ...
