# SPDX-License-Identifier: Apache-2.0
"""Memory of the attention layers: a pool of KV pages and the table of the pages of one sequence.

A page holds 64 positions of ALL attention layers of a model; each layer knows its offset inside the page.
"""

cimport cython
from libc.stdlib cimport free
from libc.string cimport memset

from cecilia._kernels.buffer cimport PageList, aligned_zeros
from cecilia._kernels.isa cimport CEC_ALIGN, CEC_PAGE, cec_round_up

from cecilia.errors import MemoryLimitError

POSITIONS = CEC_PAGE


cdef class PagePool:
    """Hands out zeroed, 64-byte aligned pages, at most `limit_bytes` of them in all.

    Pages are allocated when first wanted and kept for reuse until the pool goes. `allocated` and `in_use`
    count pages. An idle page's first bytes hold the address of the next idle one.
    """

    def __cinit__(self, int64_t page_bytes, int64_t limit_bytes):
        if page_bytes < 1 or limit_bytes < 0:
            raise ValueError(f"pages of {page_bytes} bytes, at most {limit_bytes} bytes")
        self.page_bytes = cec_round_up(page_bytes, CEC_ALIGN)
        self.limit_bytes = limit_bytes

    def __dealloc__(self):
        cdef char *page
        while self.idle != NULL:
            page = self.idle
            self.idle = (<char **>page)[0]
            free(page)

    cdef char *take(self) except NULL:
        """A zeroed page, so that what a page held before can never matter.

        Raises MemoryLimitError `insufficient_memory` at the limit and when the system has no memory.
        """
        cdef char *page = self.idle
        if page != NULL:
            self.idle = (<char **>page)[0]
            memset(page, 0, self.page_bytes)
        else:
            page = self._allocate()
        self.in_use += 1
        return page

    cdef char *_allocate(self) except NULL:
        cdef char *page
        held = f"{self.allocated} pages of {self.page_bytes} bytes are held"
        if (self.allocated + 1) * self.page_bytes > self.limit_bytes:
            raise MemoryLimitError("insufficient_memory", f"{held}, the limit is {self.limit_bytes}")
        try:
            page = <char *>aligned_zeros(self.page_bytes)
        except MemoryError as error:
            raise MemoryLimitError("insufficient_memory", f"{held}, the system refused one") from error
        self.allocated += 1
        return page

    cdef void give(self, char *page) noexcept:
        (<char **>page)[0] = self.idle
        self.idle = page
        self.in_use -= 1


# No cycle is possible, and uncollected, `pool` and `pages` are certain to be there in __dealloc__.
@cython.no_gc
cdef class PageTable:
    """The pages of one sequence, owned; kernels read them as `pages`. len() counts pages."""

    def __cinit__(self, PagePool pool not None):
        self.pool = pool
        self.pages = PageList()

    def __dealloc__(self):
        self._shrink(0)

    def __len__(self):
        return self.pages.count

    def reserve(self, int64_t positions):
        """Own pages for at least `positions` positions: all of them, or an error and none more than before.

        Raises MemoryLimitError `insufficient_memory`.
        """
        cdef int64_t before = self.pages.count
        try:
            while self.pages.count * CEC_PAGE < positions:
                self._grow()
        except MemoryLimitError:
            self._shrink(before)
            raise

    def truncate(self, int64_t positions):
        """Return the pages that only hold positions from `positions` on."""
        self._shrink((positions + CEC_PAGE - 1) // CEC_PAGE)

    def clear(self):
        """Return all pages."""
        self._shrink(0)

    def reusable(self, int64_t common, int64_t cached):
        """How many of `cached` positions serve a sequence that shares the first `common`: any prefix does."""
        return common

    cdef int _grow(self) except -1:
        cdef char *page = self.pool.take()
        try:
            self.pages.append(page)
        except MemoryError as error:
            self.pool.give(page)
            raise MemoryLimitError("insufficient_memory", "no memory for a page list") from error
        return 0

    cdef void _shrink(self, int64_t count) noexcept:
        while self.pages.count > count:
            self.pool.give(self.pages.pop())
