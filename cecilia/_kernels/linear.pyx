# SPDX-License-Identifier: Apache-2.0
"""Linear layers y = W x over tiled weights, and rows gathered from them.

Several weights that read the same input (q, k, v; gate, up) are one Linear: one parallel region over all
their tiles.
"""

from cython.parallel cimport parallel, prange
from libc.stdint cimport int64_t, uint8_t, uintptr_t
from libc.stdlib cimport calloc, free
from openmp cimport omp_get_thread_num

from cecilia._kernels.buffer cimport Activations, Matrix
from cecilia._kernels.isa cimport (
    CEC_ALIGN, CEC_BF16, CEC_BLOCK, CEC_F32, CEC_Q4_32, CEC_Q4A_32, CEC_Q8_32, CEC_TILE, cec_acts,
    cec_linear_ops, cec_tile_bytes, cec_tile_scratch, table,
)
from cecilia._kernels.threads cimport reserve_scratch, scratch, team

FORMATS = {"f32": CEC_F32, "bf16": CEC_BF16, "q8_32": CEC_Q8_32, "q4_32": CEC_Q4_32, "q4a_32": CEC_Q4A_32}

cdef enum:
    # Rough speed of one thread, used only to decide how many threads a region deserves.
    BYTES_PER_NANOSECOND = 10
    PRODUCTS_PER_NANOSECOND = 60


cdef class Weight:
    """A [rows, cols] weight in tiles of 16 rows, read in place from `data` (64-byte aligned, kept alive).

    Raises ValueError when data, shape and format do not agree: a model file was checked before.
    """

    def __cinit__(self, data, str format, int64_t rows, int64_t cols):
        self.data = memoryview(data).cast("B")
        self.format, self.rows, self.cols = format, rows, cols
        self.code = FORMATS[format]
        cdef int64_t expected = self.tiles() * cec_tile_bytes(self.code, cols)
        if rows < 1 or cols < 1 or self.data.shape[0] != expected:
            raise ValueError(
                f"{self.data.shape[0]} bytes for {rows} x {cols} {format}, which takes {expected}"
            )
        if self.ints() and cols % CEC_BLOCK:
            raise ValueError(f"{cols} columns in {format}: not a multiple of {CEC_BLOCK}")
        if <uintptr_t>&self.data[0] % CEC_ALIGN:
            raise ValueError(f"a {format} weight that is not {CEC_ALIGN}-byte aligned")

    cdef int64_t tiles(self) noexcept:
        return (self.rows + CEC_TILE - 1) // CEC_TILE

    cdef bint ints(self) noexcept:
        return self.code != CEC_F32 and self.code != CEC_BF16

    def part(self, int64_t first, int64_t rows):
        """Rows first .. first + rows as a weight of their own, in place. Raises ValueError unless they begin
        and end with a tile or the last row."""
        cdef int64_t end = first + rows, tile_bytes = cec_tile_bytes(self.code, self.cols)
        if not 0 <= first < end <= self.rows or first % CEC_TILE or (end % CEC_TILE and end != self.rows):
            raise ValueError(f"rows {first} to {end} of {self.rows} in tiles of {CEC_TILE}")
        data = self.data[first // CEC_TILE * tile_bytes:(end + CEC_TILE - 1) // CEC_TILE * tile_bytes]
        return Weight(data, self.format, rows, self.cols)

    def gather(self, ids, Matrix out):
        """Dequantise row ids[i] into out[i], for all i. Raises IndexError for an id that is no row."""
        cdef int64_t i, row, n = len(ids)
        cdef int64_t tile_bytes = cec_tile_bytes(self.code, self.cols)
        if n > out.rows or self.cols != out.cols:
            raise ValueError(f"{n} rows of {self.cols} into {out.rows} x {out.cols}")
        for i in range(n):
            row = ids[i]
            if not 0 <= row < self.rows:
                raise IndexError(f"row {row} of {self.rows}")
            table().linear.gather[self.code](
                &self.data[0] + row // CEC_TILE * tile_bytes, row % CEC_TILE, self.cols, out.p + i * out.cols
            )


cdef struct Tile:
    const uint8_t *data
    int64_t column  # of its first row in y
    int code
    int rows


cdef class Linear:
    """y[T, rows] = W x[T, cols], where W is the given weights stacked in order. They must agree on cols."""

    cdef Tile *tiles
    cdef int64_t count, nbytes
    cdef readonly int64_t rows, cols
    cdef readonly bint ints
    cdef list weights

    def __cinit__(self, weights):
        cdef Weight w
        cdef int64_t i, n = 0
        self.weights = list(weights)
        for w in self.weights:
            n += w.tiles()
        if n == 0:
            raise ValueError("a linear layer without weights")
        self.tiles = <Tile *>calloc(n, sizeof(Tile))
        if self.tiles == NULL:
            raise MemoryError("tile list")
        self.cols = (<Weight>self.weights[0]).cols
        for w in self.weights:
            if w.cols != self.cols:
                raise ValueError(f"weights of {self.cols} and {w.cols} columns in one linear layer")
            self.ints = self.ints or w.ints()
            self.nbytes += w.data.shape[0]
            for i in range(w.tiles()):
                self.tiles[self.count + i] = Tile(
                    &w.data[0] + i * cec_tile_bytes(w.code, w.cols),
                    self.rows + i * CEC_TILE,
                    w.code,
                    <int>min(CEC_TILE, w.rows - i * CEC_TILE),
                )
            self.count += w.tiles()
            self.rows += w.rows
        reserve_scratch(cec_tile_scratch(self.cols))

    def __dealloc__(self):
        free(self.tiles)

    def __call__(self, Activations x, int64_t tokens, Matrix y, *, bint add=False):
        """y[t] = (or, with `add`, +=) W x[t] for t < tokens; y may be wider than `rows`."""
        if not 0 <= tokens <= x.rows or x.cols != self.cols or tokens > y.rows or y.cols < self.rows:
            raise ValueError(
                f"{tokens} tokens of {x.rows} x {x.cols} through {self.rows} x {self.cols} "
                f"into {y.rows} x {y.cols}"
            )
        if self.ints and x.q == NULL:
            raise ValueError("a quantised weight needs quantised activations")
        cdef const cec_linear_ops *ops = table().linear
        cdef const cec_acts *acts = &x.acts
        cdef float *out = y.p
        cdef int64_t ldy = y.cols
        cdef Tile *tile
        cdef int64_t i
        cdef int n = team(
            self.nbytes // BYTES_PER_NANOSECOND + tokens * self.rows * self.cols // PRODUCTS_PER_NANOSECOND
        )
        with nogil, parallel(num_threads=n):
            for i in prange(self.count, schedule="static"):
                tile = &self.tiles[i]
                ops.tile[tile.code](
                    tile.data, acts, 0, tokens, tile.rows, out + tile.column, ldy, add,
                    scratch(omp_get_thread_num()),
                )
