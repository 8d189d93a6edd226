# SPDX-License-Identifier: Apache-2.0
"""Attention whose keys and values stand apart in the pages, for each KV head; grouped-query attention."""

cimport cython
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from cecilia._kernels.buffer cimport Activations, Matrix, PageList
from cecilia._kernels.isa cimport CEC_PAGE, cec_head_page, cec_kv_part_bytes, cec_part
from cecilia._kernels.paged cimport Call, PagedAttention, Rows, Shape, Source

from cecilia._kernels.paged import check_width, recipe_code

cdef enum:
    TILE_TOKENS = 16  # most tokens of an item that works through all pages


def page_bytes(str kv, int64_t kv_heads, int64_t key_dim, int64_t value_dim):
    """Bytes one layer takes in a KV page. Raises ValueError for an unknown recipe."""
    cdef int recipe = recipe_code(kv)
    return kv_heads * (cec_kv_part_bytes(recipe, key_dim) + cec_kv_part_bytes(recipe, value_dim))


cdef class KeyValueAttention(PagedAttention):
    """Keys K wide, then values V wide, of every KV head.

    A kind of attention says how the rows of a token come about: `key`, `value` and `query_row`.
    """

    cdef int _bind_heads(self, int64_t heads, int64_t kv_heads, int64_t key_dim, int64_t value_dim, str kv,
                         int64_t offset, int64_t capacity) except -1:
        cdef int recipe = recipe_code(kv)
        check_width(key_dim)
        check_width(value_dim)
        self.key_dim, self.key_part = key_dim, cec_kv_part_bytes(recipe, key_dim)
        return self._bind(
            Shape(
                heads=heads, kv_heads=kv_heads, query_dim=key_dim, parts=1, value_dim=value_dim,
                score_dim=key_dim, head_bytes=self.key_part + cec_kv_part_bytes(recipe, value_dim),
                room=key_dim * sizeof(float), tile_tokens=TILE_TOKENS,
            ),
            kv, recipe, offset, capacity,
        )

    cdef int _check_out(self, Activations out, int64_t tokens) except -1:
        if tokens > out.rows or out.cols != self.heads * self.value_dim:
            raise ValueError(
                f"{tokens} tokens, {self.heads} heads of {self.value_dim}, into {out.rows} x {out.cols}"
            )
        return 0

    cdef void key(self, Call *c, int64_t t, int64_t head, float *to) noexcept nogil:
        """Write the rotated key [K] of token t and KV head."""

    cdef const float *value(self, Call *c, int64_t t, int64_t head) noexcept nogil:
        """The value [V] of token t and KV head."""

    cdef void query_row(self, Call *c, int64_t t, int64_t head, float *to) noexcept nogil:
        """Write the rotated query [K] of token t and query head, not yet scaled."""

    cdef void store(self, Call *c, int64_t t, int64_t head, char *part, char *room) noexcept nogil:
        cdef int slot = <int>((c.first + t) % CEC_PAGE)
        self.key(c, t, head, <float *>room)
        c.ops.store_k[self.recipe](<float *>room, self.key_dim, part, slot)
        c.ops.store_v[self.recipe](self.value(c, t, head), self.value_dim, part + self.key_part, slot)

    cdef void query(self, Call *c, int64_t t, int64_t head, int64_t row) noexcept nogil:
        self.query_row(c, t, head, self.query_part(c, row, self.key_dim, 0))
        self.finish_query(c, row, self.key_dim, 0, 0)

    cdef void partial(self, Call *c, const char *part, int64_t row, int64_t rows, const int32_t *valid,
                      Rows to, char *room) noexcept nogil:
        cdef cec_head_page page
        page.keys = page.values = 1
        page.key[0] = cec_part(part, self.key_dim)
        page.value[0] = cec_part(part + self.key_part, self.value_dim)
        page.rows = c.rows
        c.ops.partial[self.recipe](&page, c.q, c.qi, c.qd, row, rows, valid, to.m, to.l, to.o)


@cython.final
cdef class Attention(KeyValueAttention):
    """Grouped-query attention: keys and values head_dim (D) wide, rotated as pairs (i, i + D/2)."""

    def __cinit__(
        self, *, int64_t heads, int64_t kv_heads, int64_t head_dim, str kv, int64_t offset, int64_t capacity
    ):
        self._bind_heads(heads, kv_heads, head_dim, head_dim, kv, offset, capacity)

    @property
    def head_dim(self):
        """The width of a head."""
        return self.key_dim

    def __call__(self, Matrix qkv not None, Matrix cos not None, Matrix sin not None, PageList pages not None,
                 int64_t first, int64_t tokens, Activations out not None):
        """Attend from `tokens` new tokens, at positions first, first + 1, ..., to those up to their own.

        qkv [T, (heads + 2 kv_heads) D]: query heads, key heads, value heads, not yet rotated; cos, sin
        [T, D / 2]: rotary angles of the new positions; pages: up to the last new position at least, filled by
        earlier calls before `first`. Writes out [T, heads * D]. Raises ValueError.
        """
        cdef Call call
        self._check(cos, sin, self.key_dim // 2, pages, first, tokens)
        self._check_out(out, tokens)
        if tokens > qkv.rows or qkv.cols < (self.heads + 2 * self.kv_heads) * self.key_dim:
            raise ValueError(
                f"{tokens} tokens of {self.heads} + 2 x {self.kv_heads} heads of {self.key_dim} "
                f"from {qkv.rows} x {qkv.cols}"
            )
        if tokens == 0:
            return
        call.queries = Source(qkv.p, qkv.cols)
        self.attend(&call, cos, sin, pages, first, tokens, out)

    cdef const float *_head(self, Call *c, int64_t t, int64_t head) noexcept nogil:
        return c.queries.p + t * c.queries.stride + head * self.key_dim

    cdef void _rotated(self, Call *c, int64_t t, int64_t head, float *to) noexcept nogil:
        cdef int64_t half = self.key_dim // 2
        memcpy(to, self._head(c, t, head), self.key_dim * sizeof(float))
        c.pointwise.rope(to, c.cos + t * half, c.sin + t * half, half)

    cdef void key(self, Call *c, int64_t t, int64_t head, float *to) noexcept nogil:
        self._rotated(c, t, self.heads + head, to)

    cdef const float *value(self, Call *c, int64_t t, int64_t head) noexcept nogil:
        return self._head(c, t, self.heads + self.kv_heads + head)

    cdef void query_row(self, Call *c, int64_t t, int64_t head, float *to) noexcept nogil:
        self._rotated(c, t, head, to)
