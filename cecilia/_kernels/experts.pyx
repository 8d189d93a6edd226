# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts: who is chosen, and the chosen ones' SwiGLU blocks as a few flat parallel regions.

Tokens are gathered by expert, so each expert's weights are read once a call. What a token gets is added in
ascending order of the experts, then the shared one, whatever the number of tokens and threads.
"""

from cython.parallel cimport parallel, prange
from libc.math cimport INFINITY
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from openmp cimport omp_get_thread_num

from cecilia._kernels.buffer cimport Activations, Matrix, Vector
from cecilia._kernels.isa cimport (
    CEC_BLOCK, CEC_TILE, cec_acts, cec_linear_ops, cec_pointwise_ops, cec_tile_bytes, cec_tile_scratch, table,
)
from cecilia._kernels.linear cimport Weight
from cecilia._kernels.threads cimport reserve_scratch, scratch, team

cdef enum:
    MOST_EXPERTS = 1024
    RUN = 4  # tiles of one matrix that a work item reads one after another: memory likes it
    # Rough speeds of one thread, used only to decide how many threads a region deserves.
    BYTES_PER_NANOSECOND = 10
    PRODUCTS_PER_NANOSECOND = 60
    VALUES_PER_NANOSECOND = 2


cdef class Routes:
    """Which `used` of `experts` each of up to `capacity` tokens goes to, and with what weight.

    Rows are (token, expert) pairs by expert, then token: those of expert e are starts[e] to starts[e + 1].
    """

    def __cinit__(self, *, int64_t experts, int64_t used, int64_t capacity):
        if not 1 <= used <= experts <= MOST_EXPERTS or capacity < 1:
            raise ValueError(f"{used} of {experts} experts, capacity {capacity}")
        self.experts, self.used, self.capacity = experts, used, capacity
        self.ids = <int32_t *>calloc(capacity * used, sizeof(int32_t))
        self.weights = <float *>calloc(capacity * used, sizeof(float))
        self.starts = <int64_t *>calloc(experts + 1, sizeof(int64_t))
        self.active = <int64_t *>calloc(experts, sizeof(int64_t))
        self.row_tokens = <int64_t *>calloc(capacity * used, sizeof(int64_t))
        self.row_weights = <float *>calloc(capacity * used, sizeof(float))
        if not (self.ids and self.weights and self.starts and self.active and self.row_tokens
                and self.row_weights):
            raise MemoryError("routes")

    def __dealloc__(self):
        free(self.ids)
        free(self.weights)
        free(self.starts)
        free(self.active)
        free(self.row_tokens)
        free(self.row_weights)

    def of(self, int64_t token):
        """(expert, weight) of one token, in ascending order of the experts."""
        if not 0 <= token < self.tokens:
            raise IndexError(f"token {token} of {self.tokens}")
        cdef int64_t at = token * self.used
        return [(self.ids[at + i], self.weights[at + i]) for i in range(self.used)]

    cdef void sort(self, int64_t tokens) noexcept nogil:
        """Make the rows from ids and weights of `tokens` tokens."""
        cdef int64_t e, i, row, n = tokens * self.used
        self.tokens = tokens
        for e in range(self.experts + 1):
            self.starts[e] = 0
        for i in range(n):
            self.starts[self.ids[i] + 1] += 1
        for e in range(self.experts):
            self.starts[e + 1] += self.starts[e]
        for i in range(n):  # starts[e] moves on to the end of e, which is the start of e + 1
            row = self.starts[self.ids[i]]
            self.starts[self.ids[i]] += 1
            self.row_tokens[row], self.row_weights[row] = i // self.used, self.weights[i]
        for e in range(self.experts, 0, -1):
            self.starts[e] = self.starts[e - 1]
        self.starts[0] = 0
        self.actives = 0
        for e in range(self.experts):
            if self.starts[e] < self.starts[e + 1]:
                self.active[self.actives] = e
                self.actives += 1


cdef class GroupRouter:
    """Sigmoid routing limited to groups, of DeepSeek-V3 (arXiv 2412.19437) and Ling.

    s = sigmoid(logits), r = s + bias. A group of neighbouring experts scores the sum of its two largest r;
    the `groups_used` best groups stay, and of theirs the `used` largest r are chosen; equal ones: the first.
    Their weights are s / (sum of the chosen s + 1e-20) * scale. Raises ValueError.
    """

    cdef Vector bias
    cdef int64_t groups, groups_used
    cdef float scale

    def __cinit__(self, Vector bias not None, *, int64_t groups, int64_t groups_used, float scale):
        if groups < 1 or bias.size % groups or not 1 <= groups_used <= groups or bias.size > MOST_EXPERTS:
            raise ValueError(f"{groups_used} of {groups} groups of {bias.size} experts")
        if bias.size // groups < 2:
            raise ValueError(f"groups of {bias.size // groups} experts have no two best")
        self.bias, self.groups, self.groups_used, self.scale = bias, groups, groups_used, scale

    def __call__(self, Matrix logits not None, int64_t tokens, Routes routes not None):
        """Choose for `tokens` rows of logits [T, E]. Raises ValueError."""
        cdef int64_t t, E = self.bias.size
        if logits.cols != E or routes.experts != E or routes.used > self.groups_used * (E // self.groups):
            raise ValueError(f"{routes.used} of {routes.experts} experts from {logits.cols} logits of {E}")
        if not 0 <= tokens <= min(logits.rows, routes.capacity):
            raise ValueError(f"{tokens} tokens of {logits.rows}, capacity {routes.capacity}")
        cdef const cec_pointwise_ops *ops = table().pointwise
        for t in prange(tokens, nogil=True, schedule="static", num_threads=team(tokens * E * 16)):
            self._choose(ops, logits.p + t * E, routes.ids + t * routes.used,
                         routes.weights + t * routes.used, routes.used)
        routes.sort(tokens)

    cdef void _choose(self, const cec_pointwise_ops *ops, const float *logits, int32_t *ids, float *weights,
                      int64_t used) noexcept nogil:
        cdef float s[MOST_EXPERTS]
        cdef float r[MOST_EXPERTS]
        cdef float scores[MOST_EXPERTS]
        cdef char kept[MOST_EXPERTS]
        cdef int64_t e, g, E = self.bias.size, size = E // self.groups, n = 0
        cdef float total = 0
        ops.sigmoid(logits, E, s)
        for e in range(E):
            r[e] = s[e] + self.bias.p[e]
        for g in range(self.groups):
            scores[g] = two_best(r + g * size, size)
        mark_best(scores, self.groups, self.groups_used, kept)
        for e in range(E):
            if not kept[e // size]:
                r[e] = -INFINITY
        mark_best(r, E, used, kept)
        for e in range(E):
            if kept[e]:
                ids[n], weights[n] = <int32_t>e, s[e]
                total = total + s[e]
                n += 1
        for e in range(used):
            weights[e] = weights[e] / (total + <float>1e-20) * self.scale


cdef float two_best(const float *x, int64_t n) noexcept nogil:
    """The sum of the two largest of n >= 2 values."""
    cdef float first = max(x[0], x[1]), second = min(x[0], x[1])
    cdef int64_t i
    for i in range(2, n):
        if x[i] > first:
            first, second = x[i], first
        elif x[i] > second:
            second = x[i]
    return first + second


cdef void mark_best(const float *x, int64_t n, int64_t count, char *marks) noexcept nogil:
    """Mark the `count` largest of x, of equal ones the first; always so many, even among values that are no
    numbers."""
    cdef int64_t i, _, best
    for i in range(n):
        marks[i] = 0
    for _ in range(count):
        best = 0
        while marks[best]:
            best += 1
        for i in range(best + 1, n):
            if not marks[i] and x[i] > x[best]:
                best = i
        marks[best] = 1


cdef struct Operands:
    # One expert's tiles.
    const char *gate
    const char *up
    const char *down


cdef struct Codes:
    # Formats and bytes of a tile, the same for all experts.
    int gate
    int up
    int down
    int64_t gate_bytes
    int64_t up_bytes
    int64_t down_bytes


cdef class ExpertBuffers:
    """Room for one call's rows, shared by all layers; widths as in Experts, shared_ff 0 without a shared one.

    Rows are quantised too where their width allows it. Raises ValueError.
    """

    cdef readonly int64_t cols, ff, shared_ff, used, capacity
    cdef Activations gathered, hidden, shared_hidden
    cdef Matrix gate_up, shared_gate_up

    def __cinit__(self, *, int64_t cols, int64_t ff, int64_t shared_ff, int64_t used, int64_t capacity):
        if min(cols, ff, used, capacity) < 1 or shared_ff < 0:
            raise ValueError(f"buffers of {cols}, {ff}, {shared_ff} for {capacity} x {used} rows")
        cdef int64_t rows = capacity * used, inner = max(shared_ff, 1)
        self.cols, self.ff, self.shared_ff, self.used, self.capacity = cols, ff, shared_ff, used, capacity
        self.gathered = Activations(rows, cols, ints=cols % CEC_BLOCK == 0)
        self.gate_up = Matrix(rows, 2 * ff)
        self.hidden = Activations(rows, ff, ints=ff % CEC_BLOCK == 0)
        self.shared_gate_up = Matrix(capacity, 2 * inner)
        self.shared_hidden = Activations(capacity, inner, ints=inner % CEC_BLOCK == 0)


cdef class Experts:
    """Experts gate, up [F, D] and down [D, F], and maybe a shared one of its own F; each role in one format.

    A call takes as many tokens as `buffers` hold and chooses as many experts for each. Raises ValueError.
    """

    cdef readonly int64_t experts, used, capacity, ff, shared_ff, cols
    cdef readonly bint ints
    cdef bint has_shared, floats  # floats: whether the chosen experts read f32
    cdef list weights         # keeps the data alive
    cdef Operands *of         # [E]
    cdef Operands shared
    cdef Codes codes, shared_codes
    cdef Activations gathered, hidden, shared_hidden  # of the buffers
    cdef Matrix gate_up, shared_gate_up
    cdef int64_t room         # bytes of scratch that a tile needs

    def __cinit__(self, gate, up, down, *, shared=None, ExpertBuffers buffers not None):
        cdef int64_t e
        cdef Weight w, w_up, w_down
        self.experts = len(gate)
        if not buffers.used <= self.experts <= MOST_EXPERTS or not len(gate) == len(up) == len(down):
            raise ValueError(f"{buffers.used} of {len(gate)}, {len(up)} and {len(down)} experts")
        w = gate[0]
        self.ff, self.cols = w.rows, w.cols
        self.weights = [gate, up, down, shared]
        self.used, self.capacity = buffers.used, buffers.capacity
        self.gathered, self.hidden = buffers.gathered, buffers.hidden
        self.shared_hidden = buffers.shared_hidden
        self.gate_up, self.shared_gate_up = buffers.gate_up, buffers.shared_gate_up
        self.of = <Operands *>calloc(self.experts, sizeof(Operands))
        if self.of == NULL:
            raise MemoryError("experts")
        for e in range(self.experts):
            self.of[e] = self._operands(gate[e], up[e], down[e], self.ff, &self.codes, e > 0)
        self.ints = self.codes.gate > 1 or self.codes.up > 1
        self.floats = self.codes.gate <= 1 or self.codes.up <= 1
        if shared is not None:
            self.has_shared = True
            self.shared_ff = (<Weight>shared[0]).rows
            w, w_up, w_down = shared
            self.shared = self._operands(w, w_up, w_down, self.shared_ff, &self.shared_codes, False)
            self.ints = self.ints or self.shared_codes.gate > 1 or self.shared_codes.up > 1
        if (buffers.cols, buffers.ff, buffers.shared_ff) != (self.cols, self.ff, self.shared_ff):
            raise ValueError(
                f"buffers of {buffers.cols}, {buffers.ff} and {buffers.shared_ff} for experts of "
                f"{self.cols}, {self.ff} and {self.shared_ff}"
            )
        self.room = cec_tile_scratch(max(self.cols, self.ff, self.shared_ff))
        reserve_scratch(self.room + self.capacity * CEC_TILE * sizeof(float))

    def __dealloc__(self):
        free(self.of)

    cdef Operands _operands(self, Weight gate, Weight up, Weight down, int64_t ff, Codes *codes,
                            bint same) except *:
        cdef Codes found = Codes(gate.code, up.code, down.code, cec_tile_bytes(gate.code, gate.cols),
                                 cec_tile_bytes(up.code, up.cols), cec_tile_bytes(down.code, down.cols))
        inner, outer = (gate.rows, up.rows, down.cols), (gate.cols, up.cols, down.rows)
        if inner != 3 * (ff,) or outer != 3 * (self.cols,):
            raise ValueError(
                f"an expert of {gate.rows} and {up.rows} x {gate.cols} and {down.rows} x {down.cols}, "
                f"expected {ff} x {self.cols}"
            )
        if same and (found.gate, found.up, found.down) != (codes.gate, codes.up, codes.down):
            raise ValueError(f"experts in {gate.format}, {up.format}, {down.format} beside others")
        codes[0] = found
        return Operands(<const char *>&gate.data[0], <const char *>&up.data[0], <const char *>&down.data[0])

    def __call__(self, Activations x not None, Routes routes not None, Matrix y not None):
        """y[t] += sum of weight * expert(x[t]) over the routes of t, then + shared(x[t]); x, y [T, D]."""
        cdef int64_t T = routes.tokens
        cdef int64_t most = min(self.capacity, x.rows, y.rows)
        if (routes.experts, routes.used) != (self.experts, self.used) or T > most:
            raise ValueError(
                f"{T} tokens to {routes.used} of {routes.experts}, made for {self.used} of {self.experts} "
                f"and {self.capacity} tokens"
            )
        if x.cols != self.cols or y.cols != self.cols or (self.ints and x.q == NULL):
            raise ValueError(f"activations {x.cols} into {y.cols} columns, experts of {self.cols}")
        if T:
            with nogil:
                self._run(x, routes, y)

    cdef void _run(self, Activations x, Routes routes, Matrix y) noexcept nogil:
        cdef const cec_linear_ops *ops = table().linear
        cdef int64_t T = routes.tokens, rows = T * self.used, i
        cdef int64_t per_expert = runs(self.ff), per_shared = runs(self.shared_ff)
        cdef int64_t products = (rows * self.ff + T * self.shared_ff) * self.cols
        cdef int64_t read = routes.actives * per_expert * RUN * (self.codes.gate_bytes + self.codes.up_bytes)
        cdef int threads = team(read // BYTES_PER_NANOSECOND + products // PRODUCTS_PER_NANOSECOND)
        with parallel(num_threads=threads):
            if T > 1:
                for i in prange(rows, schedule="static"):
                    copy_row(x, routes.row_tokens[i], self.gathered, i, self.floats)
            for i in prange(routes.actives * per_expert + per_shared, schedule="dynamic"):
                self._gate_up(ops, x, routes, i, per_expert)
            for i in prange(rows + T, schedule="static"):
                self._gate(routes, i, rows)
            for i in prange(runs(self.cols), schedule="dynamic"):
                self._down(ops, routes, y, i * RUN)

    cdef void _gate_up(self, const cec_linear_ops *ops, Activations x, Routes routes, int64_t item,
                       int64_t per_expert) noexcept nogil:
        """A run of gate and that of up, of an expert for its rows or of the shared one for all tokens."""
        cdef int64_t e, first, last
        if item >= routes.actives * per_expert:
            self._two_runs(ops, &self.shared, &self.shared_codes, &x.acts, 0, routes.tokens,
                           item - routes.actives * per_expert, self.shared_ff, self.shared_gate_up.p)
            return
        e = routes.active[item // per_expert]
        first, last = routes.starts[e], routes.starts[e + 1]
        if routes.tokens > 1:
            self._two_runs(ops, &self.of[e], &self.codes, &self.gathered.acts, first, last, item % per_expert,
                           self.ff, self.gate_up.p)
        else:  # every row is the one token
            self._two_runs(ops, &self.of[e], &self.codes, &x.acts, 0, 1, item % per_expert, self.ff,
                           self.gate_up.p + first * 2 * self.ff)

    cdef void _two_runs(self, const cec_linear_ops *ops, const Operands *w, const Codes *codes,
                        const cec_acts *x, int64_t first, int64_t last, int64_t run, int64_t ff,
                        float *out) noexcept nogil:
        cdef int64_t tile, begin = run * RUN, end = min(begin + RUN, (ff + CEC_TILE - 1) // CEC_TILE)
        cdef void *room = scratch(omp_get_thread_num())
        for tile in range(begin, end):
            ops.tile[codes.gate](w.gate + tile * codes.gate_bytes, x, first, last, rows_of(tile, ff),
                                 out + tile * CEC_TILE, 2 * ff, 0, room)
        for tile in range(begin, end):
            ops.tile[codes.up](w.up + tile * codes.up_bytes, x, first, last, rows_of(tile, ff),
                               out + ff + tile * CEC_TILE, 2 * ff, 0, room)

    cdef void _gate(self, Routes routes, int64_t row, int64_t rows) noexcept nogil:
        """silu(gate) * up of one row, times the expert's weight; quantised for `down`."""
        cdef const cec_pointwise_ops *ops = table().pointwise
        cdef int64_t i, F = self.ff
        cdef float *to
        cdef const float *gate
        if row < rows:
            gate, to = self.gate_up.p + row * 2 * F, self.hidden.f + row * F
            ops.swiglu(gate, gate + F, F, to)
            for i in range(F):
                to[i] = to[i] * routes.row_weights[row]
            self.hidden.put(row, to)
        elif self.has_shared:
            row, F = row - rows, self.shared_ff
            gate, to = self.shared_gate_up.p + row * 2 * F, self.shared_hidden.f + row * F
            ops.swiglu(gate, gate + F, F, to)
            self.shared_hidden.put(row, to)

    cdef void _down(self, const cec_linear_ops *ops, Routes routes, Matrix y, int64_t begin) noexcept nogil:
        """The columns of y of a run of tiles from `begin` on: every expert in turn, then the shared one."""
        cdef void *room = scratch(omp_get_thread_num())
        cdef int64_t a, tile, end = min(begin + RUN, (self.cols + CEC_TILE - 1) // CEC_TILE)
        for a in range(routes.actives):
            for tile in range(begin, end):
                self._add_expert(ops, routes, routes.active[a], tile, y)
        if self.has_shared:
            for tile in range(begin, end):
                ops.tile[self.shared_codes.down](
                    self.shared.down + tile * self.shared_codes.down_bytes, &self.shared_hidden.acts, 0,
                    routes.tokens, rows_of(tile, self.cols), y.p + tile * CEC_TILE, y.cols, 1, room,
                )

    cdef void _add_expert(self, const cec_linear_ops *ops, Routes routes, int64_t e, int64_t tile,
                          Matrix y) noexcept nogil:
        """Add one expert's part of 16 columns to the tokens it was chosen for."""
        cdef char *room = <char *>scratch(omp_get_thread_num())
        cdef float *part = <float *>(room + self.room)  # [rows of the expert][16]
        cdef float *to = y.p + tile * CEC_TILE
        cdef int rows = rows_of(tile, self.cols)
        cdef int64_t first = routes.starts[e], last = routes.starts[e + 1], i, j
        ops.tile[self.codes.down](self.of[e].down + tile * self.codes.down_bytes, &self.hidden.acts, first,
                                  last, rows, part - first * CEC_TILE, CEC_TILE, 0, room)
        for i in range(last - first):
            for j in range(rows):
                to[routes.row_tokens[first + i] * y.cols + j] += part[i * CEC_TILE + j]


cdef int64_t runs(int64_t rows) noexcept nogil:
    """How many runs of tiles a matrix of so many rows is read in."""
    return (rows + CEC_TILE * RUN - 1) // (CEC_TILE * RUN)


cdef int rows_of(int64_t tile, int64_t rows) noexcept nogil:
    """Rows of a tile: fewer than 16 in the last one, maybe."""
    return <int>min(CEC_TILE, rows - tile * CEC_TILE)


cdef void copy_row(Activations x, int64_t token, Activations to, int64_t row, bint floats) noexcept nogil:
    """Copy a token's activations to a row of its expert: as f32 when asked, quantised if both are."""
    cdef int64_t K = x.cols, blocks = x.cols // CEC_BLOCK
    if floats:
        memcpy(to.f + row * K, x.f + token * K, K * sizeof(float))
    if to.q != NULL and x.q != NULL:
        memcpy(to.q + row * K, x.q + token * K, K)
        memcpy(to.d + row * blocks, x.d + token * blocks, blocks * sizeof(float))
        memcpy(to.s + row * blocks, x.s + token * blocks, blocks * sizeof(float))
        memcpy(to.c + row * blocks, x.c + token * blocks, blocks * sizeof(int32_t))


cdef class Grouped:
    """A linear layer for each of several groups of rows; all weights are [R, K], in one format.

    Raises ValueError.
    """

    cdef readonly int64_t groups, rows, cols
    cdef readonly bint ints
    cdef int code
    cdef list weights       # keeps the data alive
    cdef const char **data  # [G]

    def __cinit__(self, weights):
        cdef Weight w, first
        self.weights = list(weights)
        if not self.weights:
            raise ValueError("a grouped layer without weights")
        first = self.weights[0]
        self.rows, self.cols, self.code = first.rows, first.cols, first.code
        self.ints = self.code > 1
        for w in self.weights:
            if (w.rows, w.cols, w.code) != (self.rows, self.cols, self.code):
                raise ValueError(
                    f"a {w.format} weight of {w.rows} x {w.cols} beside {first.format} of {self.rows} x "
                    f"{self.cols}"
                )
        self.groups = len(self.weights)
        self.data = <const char **>calloc(self.groups, sizeof(char *))
        if self.data == NULL:
            raise MemoryError("groups")
        for i, w in enumerate(self.weights):
            self.data[i] = <const char *>&w.data[0]
        reserve_scratch(cec_tile_scratch(self.cols))

    def __dealloc__(self):
        free(self.data)

    def __call__(self, Activations x not None, int64_t tokens, Activations y not None):
        """y[t, g R : (g + 1) R] = W[g] x[g T + t] for t < T = `tokens`; x holds one group after another.

        Only the f32 form of y is written. Raises ValueError.
        """
        cdef int64_t T = tokens, G = self.groups, i, tiles = (self.rows + CEC_TILE - 1) // CEC_TILE
        if not 0 <= T <= y.rows or G * T > x.rows or x.cols != self.cols or y.cols < G * self.rows:
            raise ValueError(
                f"{G} x {T} rows of {x.rows} x {x.cols} through {self.rows} x {self.cols} "
                f"into {y.rows} x {y.cols}"
            )
        if self.ints and x.q == NULL:
            raise ValueError("a quantised weight needs quantised activations")
        cdef const cec_linear_ops *ops = table().linear
        cdef int64_t tile_bytes = cec_tile_bytes(self.code, self.cols)
        cdef int n = team(G * tiles * tile_bytes // BYTES_PER_NANOSECOND
                          + G * T * self.rows * self.cols // PRODUCTS_PER_NANOSECOND)
        with nogil, parallel(num_threads=n):
            for i in prange(G * tiles, schedule="static"):
                self._tile(ops, &x.acts, T, i // tiles, i % tiles, tile_bytes, y.f, y.cols)

    cdef void _tile(self, const cec_linear_ops *ops, const cec_acts *x, int64_t T, int64_t g, int64_t tile,
                    int64_t tile_bytes, float *y, int64_t ldy) noexcept nogil:
        cdef int64_t column = g * self.rows + tile * CEC_TILE
        # The kernel counts rows of x and y alike, so y begins g T rows early.
        ops.tile[self.code](self.data[g] + tile * tile_bytes, x, g * T, (g + 1) * T,
                            <int>min(CEC_TILE, self.rows - tile * CEC_TILE), y + column - g * T * ldy, ldy, 0,
                            scratch(omp_get_thread_num()))
