# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), in its two forms.

Expanded: keys and values are made from the latent vector for every head, and cached so. Latent (absorbed):
the vector itself is cached, once for all heads; queries are taken to its space, and contexts from it.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from cecilia._kernels.attention cimport KeyValueAttention
from cecilia._kernels.buffer cimport Activations, Matrix, PageList
from cecilia._kernels.isa cimport (
    CEC_KV_BF16, CEC_KV_F32, CEC_KV_INT8, CEC_PAGE, CEC_PARTS_MAX, cec_head_page, cec_kv_part_bytes, cec_part,
)
from cecilia._kernels.paged cimport Call, PagedAttention, Rows, Shape, Source

from math import gcd

from cecilia._kernels.paged import check_width, recipe_code

LATENT_RECIPES = {"latent-f32": CEC_KV_F32, "latent-bf16": CEC_KV_BF16, "latent-int8": CEC_KV_INT8}

PARTS_MOST = CEC_PARTS_MAX - 1  # parts of a latent vector; the rotated dimensions are one more

cdef enum:
    PART = 128  # the widest part of a latent vector; in int8 each has its own scale
    # Query rows of an item that works through all pages: they share a page's turning, and their sums, as wide
    # as the latent vector, should stay in the cache of a core.
    TILE_ROWS = 64


def part_width(int64_t rank):
    """How wide the parts are that a latent vector of `rank` is stored in."""
    return gcd(rank, PART)


def latent_page_bytes(str kv, int64_t rank, int64_t rope_dim):
    """Bytes one layer takes in a KV page of a latent recipe. Raises ValueError for an unknown recipe."""
    cdef int recipe = recipe_code(kv, LATENT_RECIPES)
    cdef int64_t width = part_width(rank)
    return rank // width * cec_kv_part_bytes(recipe, width) + cec_kv_part_bytes(recipe, rope_dim)


