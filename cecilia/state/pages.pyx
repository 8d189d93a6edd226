# SPDX-License-Identifier: Apache-2.0
"""Memory of sequences: a pool of KV pages, tables of the pages of one sequence, checkpoints of fixed state.

A page holds 64 positions of ALL attention layers of a model; each layer knows its offset inside the page.
Sequences with a common prefix share its pages: a page counts its owners in a header before its first byte,
and is copied before one of several owners writes to it.
"""

cimport cython
from cpython.buffer cimport PyBUF_WRITE
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from cecilia._kernels.buffer cimport Fixed, PageList, aligned_zeros
from cecilia._kernels.isa cimport CEC_ALIGN, CEC_PAGE, cec_round_up

from cecilia.errors import MemoryLimitError

POSITIONS = CEC_PAGE


cdef inline int64_t *owners(char *page) noexcept:
    """How many tables hold `page`."""
    return <int64_t *>(page - CEC_ALIGN)


cdef class PagePool:
    """One budget of `limit_bytes` for the pages and checkpoints of all sequences of a model.

    Pages are zeroed and 64-byte aligned; they are allocated when first wanted and kept for reuse until the
    room is wanted for something else. `allocated` and `in_use` count pages, `charged` the bytes of
    checkpoints. An idle page's first bytes hold the address of the next idle one.
    """

    def __cinit__(self, int64_t page_bytes, int64_t limit_bytes):
        if page_bytes < 1 or limit_bytes < 0:
            raise ValueError(f"pages of {page_bytes} bytes, at most {limit_bytes} bytes")
        self.page_bytes = cec_round_up(page_bytes, CEC_ALIGN)
        self.limit_bytes = limit_bytes

    def __dealloc__(self):
        while self.idle != NULL:
            self._release_idle()

    @property
    def used_bytes(self):
        """Bytes that belong to some sequence."""
        return self.in_use * self.page_bytes + self.charged

    cdef char *take(self) except NULL:
        """A zeroed page with one owner; zeroed, so that what a page held before can never matter.

        Raises MemoryLimitError `insufficient_memory` at the limit and when the system has no memory.
        """
        cdef char *page = self.idle
        if page != NULL:
            self.idle = (<char **>page)[0]
            memset(page, 0, self.page_bytes)
        else:
            self._require(self.page_bytes)
            page = self._allocate()
        owners(page)[0] = 1
        self.in_use += 1
        return page

    cdef char *_allocate(self) except NULL:
        cdef char *page
        try:
            page = <char *>aligned_zeros(CEC_ALIGN + self.page_bytes) + CEC_ALIGN
        except MemoryError as error:
            raise MemoryLimitError(
                "insufficient_memory", f"{self._held()}, the system refused one"
            ) from error
        self.allocated += 1
        return page

    cdef void give(self, char *page) noexcept:
        """Take `page` off one owner; the last one returns it."""
        owners(page)[0] -= 1
        if owners(page)[0] == 0:
            (<char **>page)[0] = self.idle
            self.idle = page
            self.in_use -= 1

    cdef int charge(self, int64_t nbytes) except -1:
        """Count `nbytes` against the limit; idle pages make room. Raises MemoryLimitError."""
        while self.idle != NULL and self._left() < nbytes:
            self._release_idle()
        self._require(nbytes)
        self.charged += nbytes
        return 0

    cdef int _require(self, int64_t nbytes) except -1:
        if self._left() < nbytes:
            raise MemoryLimitError("insufficient_memory", f"{self._held()}, the limit is {self.limit_bytes}")
        return 0

    cdef int64_t _left(self) noexcept:
        return self.limit_bytes - self.allocated * self.page_bytes - self.charged

    cdef void _release_idle(self) noexcept:
        cdef char *page = self.idle
        self.idle = (<char **>page)[0]
        self.allocated -= 1
        free(page - CEC_ALIGN)

    cdef str _held(self):
        checkpoints = f" and {self.charged} bytes of checkpoints" if self.charged else ""
        return f"{self.allocated} pages of {self.page_bytes} bytes{checkpoints} are held"


