# SPDX-License-Identifier: Apache-2.0
from cecilia._kernels.buffer import Activations, Matrix, Vector

def rmsnorm(
    x: Matrix, weight: Vector, eps: float, out: Activations, tokens: int, *, first: int = 0
) -> None: ...
def swiglu(gate_up: Matrix, out: Activations, tokens: int) -> None: ...