@cython.final
cdef class ExpandedAttention(KeyValueAttention):
    """A head's keys are nope_dim (N) of its own, then rope_dim (R) shared by all heads and rotated as pairs
    (2i, 2i + 1); its values are value_dim (V) wide. Raises ValueError."""

    cdef readonly int64_t nope_dim, rope_dim

    def __cinit__(self, *, int64_t heads, int64_t nope_dim, int64_t rope_dim, int64_t value_dim, str kv,
                  int64_t offset, int64_t capacity):
        if nope_dim < 1 or rope_dim < 2 or rope_dim % 2:
            raise ValueError(f"keys of {nope_dim} and {rope_dim} rotated dimensions")
        self.nope_dim, self.rope_dim = nope_dim, rope_dim
        self._bind_heads(heads, heads, nope_dim + rope_dim, value_dim, kv, offset, capacity)

    def __call__(self, Matrix q not None, Matrix kv not None, Matrix compressed not None, int64_t column,
                 Matrix cos not None, Matrix sin not None, PageList pages not None, int64_t first,
                 int64_t tokens, Activations out not None):
        """Attend from `tokens` new tokens, at positions first, first + 1, ..., to those up to their own.

        q [T, heads (N + R)]: heads side by side, not rotated; kv [T, heads N + heads V]: the keys of all
        heads, then their values; compressed [T, any]: the shared key R from `column` on, not rotated; cos
        and sin [T, R / 2]. Writes out [T, heads * V]. Raises ValueError.
        """
        cdef Call call
        self._check(cos, sin, self.rope_dim // 2, pages, first, tokens)
        self._check_out(out, tokens)
        if tokens > min(q.rows, kv.rows, compressed.rows):
            raise ValueError(f"{tokens} tokens of {q.rows}, {kv.rows} and {compressed.rows}")
        if q.cols != self.heads * self.key_dim or kv.cols != self.heads * (self.nope_dim + self.value_dim):
            raise ValueError(f"{self.heads} heads from {q.cols} and {kv.cols} columns")
        if column < 0 or column + self.rope_dim > compressed.cols:
            raise ValueError(f"columns {column} to {column + self.rope_dim} of {compressed.cols}")
        if tokens == 0:
            return
        call.queries, call.values = Source(q.p, q.cols), Source(kv.p, kv.cols)
        call.shared = Source(compressed.p + column, compressed.cols)
        self.attend(&call, cos, sin, pages, first, tokens, out)

    cdef void key(self, Call *c, int64_t t, int64_t head, float *to) noexcept nogil:
        memcpy(to, c.values.p + t * c.values.stride + head * self.nope_dim, self.nope_dim * sizeof(float))
        turning(c, c.shared.p + t * c.shared.stride, t, self.rope_dim, to + self.nope_dim)

    cdef const float *value(self, Call *c, int64_t t, int64_t head) noexcept nogil:
        return c.values.p + t * c.values.stride + self.heads * self.nope_dim + head * self.value_dim

    cdef void query_row(self, Call *c, int64_t t, int64_t head, float *to) noexcept nogil:
        cdef const float *q = c.queries.p + t * c.queries.stride + head * self.key_dim
        memcpy(to, q, self.nope_dim * sizeof(float))
        turning(c, q + self.nope_dim, t, self.rope_dim, to + self.nope_dim)


cdef void turning(Call *c, const float *x, int64_t t, int64_t R, float *to) noexcept nogil:
    """to [R] = x [R] rotated to the position of token t."""
    memcpy(to, x, R * sizeof(float))
    c.pointwise.rope_pairs(to, c.cos + t * (R // 2), c.sin + t * (R // 2), R // 2)


@cython.final
cdef class LatentAttention(PagedAttention):
    """All heads read one key for each position: its latent vector, `rank` wide, then rope_dim (R) dimensions
    rotated as pairs (2i, 2i + 1). The latent vector is the value too. Raises ValueError.

    Scores are divided by sqrt(nope_dim + R): nope_dim (N) is how wide a query was before it was taken to the
    latent space.
    """

    cdef readonly int64_t rank, nope_dim, rope_dim
    cdef int64_t width       # of the parts the latent vector is stored in
    cdef int64_t part_bytes  # of a page: of such a part

    def __cinit__(self, *, int64_t heads, int64_t rank, int64_t nope_dim, int64_t rope_dim, str kv,
                  int64_t offset, int64_t capacity):
        cdef int recipe = recipe_code(kv, LATENT_RECIPES)
        if heads < 1 or rank < 1 or nope_dim < 1:
            raise ValueError(f"{heads} heads, a latent vector of {rank}, queries of {nope_dim}")
        self.rank, self.nope_dim, self.rope_dim = rank, nope_dim, rope_dim
        self.width = part_width(rank)
        check_width(self.width)
        check_width(rope_dim)
        self.part_bytes = cec_kv_part_bytes(recipe, self.width)
        cdef int64_t values = rank // self.width * self.part_bytes
        self._bind(
            Shape(
                heads=heads, kv_heads=1, query_dim=rank + rope_dim, parts=rank // self.width + 1,
                value_dim=rank, score_dim=nope_dim + rope_dim,
                head_bytes=values + cec_kv_part_bytes(recipe, rope_dim), room=values,
                tile_tokens=max(1, TILE_ROWS // heads),
            ),
            kv, recipe, offset, capacity,
        )

    def __call__(self, Activations absorbed not None, Matrix q not None, Activations latent not None,
                 Matrix compressed not None, int64_t column, Matrix cos not None, Matrix sin not None,
                 PageList pages not None, int64_t first, int64_t tokens, Activations out not None):
        """Attend from `tokens` new tokens, at positions first, first + 1, ..., to those up to their own.

        absorbed [T, heads rank]: queries in the latent space; q [T, heads (N + R)], of each head the last R
        count, not rotated; latent [T, rank]; compressed [T, any]: the shared key R from `column` on, not
        rotated; cos and sin [T, R / 2]. Writes out [heads T, rank]: the tokens of one head after another.
        Raises ValueError.
        """
        cdef Call call
        self._check(cos, sin, self.rope_dim // 2, pages, first, tokens)
        if tokens > min(absorbed.rows, q.rows, latent.rows, compressed.rows):
            raise ValueError(
                f"{tokens} tokens of {absorbed.rows}, {q.rows}, {latent.rows} and {compressed.rows}"
            )
        if absorbed.cols != self.heads * self.rank or q.cols != self.heads * (self.nope_dim + self.rope_dim):
            raise ValueError(f"{self.heads} heads from {absorbed.cols} and {q.cols} columns")
        if latent.cols != self.rank or column < 0 or column + self.rope_dim > compressed.cols:
            raise ValueError(
                f"a latent vector of {latent.cols}, columns {column} to {column + self.rope_dim} of "
                f"{compressed.cols}"
            )
        if self.heads * tokens > out.rows or out.cols != self.rank:
            raise ValueError(f"{self.heads} x {tokens} rows of {self.rank} into {out.rows} x {out.cols}")
        if tokens == 0:
            return
        call.queries, call.values = Source(absorbed.f, absorbed.cols), Source(latent.f, latent.cols)
        call.turned = Source(q.p + self.nope_dim, q.cols)
        call.shared = Source(compressed.p + column, compressed.cols)
        self.attend(&call, cos, sin, pages, first, tokens, out)

    cdef void store(self, Call *c, int64_t t, int64_t head, char *part, char *room) noexcept nogil:
        cdef int slot = <int>((c.first + t) % CEC_PAGE)
        cdef const float *latent = c.values.p + t * c.values.stride
        cdef int64_t i
        for i in range(self.rank // self.width):
            c.ops.store_k[self.recipe](latent + i * self.width, self.width, part + i * self.part_bytes, slot)
        turning(c, c.shared.p + t * c.shared.stride, t, self.rope_dim, <float *>room)
        c.ops.store_k[self.recipe](<float *>room, self.rope_dim, part + self.shape.room, slot)

    cdef void query(self, Call *c, int64_t t, int64_t head, int64_t row) noexcept nogil:
        cdef const float *q = c.queries.p + t * c.queries.stride + head * self.rank
        cdef int64_t W = self.width, i
        for i in range(self.rank // W):
            memcpy(self.query_part(c, row, W, i * W), q + i * W, W * sizeof(float))
            self.finish_query(c, row, W, i * W, i)
        q = c.turned.p + t * c.turned.stride + head * (self.nope_dim + self.rope_dim)
        turning(c, q, t, self.rope_dim, self.query_part(c, row, self.rope_dim, self.rank))
        self.finish_query(c, row, self.rope_dim, self.rank, self.rank // W)

    cdef void partial(self, Call *c, const char *part, int64_t row, int64_t rows, const int32_t *valid,
                      Rows to, char *room) noexcept nogil:
        """Turn the page's latent vectors into values once, then use them for all rows."""
        cdef cec_head_page page
        cdef int i, parts = <int>(self.rank // self.width)
        for i in range(parts):
            page.key[i] = cec_part(part + i * self.part_bytes, self.width)
            page.value[i] = cec_part(room + i * self.part_bytes, self.width)
            c.ops.turn[self.recipe](page.key[i].data, self.width, room + i * self.part_bytes)
        page.key[parts] = cec_part(part + self.shape.room, self.rope_dim)
        page.keys, page.values, page.rows = parts + 1, parts, c.rows
        c.ops.partial[self.recipe](&page, c.q, c.qi, c.qd, row, rows, valid, to.m, to.l, to.o)
