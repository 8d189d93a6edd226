# SPDX-License-Identifier: Apache-2.0
from cecilia._kernels.buffer import Activations, Matrix, PageList

def page_bytes(kv: str, heads: int, key_dim: int, value_dim: int) -> int: ...

class ExpandedAttention:
    heads: int
    key_dim: int
    value_dim: int
    nope_dim: int
    rope_dim: int
    kv: str
    page_bytes: int
    def __init__(
        self,
        *,
        heads: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        kv: str,
        offset: int,
        capacity: int,
    ) -> None: ...
    def __call__(
        self,
        q: Matrix,
        kv: Matrix,
        compressed: Matrix,
        column: int,
        cos: Matrix,
        sin: Matrix,
        pages: PageList,
        first: int,
        tokens: int,
        out: Activations,
    ) -> None: ...
