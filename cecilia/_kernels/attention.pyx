# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer over the KV pages of a sequence: what all kinds share, and grouped-query attention.

A call stores the keys and values of its tokens, then works through the pages: every query row (one head of
one token) takes the partial of each page and merges them in page order. Rows are independent and pages lie at
absolute positions, so the bytes do not depend on how tokens come in chunks, nor on how the work is split:
many tokens into (KV head, token tile) items, few tokens over many pages into (KV head, page) items.
"""

cimport cython
from cython.parallel cimport parallel, prange
from libc.math cimport INFINITY, sqrt
from libc.stdint cimport int8_t, int32_t, int64_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset
from openmp cimport omp_get_thread_num

from cecilia._kernels.buffer cimport Activations, Matrix, PageList, aligned_zeros
from cecilia._kernels.isa cimport (
    CEC_ALIGN, CEC_HEAD_MAX, CEC_KV_BF16, CEC_KV_F32, CEC_KV_INT8, CEC_PAGE, cec_kv_part_bytes,
    cec_round_up, table,
)
from cecilia._kernels.threads cimport reserve_scratch, scratch, team

RECIPES = {"f32": CEC_KV_F32, "bf16": CEC_KV_BF16, "int8": CEC_KV_INT8}

cdef enum:
    TILE_TOKENS = 16  # most tokens of an item that works through all pages
    SPLIT_TOKENS = 4  # most tokens of a call that is split by pages
    SPAN = 32         # pages whose partials are held at once when split by pages
    # Rough speed of one thread, used only to decide how many threads a region deserves.
    DIMENSIONS_PER_NANOSECOND = 1

# Room for the queries and the shared partials of one call. All layers share it: one engine thread calls them.
cdef char *workspace = NULL
cdef int64_t workspace_bytes = 0


def page_bytes(str kv, int64_t kv_heads, int64_t head_dim):
    """Bytes one layer takes in a KV page. Raises ValueError for an unknown recipe."""
    if kv not in RECIPES:
        raise ValueError(f"KV recipe {kv!r}; there are: {' '.join(RECIPES)}")
    return 2 * kv_heads * cec_kv_part_bytes(RECIPES[kv], head_dim)


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
    """heads query heads over kv_heads key/value heads; keys are K wide, values V; kv names the page recipe.

    This layer's part of a page starts at byte `offset` and takes `page_bytes`: for each KV head its K part,
    then its V part. A call takes at most `capacity` tokens. A kind of attention says how the rows of a token
    come about: `key`, `value` and `query`. Raises ValueError.
    """

    cdef int _bind(self, int64_t heads, int64_t kv_heads, int64_t key_dim, int64_t value_dim, str kv,
                   int64_t offset, int64_t capacity) except -1:
        """Check and set everything, and reserve the room that calls need."""
        if kv not in RECIPES:
            raise ValueError(f"KV recipe {kv!r}; there are: {' '.join(RECIPES)}")
        if heads < 1 or offset < 0 or offset % CEC_ALIGN or capacity < 1:
            raise ValueError(f"{heads} heads, offset {offset}, capacity {capacity}")
        self.heads, self.kv, self.offset, self.capacity = heads, kv, offset, capacity
        self.recipe = RECIPES[kv]
        cdef int64_t width
        if kv_heads < 1 or self.heads % kv_heads:
            raise ValueError(f"{self.heads} heads over {kv_heads} KV heads")
        for width in (key_dim, value_dim):
            if not 16 <= width <= CEC_HEAD_MAX or width % 16:
                raise ValueError(f"head width {width}: not a multiple of 16 up to {CEC_HEAD_MAX}")
        self.kv_heads, self.key_dim, self.value_dim = kv_heads, key_dim, value_dim
        self.group = self.heads // kv_heads
        self.key_part = cec_kv_part_bytes(self.recipe, key_dim)
        self.head_part = self.key_part + cec_kv_part_bytes(self.recipe, value_dim)
        self.page_bytes = kv_heads * self.head_part
        cdef int64_t partials = (SPAN + 1) * kv_heads * self._rows_bytes(SPLIT_TOKENS)
        reserve_workspace(self._queries_bytes(self.capacity) + partials)
        reserve_scratch(max(
            2 * self._rows_bytes(TILE_TOKENS) + TILE_TOKENS * self.group * sizeof(int32_t),
            key_dim * sizeof(float),
        ))
        return 0

    cdef int _check(self, Matrix cos, Matrix sin, int64_t half, PageList pages, int64_t first, int64_t tokens,
                    Activations out) except -1:
        """What every kind's call has to fulfil; `half` angles a position."""
        if not 0 <= tokens <= self.capacity or tokens > out.rows:
            raise ValueError(f"{tokens} tokens, capacity {self.capacity}, into {out.rows} rows")
        if out.cols != self.heads * self.value_dim:
            raise ValueError(f"{self.heads} heads of {self.value_dim} into {out.cols} columns")
        if cos.cols != half or sin.cols != half or tokens > min(cos.rows, sin.rows):
            raise ValueError(f"angles {cos.rows} x {cos.cols}, {sin.rows} x {sin.cols}, expected {half}")
        if first < 0 or first + tokens > pages.count * CEC_PAGE:
            raise ValueError(f"positions {first} to {first + tokens} in {pages.count} pages of {CEC_PAGE}")
        return 0

    cdef void attend(self, Call *call, Matrix cos, Matrix sin, PageList pages, int64_t first, int64_t tokens,
                     Activations out) noexcept:
        """Run a checked call whose sources are set."""
        call.ops, call.pointwise = table().attention, table().pointwise
        call.cos, call.sin = cos.p, sin.p
        call.pages, call.first, call.tokens, call.out = pages.pages, first, tokens, out.f
        self._place_queries(call)
        with nogil:
            self._run(call, out)

    cdef void key(self, Call *c, int64_t t, int64_t head, float *to) noexcept nogil:
        """Write the rotated key [K] of token t and KV head."""

    cdef const float *value(self, Call *c, int64_t t, int64_t head) noexcept nogil:
        """The value [V] of token t and KV head."""

    cdef void query(self, Call *c, int64_t t, int64_t head, float *to) noexcept nogil:
        """Write the rotated query [K] of token t and query head, not yet scaled."""

    cdef int64_t _rows_bytes(self, int64_t tokens) noexcept nogil:
        return rows_bytes(tokens * self.group, self.value_dim)

    cdef int64_t _queries_bytes(self, int64_t tokens) noexcept nogil:
        cdef int64_t rows = self.heads * tokens
        return rows * self.key_dim * (sizeof(float) + 1) + cec_round_up(rows * sizeof(float), CEC_ALIGN)

    cdef void _place_queries(self, Call *c) noexcept nogil:
        cdef int64_t rows = self.heads * c.tokens
        c.q = <float *>workspace
        c.qd = c.q + rows * self.key_dim
        c.qi = <int8_t *>c.qd + cec_round_up(rows * sizeof(float), CEC_ALIGN)

    cdef void _run(self, Call *c, Activations out) noexcept nogil:
        cdef int64_t end = c.first + c.tokens, page0 = c.first // CEC_PAGE, pages = (end - 1) // CEC_PAGE + 1
        cdef int64_t rows = self.heads * c.tokens, touched = (pages - page0) * self.kv_heads
        cdef int threads = team(
            rows * (pages + page0 + 2) * (self.key_dim + self.value_dim) // (4 * DIMENSIONS_PER_NANOSECOND)
        )
        cdef int64_t tile = min(TILE_TOKENS, max(1, c.tokens * self.kv_heads // (4 * threads)))
        cdef int64_t items = self.kv_heads * ((c.tokens + tile - 1) // tile)
        cdef bint split = threads > 1 and items < 4 * threads and c.tokens <= SPLIT_TOKENS
        cdef int64_t i
        with parallel(num_threads=threads):
            for i in prange(touched, schedule="static"):
                self._store(c, i % self.kv_heads, page0 + i // self.kv_heads,
                            <float *>scratch(omp_get_thread_num()))
            if not split:
                # The last tiles see the most pages: they go first.
                for i in prange(items, schedule="dynamic"):
                    self._attend(c, i % self.kv_heads, (items - 1 - i) // self.kv_heads * tile, tile,
                                 <char *>scratch(omp_get_thread_num()))
        if split:
            self._run_split(c, pages, threads)
        for i in prange(c.tokens, schedule="static", num_threads=threads):
            out.put(i, out.f + i * out.cols)

    cdef void _store(self, Call *c, int64_t head, int64_t page, float *key) noexcept nogil:
        """Put the new tokens of one page into it, for one KV head, and prepare the queries of this head."""
        cdef int64_t t, g, row
        cdef char *part = c.pages[page] + self.offset + head * self.head_part
        for t in range(max(0, page * CEC_PAGE - c.first), min(c.tokens, (page + 1) * CEC_PAGE - c.first)):
            self.key(c, t, head, key)
            c.ops.store_k[self.recipe](key, self.key_dim, part, <int>((c.first + t) % CEC_PAGE))
            c.ops.store_v[self.recipe](self.value(c, t, head), self.value_dim, part + self.key_part,
                                       <int>((c.first + t) % CEC_PAGE))
            for g in range(self.group):
                row = (head * c.tokens + t) * self.group + g
                self._query(c, t, head * self.group + g, row)

    cdef void _query(self, Call *c, int64_t t, int64_t head, int64_t row) noexcept nogil:
        """Rotate, scale and (int8) quantise one query head."""
        cdef int64_t K = self.key_dim, d
        cdef float *q = c.q + row * K
        cdef float scale = <float>(1 / sqrt(K))
        self.query(c, t, head, q)
        for d in range(K):
            q[d] = q[d] * scale
        if self.recipe == CEC_KV_INT8:
            c.qd[row] = c.ops.quantize_query(q, K, c.qi + row * K)

    cdef void _page(self, Call *c, int64_t head, int64_t t0, int64_t tokens, int64_t page, int32_t *valid,
                    Rows to) noexcept nogil:
        """Partials of `tokens` tokens from t0 on, of one KV head, over one page; valid is scratch."""
        cdef int64_t row = (head * c.tokens + t0) * self.group, rows = tokens * self.group, r
        cdef char *part = c.pages[page] + self.offset + head * self.head_part
        for r in range(rows):
            valid[r] = <int32_t>min(CEC_PAGE, max(0, c.first + t0 + r // self.group + 1 - page * CEC_PAGE))
        c.ops.partial[self.recipe](
            c.q + row * self.key_dim, c.qi + row * self.key_dim, c.qd + row, rows, part, part + self.key_part,
            self.key_dim, self.value_dim, valid, to.m, to.l, to.o,
        )

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
            out = c.out + ((t0 + r // self.group) * self.heads + head * self.group + r % self.group) * D
            inverse = 1 / total.l[r]
            for d in range(D):
                out[d] = total.o[r * D + d] * inverse

    cdef void _attend(self, Call *c, int64_t head, int64_t t0, int64_t tile, char *area) noexcept nogil:
        """All pages of one KV head for the tokens of one tile."""
        cdef int64_t tokens = min(tile, c.tokens - t0), rows = tokens * self.group, page, r
        cdef Rows total = rows_at(area, rows, self.value_dim)
        cdef Rows part = rows_at(area + self._rows_bytes(tokens), rows, self.value_dim)
        cdef int32_t *valid = <int32_t *>(area + 2 * self._rows_bytes(tokens))
        clear(total, rows, self.value_dim)
        for page in range((c.first + t0 + tokens - 1) // CEC_PAGE + 1):
            self._page(c, head, t0, tokens, page, valid, part)
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
                               <int32_t *>scratch(omp_get_thread_num()), rows_at(parts + i * nbytes, rows, D))
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


@cython.final
cdef class Attention(PagedAttention):
    """Grouped-query attention: keys and values head_dim (D) wide, rotated as pairs (i, i + D/2)."""

    def __cinit__(
        self, *, int64_t heads, int64_t kv_heads, int64_t head_dim, str kv, int64_t offset, int64_t capacity
    ):
        self._bind(heads, kv_heads, head_dim, head_dim, kv, offset, capacity)

    @property
    def head_dim(self):
        """The width of a head."""
        return self.key_dim

    def __call__(self, Matrix qkv not None, Matrix cos not None, Matrix sin not None, PageList pages not None,
                 int64_t first, int64_t tokens, Activations out not None):
        """Attend from `tokens` new tokens, at positions first, first + 1, ..., to those up to their own.

        qkv [T, (heads + 2 kv_heads) D]: query heads, key heads, value heads, not yet rotated; cos, sin
        [T, D / 2]: rotary angles of the new positions; pages: up to the last new position at least, filled by
        earlier calls before `first`. Writes out [T, heads * D]. Raises ValueError.
        """
        cdef Call call
        self._check(cos, sin, self.key_dim // 2, pages, first, tokens, out)
        if tokens > qkv.rows or qkv.cols < (self.heads + 2 * self.kv_heads) * self.key_dim:
            raise ValueError(
                f"{tokens} tokens of {self.heads} + 2 x {self.kv_heads} heads of {self.key_dim} "
                f"from {qkv.rows} x {qkv.cols}"
            )
        if tokens == 0:
            return
        call.queries = Source(qkv.p, qkv.cols)
        self.attend(&call, cos, sin, pages, first, tokens, out)

    cdef const float *_head(self, Call *c, int64_t t, int64_t head) noexcept nogil:
        return c.queries.p + t * c.queries.stride + head * self.key_dim

    cdef void _rotated(self, Call *c, int64_t t, int64_t head, float *to) noexcept nogil:
        cdef int64_t half = self.key_dim // 2
        memcpy(to, self._head(c, t, head), self.key_dim * sizeof(float))
        c.pointwise.rope(to, c.cos + t * half, c.sin + t * half, half)

    cdef void key(self, Call *c, int64_t t, int64_t head, float *to) noexcept nogil:
        self._rotated(c, t, self.heads + head, to)

    cdef const float *value(self, Call *c, int64_t t, int64_t head) noexcept nogil:
        return self._head(c, t, self.heads + self.kv_heads + head)

    cdef void query(self, Call *c, int64_t t, int64_t head, float *to) noexcept nogil:
        self._rotated(c, t, head, to)
