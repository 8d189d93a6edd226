# SPDX-License-Identifier: Apache-2.0
"""Row-wise operations that produce the input of linear layers. Any split of the rows gives the same bytes."""

from cython.parallel cimport prange
from libc.stdint cimport int64_t
from libc.string cimport memcpy

from cecilia._kernels.buffer cimport Activations, Matrix, Vector
from cecilia._kernels.isa cimport cec_pointwise_ops, table
from cecilia._kernels.threads cimport team

cdef enum:
    # Rough speed of one thread, quantising too, used only to decide how many threads a region deserves.
    VALUES_PER_NANOSECOND = 2


def rmsnorm(Matrix x not None, Vector weight not None, float eps, Activations out not None, int64_t tokens,
            *, int64_t first=0, int64_t column=0):
    """out[t] = z / sqrt(mean(z^2) + eps) * weight of z = x[first + t], for t < tokens; as many columns as the
    weight has, from `column` on. Raises ValueError."""
    cdef int64_t t, cols = weight.size
    cdef int threads = team(tokens * cols // VALUES_PER_NANOSECOND)
    cdef const cec_pointwise_ops *ops = table().pointwise
    if tokens < 0 or first < 0 or first + tokens > x.rows or tokens > out.rows:
        raise ValueError(f"rows {first} to {first + tokens} of {x.rows} into {out.rows}")
    if column < 0 or column + cols > x.cols or out.cols != cols:
        raise ValueError(f"a norm of {cols} from {x.cols} columns after {column} into {out.cols}")
    for t in prange(tokens, nogil=True, schedule="static", num_threads=threads):
        ops.rmsnorm(x.p + (first + t) * x.cols + column, weight.p, eps, cols, out.f + t * cols)
        out.put(t, out.f + t * cols)


def swiglu(Matrix gate_up not None, Activations out not None, int64_t tokens):
    """out[t] = silu(gate[t]) * up[t] for t < tokens; a row of gate_up is gate, then up. Raises ValueError."""
    cdef int64_t t, cols = out.cols, stride = gate_up.cols
    cdef int threads = team(tokens * cols // VALUES_PER_NANOSECOND)
    cdef const cec_pointwise_ops *ops = table().pointwise
    if not 0 <= tokens <= gate_up.rows or tokens > out.rows or stride != 2 * cols:
        raise ValueError(f"{tokens} tokens of {gate_up.rows} x {stride} into {out.rows} x {cols}")
    for t in prange(tokens, nogil=True, schedule="static", num_threads=threads):
        ops.swiglu(gate_up.p + t * stride, gate_up.p + t * stride + cols, cols, out.f + t * cols)
        out.put(t, out.f + t * cols)


def rmsnorm_heads(Matrix x not None, Vector weight not None, float eps, int64_t tokens, *, int64_t first,
                  int64_t heads):
    """RMS norm in place of `heads` neighbouring heads of each x[t], t < tokens, from head `first` on.

    A head is as wide as the weight they share. Raises ValueError.
    """
    cdef int64_t i, D = weight.size, stride = x.cols
    cdef float *row
    cdef int threads = team(tokens * heads * D // VALUES_PER_NANOSECOND)
    cdef const cec_pointwise_ops *ops = table().pointwise
    if not 0 <= tokens <= x.rows or first < 0 or heads < 1 or (first + heads) * D > stride:
        raise ValueError(f"heads {first} to {first + heads} of {D} in {tokens} of {x.rows} x {stride}")
    for i in prange(tokens * heads, nogil=True, schedule="static", num_threads=threads):
        row = x.p + i // heads * stride + (first + i % heads) * D
        ops.rmsnorm(row, weight.p, eps, D, row)


def add_bias(Matrix x not None, Vector bias not None, int64_t tokens):
    """x[t] += bias for t < tokens, in the first bias.size columns. Raises ValueError."""
    cdef int64_t t, i, n = bias.size, stride = x.cols
    cdef int threads = team(tokens * n // VALUES_PER_NANOSECOND)
    if not 0 <= tokens <= x.rows or n > stride:
        raise ValueError(f"a bias of {n} on {tokens} of {x.rows} x {stride}")
    for t in prange(tokens, nogil=True, schedule="static", num_threads=threads):
        for i in range(n):
            x.p[t * stride + i] += bias.p[i]


def split_heads(Matrix x not None, int64_t tokens, Activations out not None, *, int64_t heads):
    """out[head T + t] = the first columns of a head of x[t], t < T = `tokens`; out says how many.

    The heads lie side by side in x. Raises ValueError.
    """
    cdef int64_t i, cols = out.cols, stride = x.cols
    cdef int threads = team(tokens * heads * cols // VALUES_PER_NANOSECOND)
    if heads < 1 or stride % heads or cols > stride // heads:
        raise ValueError(f"{cols} columns of each of {heads} heads in {stride}")
    if not 0 <= tokens <= x.rows or heads * tokens > out.rows:
        raise ValueError(f"{heads} x {tokens} rows of {x.rows} into {out.rows}")
    for i in prange(heads * tokens, nogil=True, schedule="static", num_threads=threads):
        memcpy(out.f + i * cols, x.p + i % tokens * stride + i // tokens * (stride // heads),
               cols * sizeof(float))
        out.put(i, out.f + i * cols)


def gate_heads(Activations x not None, Matrix gates not None, int64_t tokens, *, int64_t column,
               int64_t heads):
    """x[t], head by head, *= sigmoid(gates[t, column + head]), for t < tokens. Raises ValueError."""
    cdef int64_t t
    cdef int threads = team(tokens * x.cols // VALUES_PER_NANOSECOND)
    if not 0 <= tokens <= min(x.rows, gates.rows) or heads < 1 or x.cols % heads:
        raise ValueError(f"{tokens} tokens of {x.rows} x {x.cols} in {heads} heads, gates {gates.rows}")
    if column < 0 or column + heads > gates.cols:
        raise ValueError(f"gates {column} to {column + heads} of {gates.cols}")
    for t in prange(tokens, nogil=True, schedule="static", num_threads=threads):
        gate_row(x.f + t * x.cols, gates.p + t * gates.cols + column, heads, x.cols // heads)
        x.put(t, x.f + t * x.cols)


cdef void gate_row(float *x, const float *gates, int64_t heads, int64_t width) noexcept nogil:
    cdef int64_t h, i
    cdef float gate
    for h in range(heads):
        table().pointwise.sigmoid(gates + h, 1, &gate)
        for i in range(width):
            x[h * width + i] = x[h * width + i] * gate
