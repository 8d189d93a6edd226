# SPDX-License-Identifier: Apache-2.0
"""How many threads a parallel region gets, and the scratch memory each of them owns.

All regions are opened by one engine thread; libgomp keeps its team for that thread. Results do not depend on
how many threads there are, so the number may change between any two regions.
"""

from libc.stdlib cimport free
from posix.stdlib cimport posix_memalign
from posix.time cimport CLOCK_MONOTONIC, CLOCK_THREAD_CPUTIME_ID, clock_gettime, clockid_t, timespec

from cecilia.errors import UsageError

cdef enum:
    MAX_THREADS = 64

    # A region is worth its entry (1 to 3 us) only when each thread gets at least this much work.
    NANOSECONDS_PER_THREAD = 4000
    LOST_PERCENT = 30  # of a window that the engine thread may be off its core

MOST = MAX_THREADS

# The shortest window that is judged; how long a dropped thread is done without, at first and at most. In ns.
cdef int64_t WINDOW = 5_000_000
cdef int64_t FIRST_PAUSE = 50_000_000
cdef int64_t LONGEST_PAUSE = 3_200_000_000

cdef int limit = 1
cdef bint yielding = False
cdef Crew crew = Crew(1)
cdef void *areas[MAX_THREADS]
cdef int64_t area_bytes = 0


cdef class Crew:
    """How many threads to use while other processes compete for the cores.

    A region ends when its last thread ends, so one thread that waits for a core holds up all. Then fewer are
    faster: whenever the engine thread was off its core for too much of a window, one thread is dropped, and
    asked back after a pause, which doubles each time that turns out to have been too early. Times in ns.
    """

    def __cinit__(self, int limit):
        self.limit = self.size = limit
        self.pause = FIRST_PAUSE

    def judge(self, int64_t now, int64_t elapsed, int64_t computed):
        """A window of `elapsed` ended at `now`; the engine thread was on a core for `computed` of it."""
        self.consider(now, elapsed, computed)

    cdef void consider(self, int64_t now, int64_t elapsed, int64_t computed) noexcept nogil:
        if self.size > 1 and (elapsed - computed) * 100 > elapsed * LOST_PERCENT:
            self.size -= 1
            self.pause = min(2 * self.pause, LONGEST_PAUSE) if self.returning else FIRST_PAUSE
            self.until = now + self.pause
            self.returning = False
        elif self.size < self.limit and now >= self.until:
            self.size += 1
            self.returning = True
        else:
            self.returning = False


def set_threads(int n, *, bint yields=False):
    """Let regions use up to `n` threads, 1 to MOST; fewer when that is faster beside other processes, if it
    `yields`. Raises UsageError `invalid_threads`."""
    global limit, yielding, crew
    if not 1 <= n <= MAX_THREADS:
        raise UsageError("invalid_threads", f"threads must be 1 to {MAX_THREADS}, not {n}")
    limit, yielding, crew = n, yields and n > 1, Crew(n)
    reserve_scratch(area_bytes)


def threads():
    """The most threads a region may use."""
    return limit


def begin_step():
    """A forward pass begins: what the engine thread waited for before is no sign of contention."""
    if yielding:
        mark_window()


cdef int64_t window_start = 0
cdef int64_t window_computed = 0


cdef int64_t clock(clockid_t which) noexcept nogil:
    cdef timespec t
    clock_gettime(which, &t)
    return t.tv_sec * <int64_t>1_000_000_000 + t.tv_nsec


cdef void mark_window() noexcept nogil:
    global window_start, window_computed
    window_start, window_computed = clock(CLOCK_MONOTONIC), clock(CLOCK_THREAD_CPUTIME_ID)


cdef void watch_window() noexcept nogil:
    """End the window if it is long enough; its judgement may change the crew."""
    cdef int64_t started = window_start, computed = window_computed
    if clock(CLOCK_MONOTONIC) - started >= WINDOW:
        mark_window()
        crew.consider(window_start, window_start - started, window_computed - computed)


cdef int team(int64_t nanoseconds) noexcept nogil:
    """Threads for a region whose work takes one thread about `nanoseconds`."""
    cdef int64_t n = nanoseconds // NANOSECONDS_PER_THREAD
    cdef int most = limit
    if yielding:
        watch_window()
        most = crew.size
    return <int>(1 if n < 1 else most if n > most else n)


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
