# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int64_t


cdef class Crew:
    cdef readonly int size  # threads to use now
    cdef int limit
    cdef int64_t pause, until
    cdef bint returning  # whether the last window is the first with one thread more
    cdef void consider(self, int64_t now, int64_t elapsed, int64_t computed) noexcept nogil


cdef int team(int64_t nanoseconds) noexcept nogil
cdef void *scratch(int thread) noexcept nogil
cdef int reserve_scratch(int64_t nbytes) except -1
