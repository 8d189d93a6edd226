/* SPDX-License-Identifier: Apache-2.0
 *
 * Linear layers for AMX int8. Many tokens: tdpbssd multiplies a block of 16 tokens by a block of a weight tile at
 * once, whose layout is just what it wants. Its 16 x 16 sums go through memory, because only vectors can scale them.
 * Few tokens and float weights: the AVX-512 VNNI kernels. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,amx-tile,amx-int8")
#include <immintrin.h>

#include "ops.h"
#include "tile.h"

enum { TOKENS = 16, GROUPS = CEC_BLOCK / 4 };

/* ---- tile registers, as macros because the intrinsics paste their numbers into names ---- */

#define SUM 0 /* [16 tokens][16 rows] int32 */
#define X 1   /* [16 tokens][32] int8 */
#define W 2   /* [32 / 4][16 rows][4] int8 */

static inline void configure(void) {
    _Alignas(64) struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    shape.rows[SUM] = shape.rows[X] = TOKENS;
    shape.rows[W] = GROUPS;
    shape.row_bytes[SUM] = shape.row_bytes[W] = 64;
    shape.row_bytes[X] = CEC_BLOCK;
    /* gcc 12 believes that _tile_loadconfig reads 8 of these 64 bytes. */
    __asm__ volatile("" : : "r"(&shape) : "memory");
    _tile_loadconfig(&shape);
}

/* ---- a weight tile as signed bytes ---- */

static inline __m512 halves(const uint16_t *h) { return _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)h)); }

static inline void expand(int format, const cec_packed *p, const cec_expanded *e) {
    const __m512i low = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(format == CEC_Q4_32 ? 8 : 0);
    for (int64_t b = 0; b < p->blocks; b++) {
        const uint8_t *from = p->q + b * cec_quant_bytes(format);
        uint8_t *to = e->q + b * CEC_BLOCK * CEC_TILE;
        for (int g = 0; g < GROUPS / 2; g++) {
            if (format == CEC_Q8_32) {
                _mm512_store_si512(to + 2 * g * 64, _mm512_load_si512(from + 2 * g * 64));
                _mm512_store_si512(to + (2 * g + 1) * 64, _mm512_load_si512(from + (2 * g + 1) * 64));
                continue;
            }
            const __m512i pair = _mm512_load_si512(from + g * 64);
            const __m512i high = _mm512_and_si512(_mm512_srli_epi16(pair, 4), low);
            _mm512_store_si512(to + g * 64, _mm512_sub_epi8(_mm512_and_si512(pair, low), eight));
            _mm512_store_si512(to + (g + GROUPS / 2) * 64, _mm512_sub_epi8(high, eight));
        }
        _mm512_store_ps(e->d + b * CEC_TILE, halves(p->d + b * CEC_TILE));
        if (format == CEC_Q4A_32) _mm512_store_ps(e->m + b * CEC_TILE, halves(p->m + b * CEC_TILE));
    }
}

/* ---- 16 tokens ---- */

typedef int32_t sums[TOKENS][CEC_TILE];

/* The sums of block b of 16 tokens. */
static inline void multiply_block(const int8_t *xq, int64_t K, const uint8_t *w, int64_t b, sums to) {
    _tile_zero(SUM);
    _tile_loadd(X, xq + b * CEC_BLOCK, K);
    _tile_loadd(W, w + b * CEC_BLOCK * CEC_TILE, 64);
    _tile_dpbssd(SUM, X, W);
    _tile_stored(SUM, to, 64);
}

/* acc[i] = fma(d_w d_x, sum, acc[i]), the one rounding step of a block. */
static inline __attribute__((always_inline)) void scale_block(__m512 acc[TOKENS], const sums s, const float *d,
                                                              const float *xd, int64_t blocks) {
    const __m512 dw = _mm512_load_ps(d);
    /* Left alone, gcc keeps 16 pointers, most of them in memory. */
    const float *four[4] = {xd, xd + 4 * blocks, xd + 8 * blocks, xd + 12 * blocks};
    int64_t three = 3 * blocks;
    __asm__("" : "+r"(four[0]), "+r"(four[1]), "+r"(four[2]), "+r"(four[3]), "+r"(three));
#pragma GCC unroll 16
    for (int i = 0; i < TOKENS; i++) {
        const float *at = four[i / 4] + (i % 4 == 3 ? three : i % 4 * blocks);
        acc[i] = _mm512_fmadd_ps(_mm512_mul_ps(dw, _mm512_set1_ps(*at)),
                                 _mm512_cvtepi32_ps(_mm512_load_si512(s[i])), acc[i]);
    }
}

