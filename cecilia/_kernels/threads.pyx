# SPDX-License-Identifier: Apache-2.0
"""How many threads a parallel region gets, and the scratch memory each of them owns.

All regions are opened by one engine thread; libgomp keeps its team for that thread.
"""

from libc.stdlib cimport free
from posix.stdlib cimport posix_memalign

from cecilia.errors import UsageError

cdef enum:
    MAX_THREADS = 64

    # A region is worth its entry (1 to 3 us) only when each thread gets at least this much work.
    NANOSECONDS_PER_THREAD = 4000

MOST = MAX_THREADS

cdef int limit = 1
cdef void *areas[MAX_THREADS]
cdef int64_t area_bytes = 0


def set_threads(int n):
    """Let regions use up to `n` threads, 1 to MOST. Raises UsageError `invalid_threads`."""
    global limit
    if not 1 <= n <= MAX_THREADS:
        raise UsageError("invalid_threads", f"threads must be 1 to {MAX_THREADS}, not {n}")
    limit = n
    reserve_scratch(area_bytes)


def threads():
    """The most threads a region may use."""
    return limit


cdef int team(int64_t nanoseconds) noexcept nogil:
    """Threads for a region whose work takes one thread about `nanoseconds`."""
    cdef int64_t n = nanoseconds // NANOSECONDS_PER_THREAD
    return <int>(1 if n < 1 else limit if n > limit else n)


cdef void *scratch(int thread) noexcept nogil:
    """The calling thread's scratch area; `thread` is its number in the region."""
    return areas[thread]


cdef int reserve_scratch(int64_t nbytes) except -1:
    """Give every thread at least `nbytes` of 64-byte aligned scratch. Called when operands are bound."""
    global area_bytes
    cdef int i
    if nbytes > area_bytes:
        for i in range(MAX_THREADS):
            free(areas[i])
            areas[i] = NULL
        area_bytes = nbytes
    if area_bytes == 0:
        return 0
    for i in range(limit):
        if areas[i] == NULL and posix_memalign(&areas[i], 4096, area_bytes) != 0:
            areas[i] = NULL
            raise MemoryError(f"{area_bytes} bytes of kernel scratch")
    return 0
