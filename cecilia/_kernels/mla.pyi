# SPDX-License-Identifier: Apache-2.0
from cecilia._kernels.buffer import Activations, Matrix, PageList

LATENT_RECIPES: dict[str, int]
PARTS_MOST: int

def part_width(rank: int) -> int: ...
def latent_page_bytes(kv: str, rank: int, rope_dim: int) -> int: ...

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

class LatentAttention:
    heads: int
    rank: int
    nope_dim: int
    rope_dim: int
    kv: str
    page_bytes: int
    def __init__(
        self,
        *,
        heads: int,
        rank: int,
        nope_dim: int,
        rope_dim: int,
        kv: str,
        offset: int,
        capacity: int,
    ) -> None: ...
    def __call__(
        self,
        absorbed: Activations,
        q: Matrix,
        latent: Activations,
        compressed: Matrix,
        column: int,
        cos: Matrix,
        sin: Matrix,
        pages: PageList,
        first: int,
        tokens: int,
        out: Activations,
    ) -> None: ...
