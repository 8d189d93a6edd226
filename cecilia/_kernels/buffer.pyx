# SPDX-License-Identifier: Apache-2.0
"""Operands: aligned memory with a shape, bound once and passed to kernels without any conversion."""

from cpython.buffer cimport PyBUF_FORMAT, PyBuffer_FillInfo
from libc.errno cimport errno
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset
from posix.stdlib cimport posix_memalign
from posix.unistd cimport _SC_PAGESIZE, sysconf

from cecilia._kernels.isa cimport CEC_ALIGN, CEC_BLOCK, table

cdef extern from "<sys/mman.h>" nogil:
    int MADV_DONTNEED, MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, MREMAP_FIXED, MREMAP_MAYMOVE
    int PROT_READ, PROT_WRITE
    void *MAP_FAILED
    int madvise(void *address, size_t nbytes, int advice)
    void *mmap(void *address, size_t nbytes, int protection, int flags, int fd, long offset)
    int mprotect(void *address, size_t nbytes, int protection)
    void *mremap(void *address, size_t nbytes, size_t new_nbytes, int flags, void *new_address)
    int munmap(void *address, size_t nbytes)


cdef enum:
    HUGE_PAGE = 2 << 20  # bytes
    LARGE = 1 << 20      # bytes from which zeroed memory is left to the kernel


cdef char *FLOAT = "f"  # the struct code numpy reads


cdef void *aligned_zeros(int64_t nbytes) except NULL:
    """`nbytes` of zeroed, 64-byte aligned memory; if much, it takes room only as it is used.

    Raises MemoryError.
    """
    cdef void *p = NULL
    cdef int64_t page = sysconf(_SC_PAGESIZE), size = nbytes + CEC_ALIGN, whole = 0
    cdef bint large = nbytes >= LARGE
    if nbytes < 0 or posix_memalign(&p, page if large else CEC_ALIGN, size) != 0:
        raise MemoryError(f"{nbytes} bytes")
    if large:
        # What whole OS pages held is given up: the kernel zeroes them when they are touched.
        whole = size - size % page
        if madvise(p, whole, MADV_DONTNEED) != 0:
            whole = 0
    memset(<char *>p + whole, 0, size - whole)
    return p


cdef class Matrix:
    """f32 [rows, cols], zeroed; `numpy.asarray(matrix)` is a view of it."""

    def __cinit__(self, int64_t rows, int64_t cols):
        if rows < 1 or cols < 1:
            raise ValueError(f"a matrix of {rows} x {cols}")
        self.rows, self.cols = rows, cols
        self.p = <float *>aligned_zeros(rows * cols * sizeof(float))
        self._shape[0], self._shape[1] = rows, cols
        self._strides[0], self._strides[1] = cols * sizeof(float), sizeof(float)

    def __dealloc__(self):
        free(self.p)

    def __getbuffer__(self, Py_buffer *view, int flags):
        view.buf = self.p
        view.obj = self
        view.len = self.rows * self.cols * sizeof(float)
        view.readonly = 0
        view.itemsize = sizeof(float)
        view.format = FLOAT if flags & PyBUF_FORMAT else NULL
        view.ndim = 2
        view.shape = self._shape
        view.strides = self._strides
        view.suboffsets = NULL
        view.internal = NULL


cdef class Vector:
    """A copy of n f32 values (a norm's weight)."""

    def __cinit__(self, data):
        cdef const unsigned char[::1] source = memoryview(data).cast("B")
        if source.shape[0] == 0 or source.shape[0] % sizeof(float):
            raise ValueError(f"{source.shape[0]} bytes are no f32 vector")
        self.size = source.shape[0] // sizeof(float)
        self.p = <float *>aligned_zeros(source.shape[0])
        memcpy(self.p, &source[0], source.shape[0])

    def __dealloc__(self):
        free(self.p)


