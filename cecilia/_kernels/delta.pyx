# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention: a short convolution, a bounded decay and the delta rule over a state of fixed size.

There is one recurrence, for one token and for many: work is split by heads and by 16 columns of the state,
each of which takes the tokens one by one. So the bytes do not depend on chunks or threads.
"""

from cython.parallel cimport parallel, prange
from libc.math cimport sqrt
from libc.stdint cimport int64_t
from libc.stdlib cimport free
from libc.string cimport memcpy

from cecilia._kernels.buffer cimport Activations, Fixed, Matrix, Vector, aligned_zeros
from cecilia._kernels.isa cimport (
    CEC_ALIGN, CEC_HEAD_MAX, cec_delta_ops, cec_delta_token, cec_round_up, table,
)
from cecilia._kernels.threads cimport team

cdef enum:
    COLUMNS = 16  # of the state that one work item computes
    TAPS = 4
    # Rough speeds of one thread, used only to decide how many threads a region deserves.
    PREPARED_PER_NANOSECOND = 1
    STATE_VALUES_PER_NANOSECOND = 4


# Room for what one call prepares of each (head, token). All layers share it: one engine thread calls them.
cdef float *work = NULL  # [heads * capacity][4 K]: q, k, decay, v
cdef cec_delta_token *prepared = NULL  # [heads * capacity]
cdef int64_t work_values = 0, prepared_rows = 0


cdef int reserve_workspace(int64_t rows, int64_t head_dim) except -1:
    global work, work_values, prepared, prepared_rows
    if rows * 4 * head_dim > work_values:
        free(work)
        work, work_values = NULL, 0
        work = <float *>aligned_zeros(rows * 4 * head_dim * sizeof(float))
        work_values = rows * 4 * head_dim
    if rows > prepared_rows:
        free(prepared)
        prepared, prepared_rows = NULL, 0
        prepared = <cec_delta_token *>aligned_zeros(rows * sizeof(cec_delta_token))
        prepared_rows = rows
    return 0


def state_bytes(int64_t heads, int64_t head_dim):
    """Bytes of one layer's state: S f32 [heads][K/16][K][16], then the last 3 rows f32 [3][3 heads K] of q, k
    and v before their convolution, oldest first."""
    cdef int64_t width = heads * head_dim
    return cec_round_up((width * head_dim + (TAPS - 1) * 3 * width) * sizeof(float), CEC_ALIGN)


cdef class Delta:
    """One layer over `heads` heads of `head_dim` (K); P = heads K. Its state starts at byte `offset`.

    conv: taps [3 P, 4] of q, k and v, the last one for the current token. a [heads]: exp(A_log). dt_bias [P].
    norm [K]: the weight of the output's RMS norm with `eps`. lower_bound: of the gate, below 0. A call takes
    at most `capacity` tokens. Raises ValueError.
    """

    cdef readonly int64_t heads, head_dim, state_bytes
    cdef int64_t offset, capacity, width
    cdef Matrix taps  # [4, 3 P]
    cdef Vector a, dt_bias, norm
    cdef float eps, lowest

    def __cinit__(self, *, int64_t heads, int64_t head_dim, Vector conv not None, Vector a not None,
                  Vector dt_bias not None, Vector norm not None, float eps, float lower_bound, int64_t offset,
                  int64_t capacity):
        cdef int64_t width = heads * head_dim
        if heads < 1 or not 16 <= head_dim <= CEC_HEAD_MAX or head_dim % 16:
            raise ValueError(f"{heads} heads of {head_dim}: not a multiple of 16 up to {CEC_HEAD_MAX}")
        if (conv.size, a.size, dt_bias.size, norm.size) != (3 * width * TAPS, heads, width, head_dim):
            raise ValueError(
                f"taps {conv.size}, a {a.size}, bias {dt_bias.size}, norm {norm.size} "
                f"for {heads} x {head_dim}"
            )
        if offset < 0 or offset % CEC_ALIGN or capacity < 1 or not lower_bound < 0:
            raise ValueError(f"offset {offset}, capacity {capacity}, lower bound {lower_bound}")
        self.heads, self.head_dim, self.width = heads, head_dim, width
        self.state_bytes = state_bytes(heads, head_dim)
        self.offset, self.capacity, self.eps, self.lowest = offset, capacity, eps, lower_bound
        self.taps = _by_tap(conv)
        self.a, self.dt_bias, self.norm = a, dt_bias, norm
        reserve_workspace(heads * capacity, head_dim)

    def __call__(self, Matrix x not None, Fixed state not None, int64_t tokens, Activations out not None):
        """Take `tokens` more tokens; x [T, 5 P + heads]: q, k, v, f, z and b of each, as projected.

        Updates the state; writes the gated output to out [T, P]. Raises ValueError.
        """
        cdef int64_t h, t, i, T = tokens, K = self.head_dim, blocks = self.head_dim // COLUMNS
        cdef const cec_delta_ops *ops = table().delta
        if not 0 <= tokens <= self.capacity or tokens > x.rows or tokens > out.rows:
            raise ValueError(f"{tokens} tokens, capacity {self.capacity}, {x.rows} rows into {out.rows}")
        if x.cols < 5 * self.width + self.heads or out.cols != self.width:
            raise ValueError(f"{self.heads} heads of {K}: {x.cols} columns into {out.cols}")
        if self.offset + self.state_bytes > state.nbytes:
            raise ValueError(f"{self.state_bytes} bytes at {self.offset} of a state of {state.nbytes}")
        if tokens == 0:
            return
        cdef float *s = <float *>(state.p + self.offset)
        cdef float *rows = s + self.width * K
        cdef int threads = team(
            T * self.width * (16 // PREPARED_PER_NANOSECOND + K // STATE_VALUES_PER_NANOSECOND)
        )
        with nogil, parallel(num_threads=threads):
            for i in prange(self.heads * T, schedule="static"):
                self._prepare(ops, x, rows, i // T, i % T)
            for i in prange(self.heads * blocks, schedule="static"):
                self._recur(ops, s, i // blocks, i % blocks, T, out)
            for t in prange(T, schedule="static"):
                for h in range(self.heads):
                    ops.output(out.f + t * self.width + h * K, self.norm.p, self.eps,
                               x.p + t * x.cols + 4 * self.width + h * K, K, out.f + t * self.width + h * K)
                out.put(t, out.f + t * self.width)
        self._keep_rows(x, rows, T)

    cdef const float *_row(self, Matrix x, const float *rows, int64_t t) noexcept nogil:
        """q, k and v of token t before their convolution; tokens before this call have negative numbers."""
        if t < 0:
            return rows + (t + TAPS - 1) * 3 * self.width
        return x.p + t * x.cols

    cdef void _prepare(self, const cec_delta_ops *ops, Matrix x, const float *rows, int64_t h,
                       int64_t t) noexcept nogil:
        """q, k, v, decay and beta of one head and token."""
        cdef int64_t K = self.head_dim, part, w, at
        cdef float *to = work + (h * self.capacity + t) * 4 * K
        cdef cec_delta_token *token = prepared + h * self.capacity + t
        cdef const float *sources[TAPS]
        cdef float *targets[3]
        targets[0], targets[1], targets[2] = to, to + K, to + 3 * K
        for part in range(3):
            at = part * self.width + h * K
            for w in range(TAPS):
                sources[w] = self._row(x, rows, t - (TAPS - 1) + w) + at
            ops.conv(sources, self.taps.p + at, 3 * self.width, K, targets[part])
        ops.unit(to, K, <float>(1 / sqrt(K)))
        ops.unit(to + K, K, 1)
        cdef const float *now = x.p + t * x.cols
        ops.decay(now + 3 * self.width + h * K, self.dt_bias.p + h * K, self.a.p[h], self.lowest, K,
                  to + 2 * K)
        token.q, token.k, token.decay = to, to + K, to + 2 * K
        token.kq = ops.dot(to, to + K, K)
        table().pointwise.sigmoid(now + 5 * self.width + h, 1, &token.beta)

    cdef void _recur(self, const cec_delta_ops *ops, float *s, int64_t h, int64_t block, int64_t T,
                     Activations out) noexcept nogil:
        cdef int64_t K = self.head_dim, at = block * COLUMNS
        ops.recur(s + (h * K + at) * K, K, prepared + h * self.capacity, T,
                  work + h * self.capacity * 4 * K + 3 * K + at, 4 * K,
                  out.f + h * K + at, self.width)

    cdef void _keep_rows(self, Matrix x, float *rows, int64_t T) noexcept nogil:
        """The last three rows, of this call and of those before."""
        cdef int64_t w, n = 3 * self.width
        for w in range(TAPS - 1):  # oldest first: a row is read before it is written
            memcpy(rows + w * n, self._row(x, rows, T - (TAPS - 1) + w), n * sizeof(float))


cdef Matrix _by_tap(Vector conv):
    """Taps [C, 4] as [4, C]."""
    cdef int64_t c, w, channels = conv.size // TAPS
    cdef Matrix found = Matrix(TAPS, channels)
    for c in range(channels):
        for w in range(TAPS):
            found.p[w * channels + c] = conv.p[c * TAPS + w]
    return found
