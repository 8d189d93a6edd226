# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int32_t, int64_t

from cecilia._kernels.buffer cimport Activations, Matrix, Vector
from cecilia._kernels.isa cimport cec_acts, cec_linear_ops, cec_pointwise_ops


cdef class Routes:
    cdef readonly int64_t experts, used, capacity, tokens
    cdef int32_t *ids        # [T][used], ascending
    cdef float *weights      # [T][used]
    cdef int64_t *starts     # [E + 1]
    cdef int64_t *active     # [actives] experts that have rows, ascending
    cdef int64_t actives
    cdef int64_t *row_tokens
    cdef float *row_weights
    cdef void sort(self, int64_t tokens) noexcept nogil