cdef class Activations:
    """Input of linear layers: `rows` tokens, `cols` wide, as f32 and, with `ints`, as int8 too.

    int8 has a scale per 32-block, so `ints` needs cols % 32 == 0. A producer (rmsnorm, swiglu, attention)
    writes a row as f32, then calls put().
    """

    def __cinit__(self, int64_t rows, int64_t cols, *, bint ints):
        if rows < 1 or cols < 1 or (ints and cols % CEC_BLOCK):
            raise ValueError(f"activations {rows} x {cols}, ints={ints}")
        cdef int64_t blocks = rows * (cols // CEC_BLOCK)
        self.rows, self.cols = rows, cols
        # Producers write f32 first and quantise from there, so the f32 rows exist in either case.
        self.f = <float *>aligned_zeros(rows * cols * sizeof(float))
        if ints:
            self.q = <int8_t *>aligned_zeros(rows * cols)
            self.d = <float *>aligned_zeros(blocks * sizeof(float))
            self.s = <float *>aligned_zeros(blocks * sizeof(float))
            self.c = <int32_t *>aligned_zeros(blocks * sizeof(int32_t))
        self.acts = cec_acts(self.f, self.q, self.d, self.s, self.c, cols)

    def __dealloc__(self):
        free(self.f)
        free(self.q)
        free(self.d)
        free(self.s)
        free(self.c)

    def load(self, const float[:, ::1] rows):
        """Set the first rows to the given f32 [T, cols] values."""
        cdef int64_t t
        if rows.shape[0] > self.rows or rows.shape[1] != self.cols:
            raise ValueError(
                f"{rows.shape[0]} x {rows.shape[1]} values for {self.rows} x {self.cols} activations"
            )
        for t in range(rows.shape[0]):
            memcpy(self.f + t * self.cols, &rows[t, 0], self.cols * sizeof(float))
            self.put(t, self.f + t * self.cols)

    cdef void put(self, int64_t row, const float *x) noexcept nogil:
        """Quantise x [cols] (which may be this row's own f32) as row `row`; nothing to do without ints."""
        cdef int64_t b = row * (self.cols // CEC_BLOCK)
        if self.q != NULL:
            table().linear.quantize(
                x, self.cols, self.q + row * self.cols, self.d + b, self.s + b, self.c + b
            )


cdef class PageList:
    """Addresses of the KV pages of one sequence, in position order. It does not own the pages."""

    def __dealloc__(self):
        free(self.pages)

    def __len__(self):
        return self.count

    cdef int append(self, char *page) except -1:
        cdef char **grown
        if self.count == self.capacity:
            grown = <char **>realloc(self.pages, (2 * self.capacity + 16) * sizeof(char *))
            if grown == NULL:
                raise MemoryError("page list")
            self.pages = grown
            self.capacity = 2 * self.capacity + 16
        self.pages[self.count] = page
        self.count += 1
        return 0

    cdef char *pop(self) noexcept:
        """Remove and return the last page; the list must not be empty."""
        self.count -= 1
        return self.pages[self.count]


cdef class Fixed:
    """The part of a sequence's state that does not grow with it: `nbytes` of zeroed memory, maybe none.

    Layers address their share by an offset. `memoryview(fixed)` is a view of the bytes. Raises MemoryError.
    """

    def __cinit__(self, int64_t nbytes):
        self.p = <char *>aligned_zeros(nbytes)
        self.nbytes = nbytes

    def __dealloc__(self):
        free(self.p)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.p, self.nbytes, 0, flags)

    def clear(self):
        """Back to the state of an empty sequence: zeros."""
        memset(self.p, 0, self.nbytes)


def move_to_huge_pages(const unsigned char[::1] mapped):
    """Replace the read-only file mapping at `mapped`, whole aligned 2 MiB pages, by anonymous memory with
    the same bytes at the same address, for which 2 MiB pages were asked. Nobody who reads it notices: the
    exchange is one step for the kernel. Raises ValueError, MemoryError, and OSError when the kernel refuses.
    """
    cdef size_t nbytes = mapped.shape[0]
    cdef char *to = <char *>&mapped[0] if nbytes else NULL
    cdef char *p
    if nbytes == 0 or nbytes % HUGE_PAGE or <uintptr_t>to % HUGE_PAGE:
        raise ValueError(f"{nbytes} bytes at {<uintptr_t>to:#x}: not whole 2 MiB pages")
    p = aligned_room(nbytes)
    try:
        if madvise(p, nbytes, MADV_HUGEPAGE) != 0:
            raise OSError(errno, "madvise(MADV_HUGEPAGE)")
        with nogil:
            memcpy(p, to, nbytes)
        if mprotect(p, nbytes, PROT_READ) != 0:
            raise OSError(errno, "mprotect")
        if mremap(p, nbytes, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) == MAP_FAILED:
            raise OSError(errno, "mremap")
    except OSError:
        munmap(p, nbytes)
        raise


cdef char *aligned_room(size_t nbytes) except NULL:
    """`nbytes` of fresh memory that begins with a 2 MiB page."""
    cdef char *room = <char *>mmap(
        NULL, nbytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0
    )
    if room == MAP_FAILED:
        raise MemoryError(f"{nbytes} bytes for huge pages")
    cdef size_t before = (-<uintptr_t>room) % HUGE_PAGE
    if before:
        munmap(room, before)
    munmap(room + before + nbytes, HUGE_PAGE - before)
    return room + before


def huge_pages_of(const unsigned char[::1] mapped):
    """The range of `mapped` that whole 2 MiB pages cover: (first byte, byte after the last), maybe empty."""
    cdef int64_t first = (-<uintptr_t>&mapped[0]) % HUGE_PAGE
    cdef int64_t last = mapped.shape[0] - (<uintptr_t>&mapped[0] + mapped.shape[0]) % HUGE_PAGE
    return first, max(first, last)
