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
    Source turned
    const float *cos
    const float *sin
    char **pages
    int64_t first
    int64_t tokens
    int64_t rows    # query rows: heads * tokens, as [kv_heads][tokens][group]
    float *q        # [rows] rotated and scaled, laid out as cec_head_page says
    int8_t *qi      # the same as int8, with a scale for each part of a row in qd
    float *qd
    float *out
    int64_t token_stride  # of out, in floats
    int64_t head_stride


cdef struct Rows:
    # The running softmax of some query rows, or their partials over one page.
    float *m  # [rows] largest score
    float *l  # [rows] sum of weights
    float *o  # [rows][V] weighted sum of values


cdef struct Shape:
    int64_t heads
    int64_t kv_heads
    int64_t query_dim    # a query row, all its parts
    int64_t parts        # how many it has
    int64_t value_dim    # V
    int64_t score_dim    # scores are divided by its root
    int64_t head_bytes   # of a page: of one KV head's keys and values
    int64_t room         # bytes of scratch that `store` and `partial` need
    int64_t tile_tokens  # most tokens of an item that works through all pages


cdef class PagedAttention:
    cdef readonly int64_t heads, kv_heads, value_dim, page_bytes
    cdef readonly str kv
    cdef Shape shape
    cdef int recipe
    cdef int64_t offset, capacity, group
    cdef int _bind(self, Shape shape, str kv, int recipe, int64_t offset, int64_t capacity) except -1
    cdef int _check(self, Matrix cos, Matrix sin, int64_t half, PageList pages, int64_t first,
                    int64_t tokens) except -1
    cdef void attend(self, Call *call, Matrix cos, Matrix sin, PageList pages, int64_t first, int64_t tokens,
                     Activations out) noexcept
    cdef void store(self, Call *c, int64_t t, int64_t head, char *part, char *room) noexcept nogil
    cdef void query(self, Call *c, int64_t t, int64_t head, int64_t row) noexcept nogil
    cdef void partial(self, Call *c, const char *part, int64_t row, int64_t rows, const int32_t *valid,
                      Rows to, char *room) noexcept nogil
    cdef float *query_part(self, Call *c, int64_t row, int64_t width, int64_t before) noexcept nogil
    cdef void finish_query(self, Call *c, int64_t row, int64_t width, int64_t before,
                           int64_t part) noexcept nogil
    cdef int64_t _rows_bytes(self, int64_t tokens) noexcept nogil
    cdef int64_t _work_bytes(self, int64_t tokens) noexcept nogil
    cdef int64_t _queries_bytes(self, int64_t tokens) noexcept nogil
    cdef void _place_queries(self, Call *c) noexcept nogil
    cdef void _run(self, Call *c, Activations out) noexcept nogil
    cdef void _store(self, Call *c, int64_t head, int64_t page, char *room) noexcept nogil
    cdef void _page(self, Call *c, int64_t head, int64_t t0, int64_t tokens, int64_t page, char *work,
                    Rows to) noexcept nogil
    cdef void _merge(self, Call *c, Rows total, Rows part, int64_t row) noexcept nogil
    cdef void _finish(self, Call *c, int64_t head, int64_t t0, int64_t tokens, Rows total) noexcept nogil
    cdef void _attend(self, Call *c, int64_t head, int64_t t0, int64_t tile, char *area) noexcept nogil
    cdef void _run_split(self, Call *c, int64_t pages, int threads) noexcept nogil
    cdef void _merge_span(self, Call *c, char *area, char *parts, int64_t span, int64_t row) noexcept nogil
