# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int64_t, uint8_t


cdef class Weight:
    cdef const uint8_t[::1] data
    cdef int code
    cdef readonly str format
    cdef readonly int64_t rows, cols
    cdef int64_t tiles(self) noexcept
    cdef bint ints(self) noexcept
