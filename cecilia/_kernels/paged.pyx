# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer over the KV pages of a sequence: what all kinds share.

A call stores the keys and values of its tokens, then works through the pages: every query row (one head of
one token) takes the partial of each page and merges them in page order. Rows are independent and pages lie at
absolute positions, so the bytes do not depend on how tokens come in chunks, nor on how the work is split:
many tokens into (KV head, token tile) items, few tokens over many pages into (KV head, page) items.
"""

from cython.parallel cimport parallel, prange
from libc.math cimport INFINITY, sqrt
from libc.stdint cimport int8_t, int32_t, int64_t
from libc.stdlib cimport free
from libc.string cimport memset
from openmp cimport omp_get_thread_num

from cecilia._kernels.buffer cimport Activations, Matrix, PageList, aligned_zeros
from cecilia._kernels.isa cimport (
    CEC_ALIGN, CEC_HEAD_MAX, CEC_KV_BF16, CEC_KV_F32, CEC_KV_INT8, CEC_PAGE, CEC_PARTS_MAX, cec_round_up,
    table,
)
from cecilia._kernels.threads cimport reserve_scratch, scratch, team

RECIPES = {"f32": CEC_KV_F32, "bf16": CEC_KV_BF16, "int8": CEC_KV_INT8}

cdef enum:
    SPLIT_TOKENS = 4  # most tokens of a call that is split by pages
    SPAN = 32         # pages whose partials are held at once when split by pages
    # Rough speed of one thread, used only to decide how many threads a region deserves.
    DIMENSIONS_PER_NANOSECOND = 1

# Room for the queries and the shared partials of one call. All layers share it: one engine thread calls them.
cdef char *workspace = NULL
cdef int64_t workspace_bytes = 0


def recipe_code(str kv, recipes=RECIPES):
    """The number the kernels know a KV recipe by. Raises ValueError for an unknown one."""
    if kv not in recipes:
        raise ValueError(f"KV recipe {kv!r}; there are: {' '.join(recipes)}")
    return recipes[kv]


def check_width(int64_t width):
    """Raise ValueError unless a part of a head may be so wide."""
    if not 16 <= width <= CEC_HEAD_MAX or width % 16:
        raise ValueError(f"head width {width}: not a multiple of 16 up to {CEC_HEAD_MAX}")


cdef int reserve_workspace(int64_t nbytes) except -1:
    global workspace, workspace_bytes
    if nbytes > workspace_bytes:
        free(workspace)
        workspace, workspace_bytes = NULL, 0
        workspace = <char *>aligned_zeros(nbytes)
        workspace_bytes = nbytes
    return 0


cdef int64_t rows_bytes(int64_t rows, int64_t D) noexcept nogil:
    return 2 * cec_round_up(rows * sizeof(float), CEC_ALIGN) + rows * D * sizeof(float)


cdef Rows rows_at(char *p, int64_t rows, int64_t D) noexcept nogil:
    cdef int64_t head = cec_round_up(rows * sizeof(float), CEC_ALIGN)
    return Rows(<float *>p, <float *>(p + head), <float *>(p + 2 * head))


cdef void clear(Rows r, int64_t rows, int64_t D) noexcept nogil:
    cdef int64_t i
    for i in range(rows):
        r.m[i] = -INFINITY
        r.l[i] = 0
    memset(r.o, 0, rows * D * sizeof(float))


cdef class PagedAttention:
    """heads query heads over kv_heads key/value heads; values are V wide; kv names the page recipe.

    This layer's part of a page starts at byte `offset` and takes `page_bytes`, one KV head after another. A
    call takes at most `capacity` tokens. A kind of attention says how the rows of a token come about
    (`store`, `query`) and how the parts of a page lie (`partial`). Raises ValueError.
    """

    cdef int _bind(self, Shape shape, str kv, int recipe, int64_t offset, int64_t capacity) except -1:
        """Check and set everything, and reserve the room that calls need."""
        if shape.heads < 1 or offset < 0 or offset % CEC_ALIGN or capacity < 1:
            raise ValueError(f"{shape.heads} heads, offset {offset}, capacity {capacity}")
        if shape.kv_heads < 1 or shape.heads % shape.kv_heads:
            raise ValueError(f"{shape.heads} heads over {shape.kv_heads} KV heads")
        if not 1 <= shape.parts <= CEC_PARTS_MAX:
            raise ValueError(f"heads of {shape.parts} parts, at most {CEC_PARTS_MAX}")
        self.shape, self.kv, self.recipe, self.offset, self.capacity = shape, kv, recipe, offset, capacity
        self.heads, self.kv_heads, self.value_dim = shape.heads, shape.kv_heads, shape.value_dim
        self.group = shape.heads // shape.kv_heads
        self.page_bytes = shape.kv_heads * shape.head_bytes
        cdef int64_t partials = (SPAN + 1) * shape.kv_heads * self._rows_bytes(SPLIT_TOKENS)
        cdef int64_t tile = max(SPLIT_TOKENS, shape.tile_tokens)
        reserve_workspace(self._queries_bytes(capacity) + partials)
        reserve_scratch(2 * self._rows_bytes(tile) + self._work_bytes(tile))
        return 0

    cdef int _check(self, Matrix cos, Matrix sin, int64_t half, PageList pages, int64_t first,
                    int64_t tokens) except -1:
        """What every kind's call has to fulfil; `half` angles a position."""
        if not 0 <= tokens <= self.capacity:
            raise ValueError(f"{tokens} tokens, capacity {self.capacity}")
        if cos.cols != half or sin.cols != half or tokens > min(cos.rows, sin.rows):
            raise ValueError(f"angles {cos.rows} x {cos.cols}, {sin.rows} x {sin.cols}, expected {half}")
        if first < 0 or first + tokens > pages.count * CEC_PAGE:
            raise ValueError(f"positions {first} to {first + tokens} in {pages.count} pages of {CEC_PAGE}")
        return 0

    cdef void attend(self, Call *call, Matrix cos, Matrix sin, PageList pages, int64_t first, int64_t tokens,
                     Activations out) noexcept:
        """Run a checked call whose sources are set. out [T, heads V]; or [heads T, V], if it is V wide."""
        cdef bint by_head = out.cols == self.value_dim
        call.ops, call.pointwise = table().attention, table().pointwise
        call.cos, call.sin = cos.p, sin.p
        call.pages, call.first, call.tokens, call.out = pages.pages, first, tokens, out.f
        call.rows = self.heads * tokens
        call.token_stride = out.cols
        call.head_stride = tokens * out.cols if by_head else self.value_dim
        self._place_queries(call)
        with nogil:
            self._run(call, out)

    cdef void store(self, Call *c, int64_t t, int64_t head, char *part, char *room) noexcept nogil:
        """Put token t's key and value of a KV head into this head's part of its page."""

    cdef void query(self, Call *c, int64_t t, int64_t head, int64_t row) noexcept nogil:
        """Make query row `row`, head `head` of token t: each part at `query_part`, rotated, then finished."""

    cdef void partial(self, Call *c, const char *part, int64_t row, int64_t rows, const int32_t *valid,
                      Rows to, char *room) noexcept nogil:
        """Partials of `rows` query rows from `row` on over one KV head's part of a page."""

    cdef float *query_part(self, Call *c, int64_t row, int64_t width, int64_t before) noexcept nogil:
        """Where a row's part of `width` lies, behind parts that are `before` wide in all."""
        return c.q + c.rows * before + row * width

    cdef void finish_query(self, Call *c, int64_t row, int64_t width, int64_t before,
                           int64_t part) noexcept nogil:
        """Scale part number `part` of a query row and (int8) quantise it."""
        cdef int64_t at = c.rows * before + row * width, d
        cdef float *q = c.q + at
        cdef float scale = <float>(1 / sqrt(self.shape.score_dim))
        for d in range(width):
            q[d] = q[d] * scale
        if self.recipe == CEC_KV_INT8:
            c.qd[part * c.rows + row] = c.ops.quantize_query(q, width, c.qi + at)

    cdef int64_t _rows_bytes(self, int64_t tokens) noexcept nogil:
        return rows_bytes(tokens * self.group, self.value_dim)

    cdef int64_t _work_bytes(self, int64_t tokens) noexcept nogil:
        return cec_round_up(tokens * self.group * sizeof(int32_t), CEC_ALIGN) + self.shape.room

    cdef int64_t _queries_bytes(self, int64_t tokens) noexcept nogil:
        cdef int64_t rows = self.heads * tokens
        return (rows * self.shape.query_dim * (sizeof(float) + 1)
                + cec_round_up(rows * self.shape.parts * sizeof(float), CEC_ALIGN))

    cdef void _place_queries(self, Call *c) noexcept nogil:
        c.q = <float *>workspace
        c.qd = c.q + c.rows * self.shape.query_dim
        c.qi = <int8_t *>c.qd + cec_round_up(c.rows * self.shape.parts * sizeof(float), CEC_ALIGN)

    cdef void _run(self, Call *c, Activations out) noexcept nogil:
        cdef int64_t end = c.first + c.tokens, page0 = c.first // CEC_PAGE, pages = (end - 1) // CEC_PAGE + 1
        cdef int64_t touched = (pages - page0) * self.kv_heads, width = self.shape.query_dim + self.value_dim
        cdef int threads = team(c.rows * (pages + page0 + 2) * width // (4 * DIMENSIONS_PER_NANOSECOND))
        cdef int64_t tile = min(self.shape.tile_tokens, max(1, c.tokens * self.kv_heads // (4 * threads)))
        cdef int64_t items = self.kv_heads * ((c.tokens + tile - 1) // tile)
        cdef bint split = threads > 1 and items < 4 * threads and c.tokens <= SPLIT_TOKENS
        cdef int64_t out_rows = c.rows * self.value_dim // out.cols, i
        with parallel(num_threads=threads):
            for i in prange(touched, schedule="static"):
                self._store(c, i % self.kv_heads, page0 + i // self.kv_heads,
                            <char *>scratch(omp_get_thread_num()))
            for i in prange(c.rows, schedule="static"):
                self.query(c, i // self.group % c.tokens,
                           i // (self.group * c.tokens) * self.group + i % self.group, i)
            if not split:
                # The last tiles see the most pages: they go first.
                for i in prange(items, schedule="dynamic"):
                    self._attend(c, i % self.kv_heads, (items - 1 - i) // self.kv_heads * tile, tile,
                                 <char *>scratch(omp_get_thread_num()))
        if split:
            self._run_split(c, pages, threads)
        for i in prange(out_rows, schedule="static", num_threads=threads):
            out.put(i, out.f + i * out.cols)

    cdef void _store(self, Call *c, int64_t head, int64_t page, char *room) noexcept nogil:
        """Put the new tokens of one page into it, for one KV head."""
        cdef int64_t t
        cdef char *part = c.pages[page] + self.offset + head * self.shape.head_bytes
        for t in range(max(0, page * CEC_PAGE - c.first), min(c.tokens, (page + 1) * CEC_PAGE - c.first)):
            self.store(c, t, head, part, room)

    cdef void _page(self, Call *c, int64_t head, int64_t t0, int64_t tokens, int64_t page, char *work,
                    Rows to) noexcept nogil:
        """Partials of `tokens` tokens from t0 on, of one KV head, over one page; `work` is scratch."""
        cdef int64_t row = (head * c.tokens + t0) * self.group, rows = tokens * self.group, r
        cdef int32_t *valid = <int32_t *>work
        for r in range(rows):
            valid[r] = <int32_t>min(CEC_PAGE, max(0, c.first + t0 + r // self.group + 1 - page * CEC_PAGE))
        self.partial(c, c.pages[page] + self.offset + head * self.shape.head_bytes, row, rows, valid, to,
                     work + cec_round_up(rows * sizeof(int32_t), CEC_ALIGN))

    cdef void _merge(self, Call *c, Rows total, Rows part, int64_t row) noexcept nogil:
        cdef int64_t D = self.value_dim
        c.ops.merge(&total.m[row], &total.l[row], total.o + row * D,
                    part.m[row], part.l[row], part.o + row * D, D)

    cdef void _finish(self, Call *c, int64_t head, int64_t t0, int64_t tokens, Rows total) noexcept nogil:
        """out = o / l."""
        cdef int64_t D = self.value_dim, r, d
        cdef float *out
        cdef float inverse
        for r in range(tokens * self.group):
            out = (c.out + (t0 + r // self.group) * c.token_stride
                   + (head * self.group + r % self.group) * c.head_stride)
            inverse = 1 / total.l[r]
            for d in range(D):
                out[d] = total.o[r * D + d] * inverse

    cdef void _attend(self, Call *c, int64_t head, int64_t t0, int64_t tile, char *area) noexcept nogil:
        """All pages of one KV head for the tokens of one tile."""
        cdef int64_t tokens = min(tile, c.tokens - t0), rows = tokens * self.group, page, r
        cdef Rows total = rows_at(area, rows, self.value_dim)
        cdef Rows part = rows_at(area + self._rows_bytes(tokens), rows, self.value_dim)
        cdef char *work = area + 2 * self._rows_bytes(tokens)
        clear(total, rows, self.value_dim)
        for page in range((c.first + t0 + tokens - 1) // CEC_PAGE + 1):
            self._page(c, head, t0, tokens, page, work, part)
            for r in range(rows):
                self._merge(c, total, part, r)
        self._finish(c, head, t0, tokens, total)

    cdef void _run_split(self, Call *c, int64_t pages, int threads) noexcept nogil:
        """A call of few tokens: the partials of SPAN pages, item by item, then their merging, row by row."""
        cdef int64_t D = self.value_dim, rows = c.tokens * self.group, nbytes = self._rows_bytes(c.tokens)
        cdef char *area = workspace + self._queries_bytes(c.tokens)
        cdef char *parts = area + self.kv_heads * nbytes
        cdef int64_t batch, start, span, i
        for i in range(self.kv_heads):
            clear(rows_at(area + i * nbytes, rows, D), rows, D)
        for batch in range((pages + SPAN - 1) // SPAN):
            start = batch * SPAN
            span = min(SPAN, pages - start)
            with parallel(num_threads=threads):
                for i in prange(self.kv_heads * span, schedule="static"):
                    self._page(c, i // span, 0, c.tokens, start + i % span,
                               <char *>scratch(omp_get_thread_num()), rows_at(parts + i * nbytes, rows, D))
                for i in prange(self.kv_heads * rows, schedule="static"):
                    self._merge_span(c, area + i // rows * nbytes, parts + i // rows * span * nbytes, span,
                                     i % rows)
        for i in range(self.kv_heads):
            self._finish(c, i, 0, c.tokens, rows_at(area + i * nbytes, rows, D))

    cdef void _merge_span(self, Call *c, char *area, char *parts, int64_t span, int64_t row) noexcept nogil:
        """Merge one row's partials of `span` pages, in page order."""
        cdef int64_t D = self.value_dim, rows = c.tokens * self.group, nbytes = self._rows_bytes(c.tokens), i
        for i in range(span):
            self._merge(c, rows_at(area, rows, D), rows_at(parts + i * nbytes, rows, D), row)
