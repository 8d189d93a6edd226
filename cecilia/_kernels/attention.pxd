# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int8_t, int32_t, int64_t

from cecilia._kernels.buffer cimport Activations, Matrix, PageList
from cecilia._kernels.isa cimport cec_attention_ops, cec_pointwise_ops


cdef struct Source:
    # Rows of some matrix, from some column on.
    const float *p
    int64_t stride  # in floats


cdef struct Call:
    # One call as its work items see it.
    const cec_attention_ops *ops
    const cec_pointwise_ops *pointwise
    Source queries  # what a kind of attention makes its rows from
    Source values
    Source shared
    const float *cos
    const float *sin
    char **pages
    int64_t first
    int64_t tokens
    float *q        # [kv_heads][tokens][group][K], rotated and scaled
    int8_t *qi      # the same as int8, with a scale per row in qd
    float *qd
    float *out      # [tokens][heads * V]


cdef struct Rows:
    # The running softmax of some query rows, or their partials over one page.
    float *m  # [rows] largest score
    float *l  # [rows] sum of weights
    float *o  # [rows][V] weighted sum of values


cdef class PagedAttention:
    cdef readonly int64_t heads, kv_heads, key_dim, value_dim, page_bytes
    cdef readonly str kv
    cdef int recipe
    cdef int64_t offset, capacity, group
    cdef int64_t key_part, head_part  # bytes of a page: of a head's keys, of its keys and values
    cdef int _bind(self, int64_t heads, int64_t kv_heads, int64_t key_dim, int64_t value_dim, str kv,
                   int64_t offset, int64_t capacity) except -1
    cdef int _check(self, Matrix cos, Matrix sin, int64_t half, PageList pages, int64_t first, int64_t tokens,
                    Activations out) except -1
    cdef void attend(self, Call *call, Matrix cos, Matrix sin, PageList pages, int64_t first, int64_t tokens,
                     Activations out) noexcept
    cdef void key(self, Call *c, int64_t t, int64_t head, float *to) noexcept nogil
    cdef const float *value(self, Call *c, int64_t t, int64_t head) noexcept nogil
    cdef void query(self, Call *c, int64_t t, int64_t head, float *to) noexcept nogil
    cdef int64_t _rows_bytes(self, int64_t tokens) noexcept nogil
    cdef int64_t _queries_bytes(self, int64_t tokens) noexcept nogil
    cdef void _place_queries(self, Call *c) noexcept nogil
    cdef void _run(self, Call *c, Activations out) noexcept nogil
    cdef void _store(self, Call *c, int64_t head, int64_t page, float *key) noexcept nogil
    cdef void _query(self, Call *c, int64_t t, int64_t head, int64_t row) noexcept nogil
    cdef void _page(self, Call *c, int64_t head, int64_t t0, int64_t tokens, int64_t page, int32_t *valid,
                    Rows to) noexcept nogil
    cdef void _merge(self, Call *c, Rows total, Rows part, int64_t row) noexcept nogil
    cdef void _finish(self, Call *c, int64_t head, int64_t t0, int64_t tokens, Rows total) noexcept nogil
    cdef void _attend(self, Call *c, int64_t head, int64_t t0, int64_t tile, char *area) noexcept nogil
    cdef void _run_split(self, Call *c, int64_t pages, int threads) noexcept nogil
    cdef void _merge_span(self, Call *c, char *area, char *parts, int64_t span, int64_t row) noexcept nogil
