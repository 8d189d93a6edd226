# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence

from cecilia._kernels.buffer import Activations, Matrix, Vector
from cecilia._kernels.linear import Weight

class Routes:
    experts: int
    used: int
    capacity: int
    tokens: int
    def __init__(self, *, experts: int, used: int, capacity: int) -> None: ...
    def of(self, token: int) -> list[tuple[int, float]]: ...

class GroupRouter:
    def __init__(self, bias: Vector, *, groups: int, groups_used: int, scale: float) -> None: ...
    def __call__(self, logits: Matrix, tokens: int, routes: Routes) -> None: ...

class ExpertBuffers:
    cols: int
    ff: int
    shared_ff: int
    used: int
    capacity: int
    def __init__(self, *, cols: int, ff: int, shared_ff: int, used: int, capacity: int) -> None: ...

class Experts:
    experts: int
    used: int
    capacity: int
    ff: int
    shared_ff: int
    cols: int
    ints: bool
    def __init__(
        self,
        gate: Sequence[Weight],
        up: Sequence[Weight],
        down: Sequence[Weight],
        *,
        shared: tuple[Weight, Weight, Weight] | None = None,
        buffers: ExpertBuffers,
    ) -> None: ...
    def __call__(self, x: Activations, routes: Routes, y: Matrix) -> None: ...

class Grouped:
    groups: int
    rows: int
    cols: int
    ints: bool
    def __init__(self, weights: Sequence[Weight]) -> None: ...
    def __call__(self, x: Activations, tokens: int, y: Activations) -> None: ...
