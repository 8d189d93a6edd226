# SPDX-License-Identifier: Apache-2.0
from cecilia._kernels.buffer import Activations, Matrix, Vector

def rmsnorm(
    x: Matrix,
    weight: Vector,
    eps: float,
    out: Activations,
    tokens: int,
    *,
    first: int = 0,
    column: int = 0,
) -> None: ...
def swiglu(gate_up: Matrix, out: Activations, tokens: int) -> None: ...
def rmsnorm_heads(x: Matrix, weight: Vector, eps: float, tokens: int, *, first: int, heads: int) -> None: ...
def add_bias(x: Matrix, bias: Vector, tokens: int) -> None: ...
def gate_heads(x: Activations, gates: Matrix, tokens: int, *, column: int, heads: int) -> None: ...
