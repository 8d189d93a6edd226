# SPDX-License-Identifier: Apache-2.0
from cecilia._kernels.buffer import Activations, Fixed, Matrix, Vector

def state_bytes(heads: int, head_dim: int) -> int: ...

class Delta:
    heads: int
    head_dim: int
    state_bytes: int
    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        conv: Vector,
        a: Vector,
        dt_bias: Vector,
        norm: Vector,
        eps: float,
        lower_bound: float,
        offset: int,
        capacity: int,
    ) -> None: ...
    def __call__(self, x: Matrix, state: Fixed, tokens: int, out: Activations) -> None: ...
