# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int64_t

from cecilia._kernels.buffer cimport PageList


cdef class PagePool:
    cdef readonly int64_t page_bytes, limit_bytes, allocated, in_use
    cdef char *idle
    cdef char *take(self) except NULL
    cdef char *_allocate(self) except NULL
    cdef void give(self, char *page) noexcept


cdef class PageTable:
    cdef readonly PagePool pool
    cdef readonly PageList pages
    cdef int _grow(self) except -1
    cdef void _shrink(self, int64_t count) noexcept
