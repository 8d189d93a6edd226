# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int64_t

cdef int team(int64_t nanoseconds) noexcept nogil
cdef void *scratch(int thread) noexcept nogil
cdef int reserve_scratch(int64_t nbytes) except -1
