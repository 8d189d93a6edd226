# SPDX-License-Identifier: Apache-2.0
from cecilia._kernels.buffer import Activations, Matrix, PageList

def page_bytes(kv: str, kv_heads: int, key_dim: int, value_dim: int) -> int: ...

class Attention:
    """GQA over the KV pages of one layer; heads, widths and the page offset are bound at load."""

    heads: int
    kv_heads: int
    head_dim: int
    kv: str
    page_bytes: int
    def __init__(
        self, *, heads: int, kv_heads: int, head_dim: int, kv: str, offset: int, capacity: int
    ) -> None: ...
    def __call__(
        self,
        qkv: Matrix,
        cos: Matrix,
        sin: Matrix,
        pages: PageList,
        first: int,
        tokens: int,
        out: Activations,
    ) -> None: ...
