# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int32_t, int64_t

from cecilia._kernels.buffer cimport Activations
from cecilia._kernels.paged cimport Call, PagedAttention, Rows


cdef class KeyValueAttention(PagedAttention):
    cdef readonly int64_t key_dim
    cdef int64_t key_part  # bytes of a page: of a head's keys
    cdef int _bind_heads(self, int64_t heads, int64_t kv_heads, int64_t key_dim, int64_t value_dim, str kv,
                         int64_t offset, int64_t capacity) except -1
    cdef int _check_out(self, Activations out, int64_t tokens) except -1
    cdef void key(self, Call *c, int64_t t, int64_t head, float *to) noexcept nogil
    cdef const float *value(self, Call *c, int64_t t, int64_t head) noexcept nogil
    cdef void query_row(self, Call *c, int64_t t, int64_t head, float *to) noexcept nogil
    cdef void store(self, Call *c, int64_t t, int64_t head, char *part, char *room) noexcept nogil
    cdef void query(self, Call *c, int64_t t, int64_t head, int64_t row) noexcept nogil
    cdef void partial(self, Call *c, const char *part, int64_t row, int64_t rows, const int32_t *valid,
                      Rows to, char *room) noexcept nogil