static inline __attribute__((always_inline)) void add_minima(__m512 acc[TOKENS], const float *m, const float *xs,
                                                             int64_t blocks) {
    __m512 minima[TOKENS];
#pragma GCC unroll 16
    for (int i = 0; i < TOKENS; i++) minima[i] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) {
        const __m512 mw = _mm512_load_ps(m + b * CEC_TILE);
#pragma GCC unroll 16
        for (int i = 0; i < TOKENS; i++)
            minima[i] = _mm512_fmadd_ps(mw, _mm512_set1_ps(xs[i * blocks + b]), minima[i]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < TOKENS; i++) acc[i] = _mm512_add_ps(acc[i], minima[i]);
}

/* The products of tokens t .. t + 15, of which those before `from` are not written. */
static inline __attribute__((always_inline)) void sixteen(int format, const cec_expanded *e, const cec_acts *x,
                                                          int64_t t, int64_t from, int rows, float *y, int64_t ldy,
                                                          int add) {
    const int64_t K = x->K, blocks = K / CEC_BLOCK;
    const int8_t *xq = x->q + t * K;
    const float *xd = x->d + t * blocks;
    _Alignas(64) sums s[2]; /* a block is scaled while the next is multiplied */
    __m512 acc[TOKENS];
#pragma GCC unroll 16
    for (int i = 0; i < TOKENS; i++) acc[i] = _mm512_setzero_ps();
    multiply_block(xq, K, e->q, 0, s[0]);
    for (int64_t b = 1; b < blocks; b++) {
        multiply_block(xq, K, e->q, b, s[b % 2]);
        scale_block(acc, s[(b - 1) % 2], e->d + (b - 1) * CEC_TILE, xd + b - 1, blocks);
    }
    scale_block(acc, s[(blocks - 1) % 2], e->d + (blocks - 1) * CEC_TILE, xd + blocks - 1, blocks);
    if (format == CEC_Q4A_32) add_minima(acc, e->m, x->s + t * blocks, blocks);
    const __mmask16 k = (__mmask16)(0xffffu >> (CEC_TILE - rows));
#pragma GCC unroll 16
    for (int i = 0; i < TOKENS; i++) {
        float *to = y + (t + i) * ldy;
        if (t + i < from) continue;
        _mm512_mask_storeu_ps(to, k, add ? _mm512_add_ps(_mm512_maskz_loadu_ps(k, to), acc[i]) : acc[i]);
    }
}

static inline __attribute__((always_inline)) void integer_tile(int format, const void *w, const cec_acts *x, int64_t t0,
                                                               int64_t t1, int rows, float *y, int64_t ldy, int add,
                                                               void *scratch) {
    if (t1 - t0 < TOKENS) {
        cec_avx512vnni_linear.tile[format](w, x, t0, t1, rows, y, ldy, add, scratch);
        return;
    }
    const cec_packed p = cec_unwrap(w, format, x->K);
    const cec_expanded e = cec_in_scratch(scratch, x->K);
    expand(format, &p, &e);
    configure();
    /* The last group may overlap the one before: a token's product does not depend on its group. */
    for (int64_t t = t0; t < t1; t += TOKENS)
        sixteen(format, &e, x, t + TOKENS <= t1 ? t : t1 - TOKENS, t, rows, y, ldy, add);
    _tile_release();
}

static inline void float_tile(int format, const void *w, const cec_acts *x, int64_t t0, int64_t t1, int rows, float *y,
                              int64_t ldy, int add, void *scratch) {
    cec_avx512vnni_linear.tile[format](w, x, t0, t1, rows, y, ldy, add, scratch);
}

static void quantize(const float *x, int64_t n, int8_t *q, float *d, float *s, int32_t *c) {
    cec_avx512vnni_linear.quantize(x, n, q, d, s, c);
}

#include "linear_table.h"

const cec_linear_ops cec_avx512amx_linear = CEC_LINEAR_OPS;
#else
typedef int cec_avx512amx_linear_unused;
#endif