# No cycle is possible, and uncollected, `pool` and `pages` are certain to be there in __dealloc__.
@cython.no_gc
cdef class PageTable:
    """The pages of one sequence, each owned alone or with others; kernels read them as `pages`.

    len() counts pages. Before positions are written, `own` the first of them.
    """

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

    def share(self, int64_t positions):
        """A new table of the pages that hold the first `positions`, which both tables own from now on.

        Raises MemoryLimitError `insufficient_memory`.
        """
        cdef PageTable other = PageTable(self.pool)
        cdef int64_t i
        for i in range(min((positions + CEC_PAGE - 1) // CEC_PAGE, self.pages.count)):
            other._append(self.pages.pages[i])
            owners(self.pages.pages[i])[0] += 1
        return other

    def own(self, int64_t position):
        """Make the page that holds `position`, if there is one, this table's alone, by a copy if need be.

        Raises MemoryLimitError `insufficient_memory`.
        """
        cdef int64_t i = position // CEC_PAGE
        cdef char *old
        cdef char *new
        if i < self.pages.count and owners(self.pages.pages[i])[0] > 1:
            old = self.pages.pages[i]
            new = self.pool.take()
            memcpy(new, old, self.pool.page_bytes)
            self.pages.pages[i] = new
            self.pool.give(old)

    @property
    def shared(self):
        """How many of the pages other tables own too."""
        cdef int64_t i, count = 0
        for i in range(self.pages.count):
            count += owners(self.pages.pages[i])[0] > 1
        return count

    def view(self, int64_t i):
        """The bytes of page `i`, writable, for as long as this table owns it. Raises IndexError."""
        if not 0 <= i < self.pages.count:
            raise IndexError(f"page {i} of {self.pages.count}")
        return PyMemoryView_FromMemory(self.pages.pages[i], self.pool.page_bytes, PyBUF_WRITE)

    def reusable(self, int64_t common, int64_t cached):
        """How many of `cached` positions serve a sequence that shares the first `common`: any prefix does."""
        return common

    cdef int _grow(self) except -1:
        cdef char *page = self.pool.take()
        try:
            self._append(page)
        except MemoryLimitError:
            self.pool.give(page)
            raise
        return 0

    cdef int _append(self, char *page) except -1:
        try:
            self.pages.append(page)
        except MemoryError as error:
            raise MemoryLimitError("insufficient_memory", "no memory for a page list") from error
        return 0

    cdef void _shrink(self, int64_t count) noexcept:
        while self.pages.count > count:
            self.pool.give(self.pages.pop())


@cython.no_gc
cdef class Checkpoint:
    """A copy of a fixed state as it was, charged to `pool` while it lives; never changed afterwards.

    Raises MemoryLimitError `insufficient_memory`.
    """

    def __cinit__(self, PagePool pool not None, Fixed state not None):
        pool.charge(state.nbytes)
        self.pool = pool
        self.nbytes = state.nbytes
        try:
            self.held = Fixed(state.nbytes)
        except MemoryError as error:
            raise MemoryLimitError(
                "insufficient_memory", f"the system refused {state.nbytes} bytes for a checkpoint"
            ) from error
        copy(self.held, state)

    def __dealloc__(self):
        if self.pool is not None:
            self.pool.charged -= self.nbytes

    def restore(self, Fixed state not None):
        """Make `state` what it was. Raises ValueError for one of another size."""
        if state.nbytes != self.nbytes:
            raise ValueError(f"a checkpoint of {self.nbytes} bytes for a state of {state.nbytes}")
        copy(state, self.held)

    @property
    def data(self):
        """The bytes, read-only."""
        return memoryview(self.held).toreadonly()


cdef void copy(Fixed to, Fixed source) noexcept:
    cdef char *into = to.p
    cdef char *of = source.p
    cdef int64_t nbytes = source.nbytes
    with nogil:
        memcpy(into, of, nbytes)
