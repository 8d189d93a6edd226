# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int64_t

from cecilia._kernels.buffer cimport Fixed, PageList


cdef class PagePool:
    cdef readonly int64_t page_bytes, limit_bytes, allocated, in_use, charged
    cdef char *idle
    cdef char *take(self) except NULL
    cdef char *_allocate(self) except NULL
    cdef void give(self, char *page) noexcept
    cdef int charge(self, int64_t nbytes) except -1
    cdef int _require(self, int64_t nbytes) except -1
    cdef int64_t _left(self) noexcept
    cdef void _release_idle(self) noexcept
    cdef str _held(self)


cdef class PageTable:
    cdef readonly PagePool pool
    cdef readonly PageList pages
    cdef int _grow(self) except -1
    cdef int _append(self, char *page) except -1
    cdef void _shrink(self, int64_t count) noexcept


cdef class Checkpoint:
    cdef readonly PagePool pool
    cdef readonly int64_t nbytes
    cdef Fixed held
