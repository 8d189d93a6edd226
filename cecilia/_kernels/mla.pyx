# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), keys and values expanded for every head."""

cimport cython
from libc.stdint cimport int64_t
from libc.string cimport memcpy

from cecilia._kernels.attention cimport Call, PagedAttention, Source
from cecilia._kernels.buffer cimport Activations, Matrix, PageList
from cecilia._kernels.isa cimport cec_kv_part_bytes

from cecilia._kernels.attention import RECIPES


def page_bytes(str kv, int64_t heads, int64_t key_dim, int64_t value_dim):
    """Bytes one layer takes in a KV page. Raises ValueError for an unknown recipe."""
    if kv not in RECIPES:
        raise ValueError(f"KV recipe {kv!r}; there are: {' '.join(RECIPES)}")
    return heads * (cec_kv_part_bytes(RECIPES[kv], key_dim) + cec_kv_part_bytes(RECIPES[kv], value_dim))


@cython.final
cdef class ExpandedAttention(PagedAttention):
    """A head's keys are nope_dim (N) of its own, then rope_dim (R) shared by all heads and rotated as pairs
    (2i, 2i + 1); its values are value_dim (V) wide. Raises ValueError."""

    cdef readonly int64_t nope_dim, rope_dim

    def __cinit__(self, *, int64_t heads, int64_t nope_dim, int64_t rope_dim, int64_t value_dim, str kv,
                  int64_t offset, int64_t capacity):
        if nope_dim < 1 or rope_dim < 2 or rope_dim % 2:
            raise ValueError(f"keys of {nope_dim} and {rope_dim} rotated dimensions")
        self.nope_dim, self.rope_dim = nope_dim, rope_dim
        self._bind(heads, heads, nope_dim + rope_dim, value_dim, kv, offset, capacity)

    def __call__(self, Matrix q not None, Matrix kv not None, Matrix compressed not None, int64_t column,
                 Matrix cos not None, Matrix sin not None, PageList pages not None, int64_t first,
                 int64_t tokens, Activations out not None):
        """Attend from `tokens` new tokens, at positions first, first + 1, ..., to those up to their own.

        q [T, heads (N + R)]: heads side by side, not rotated; kv [T, heads N + heads V]: the keys of all
        heads, then their values; compressed [T, any]: the shared key R from `column` on, not rotated; cos
        and sin [T, R / 2]. Writes out [T, heads * V]. Raises ValueError.
        """
        cdef Call call
        self._check(cos, sin, self.rope_dim // 2, pages, first, tokens, out)
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

    cdef void _rotate(self, Call *c, int64_t t, float *to) noexcept nogil:
        cdef int64_t half = self.rope_dim // 2
        c.pointwise.rope_pairs(to + self.nope_dim, c.cos + t * half, c.sin + t * half, half)

    cdef void key(self, Call *c, int64_t t, int64_t head, float *to) noexcept nogil:
        memcpy(to, c.values.p + t * c.values.stride + head * self.nope_dim, self.nope_dim * sizeof(float))
        memcpy(to + self.nope_dim, c.shared.p + t * c.shared.stride, self.rope_dim * sizeof(float))
        self._rotate(c, t, to)

    cdef const float *value(self, Call *c, int64_t t, int64_t head) noexcept nogil:
        return c.values.p + t * c.values.stride + self.heads * self.nope_dim + head * self.value_dim

    cdef void query(self, Call *c, int64_t t, int64_t head, float *to) noexcept nogil:
        memcpy(to, c.queries.p + t * c.queries.stride + head * self.key_dim, self.key_dim * sizeof(float))
        self._rotate(c, t, to)
