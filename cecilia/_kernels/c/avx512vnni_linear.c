/* SPDX-License-Identifier: Apache-2.0
 *
 * Linear layers for AVX-512 VNNI. A zmm register holds 4 K-bytes of each of the tile's 16 rows; vpdpbusd multiplies
 * unsigned weights by signed activations, and the accumulator starts at the correction that makes them signed. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#include <immintrin.h>

#include "half.h"
#include "ops.h"
#include "tile.h"

enum { GROUPS = CEC_BLOCK / 4, TOKENS = 8 };

static void quantize(const float *x, int64_t n, int8_t *q, float *d, float *s, int32_t *c) {
    const __m512 largest = _mm512_set1_ps(127);
    for (int64_t b = 0; b < n / CEC_BLOCK; b++, x += CEC_BLOCK, q += CEC_BLOCK) {
        const __m512 x0 = _mm512_loadu_ps(x), x1 = _mm512_loadu_ps(x + 16);
        /* As bits NaN > inf > numbers: no NaN is lost in the scale. */
        const __m512i magnitude = _mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(x0)),
                                                   _mm512_castps_si512(_mm512_abs_ps(x1)));
        const float top = cec_bits_f32((uint32_t)_mm512_reduce_max_epi32(magnitude));
        float inverse;
        const float scale = cec_block_scale(top, &inverse);
        const __m512 by = _mm512_set1_ps(inverse);
        /* min(a, b) returns b when a is NaN: a NaN becomes 127, as in the reference. */
        const __m512i q0 = _mm512_cvtps_epi32(
            _mm512_max_ps(_mm512_min_ps(_mm512_mul_ps(x0, by), largest), _mm512_set1_ps(-127)));
        const __m512i q1 = _mm512_cvtps_epi32(
            _mm512_max_ps(_mm512_min_ps(_mm512_mul_ps(x1, by), largest), _mm512_set1_ps(-127)));
        _mm_storeu_si128((__m128i *)q, _mm512_cvtepi32_epi8(q0));
        _mm_storeu_si128((__m128i *)(q + 16), _mm512_cvtepi32_epi8(q1));
        const int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(q0, q1));
        d[b] = scale;
        s[b] = scale * (float)sum;
        c[b] = -8 * sum;
    }
}

/* ---- one block of weights in registers, as unsigned bytes ---- */

static inline void load_block(int format, const uint8_t *q, __m512i w[GROUPS]) {
    const __m512i low = _mm512_set1_epi8(15), sign = _mm512_set1_epi8((char)0x80);
    if (format == CEC_Q8_32) {
        for (int g = 0; g < GROUPS; g++) w[g] = _mm512_xor_si512(_mm512_load_si512(q + g * 64), sign);
        return;
    }
    for (int g = 0; g < GROUPS / 2; g++) {
        const __m512i pair = _mm512_load_si512(q + g * 64);
        w[g] = _mm512_and_si512(pair, low);
        w[g + GROUPS / 2] = _mm512_and_si512(_mm512_srli_epi16(pair, 4), low);
    }
}

static inline __m512 halves(const uint16_t *h) { return _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)h)); }

/* Exact integer sum of a block for one token: c is -8 * sum(x). Weights carry an offset of 128 (q8), 8 (q4) or 0. */
static inline __m512i block_sum(int format, const __m512i w[GROUPS], const int8_t *x, const int32_t *c) {
    __m512i sum = _mm512_setzero_si512();
    if (format == CEC_Q4_32) sum = _mm512_set1_epi32(*c);
    if (format == CEC_Q8_32) sum = _mm512_set1_epi32(*c * 16);
    for (int g = 0; g < GROUPS; g++) {
        int32_t four;
        __builtin_memcpy(&four, x + 4 * g, 4);
        sum = _mm512_dpbusd_epi32(sum, w[g], _mm512_set1_epi32(four));
    }
    return sum;
}

static inline void put(float *y, __m512 v, int rows, int add) {
    const __mmask16 k = (__mmask16)(0xffffu >> (CEC_TILE - rows));
    if (add) v = _mm512_add_ps(_mm512_maskz_loadu_ps(k, y), v);
    _mm512_mask_storeu_ps(y, k, v);
}

/* ---- few tokens: straight from the packed tile ---- */

static inline void packed_tile(int format, const cec_packed *p, const cec_acts *x, int64_t t, int rows, float *y,
                               int add) {
    const int8_t *xq = x->q + t * x->K;
    const float *xd = x->d + t * p->blocks, *xs = x->s + t * p->blocks;
    const int32_t *xc = x->c + t * p->blocks;
    __m512 acc = _mm512_setzero_ps(), minima = _mm512_setzero_ps();
    for (int64_t b = 0; b < p->blocks; b++) {
        __m512i w[GROUPS];
        cec_prefetch(format, p, b);
        load_block(format, p->q + b * cec_quant_bytes(format), w);
        const __m512 sum = _mm512_cvtepi32_ps(block_sum(format, w, xq + b * CEC_BLOCK, xc + b));
        const __m512 scale = _mm512_mul_ps(halves(p->d + b * CEC_TILE), _mm512_set1_ps(xd[b]));
        acc = _mm512_fmadd_ps(scale, sum, acc);
        if (format == CEC_Q4A_32)
            minima = _mm512_fmadd_ps(halves(p->m + b * CEC_TILE), _mm512_set1_ps(xs[b]), minima);
    }
    put(y, format == CEC_Q4A_32 ? _mm512_add_ps(acc, minima) : acc, rows, add);
}

/* ---- many tokens: expand once, then keep a block's weights in registers over a group of tokens ---- */

static inline void expand(int format, const cec_packed *p, const cec_expanded *e) {
    for (int64_t b = 0; b < p->blocks; b++) {
        __m512i w[GROUPS];
        load_block(format, p->q + b * cec_quant_bytes(format), w);
        for (int g = 0; g < GROUPS; g++) _mm512_store_si512(e->q + (b * GROUPS + g) * 64, w[g]);
        _mm512_store_ps(e->d + b * CEC_TILE, halves(p->d + b * CEC_TILE));
        if (format == CEC_Q4A_32) _mm512_store_ps(e->m + b * CEC_TILE, halves(p->m + b * CEC_TILE));
    }
}

static inline __attribute__((always_inline)) void expanded_tile(int format, int n, const cec_expanded *e,
                                                                const cec_acts *x, int64_t t, int rows, float *y,
                                                                int64_t ldy, int add) {
    const int64_t blocks = x->K / CEC_BLOCK;
    const int8_t *xq = x->q + t * x->K;
    const float *xd = x->d + t * blocks, *xs = x->s + t * blocks;
    const int32_t *xc = x->c + t * blocks;
    __m512 acc[TOKENS], minima[TOKENS];
    for (int i = 0; i < n; i++) acc[i] = minima[i] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) {
        __m512i w[GROUPS];
        for (int g = 0; g < GROUPS; g++) w[g] = _mm512_load_si512(e->q + (b * GROUPS + g) * 64);
        const __m512 d = _mm512_load_ps(e->d + b * CEC_TILE);
        const __m512 m = format == CEC_Q4A_32 ? _mm512_load_ps(e->m + b * CEC_TILE) : d;
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) {
            const __m512i sum = block_sum(format, w, xq + i * x->K + b * CEC_BLOCK, xc + i * blocks + b);
            const __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(xd[i * blocks + b]));
            acc[i] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sum), acc[i]);
            if (format == CEC_Q4A_32)
                minima[i] = _mm512_fmadd_ps(m, _mm512_set1_ps(xs[i * blocks + b]), minima[i]);
        }
    }
    for (int i = 0; i < n; i++)
        put(y + i * ldy, format == CEC_Q4A_32 ? _mm512_add_ps(acc[i], minima[i]) : acc[i], rows, add);
}

static inline __attribute__((always_inline)) void integer_tile(int format, const void *w, const cec_acts *x, int64_t t0,
                                                               int64_t t1, int rows, float *y, int64_t ldy, int add,
                                                               void *scratch) {
    const cec_packed p = cec_unwrap(w, format, x->K);
    if (t1 - t0 < 4) {
        for (int64_t t = t0; t < t1; t++) packed_tile(format, &p, x, t, rows, y + t * ldy, add);
        return;
    }
    const cec_expanded e = cec_in_scratch(scratch, x->K);
    expand(format, &p, &e);
    int64_t t = t0;
    for (; t + TOKENS <= t1; t += TOKENS) expanded_tile(format, TOKENS, &e, x, t, rows, y + t * ldy, ldy, add);
    for (; t < t1; t++) expanded_tile(format, 1, &e, x, t, rows, y + t * ldy, ldy, add);
}

/* ---- float weights: lanes are rows, four running sums by k % 4 ---- */

static inline __m512 float_row(int format, const void *w, int64_t k) {
    if (format == CEC_F32) return _mm512_load_ps((const float *)w + k * CEC_TILE);
    const __m256i h = _mm256_load_si256((const __m256i *)((const uint16_t *)w + k * CEC_TILE));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

static inline __attribute__((always_inline)) void float_tokens(int format, int n, const void *w, const cec_acts *x,
                                                               int64_t t, int rows, float *y, int64_t ldy, int add) {
    const float *xt = x->f + t * x->K;
    __m512 acc[4][4];
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < n; i++) acc[j][i] = _mm512_setzero_ps();
    int64_t k = 0;
    for (; k + 4 <= x->K; k += 4)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const __m512 row = float_row(format, w, k + j);
            for (int i = 0; i < n; i++)
                acc[j][i] = _mm512_fmadd_ps(row, _mm512_set1_ps(xt[i * x->K + k + j]), acc[j][i]);
        }
    for (; k < x->K; k++)
        for (int i = 0; i < n; i++)
            acc[k % 4][i] = _mm512_fmadd_ps(float_row(format, w, k), _mm512_set1_ps(xt[i * x->K + k]), acc[k % 4][i]);
    for (int i = 0; i < n; i++)
        put(y + i * ldy, _mm512_add_ps(_mm512_add_ps(acc[0][i], acc[1][i]), _mm512_add_ps(acc[2][i], acc[3][i])), rows,
            add);
}

static inline __attribute__((always_inline)) void float_tile(int format, const void *w, const cec_acts *x, int64_t t0,
                                                             int64_t t1, int rows, float *y, int64_t ldy, int add,
                                                             void *scratch) {
    (void)scratch;
    int64_t t = t0;
    for (; t + 4 <= t1; t += 4) float_tokens(format, 4, w, x, t, rows, y + t * ldy, ldy, add);
    for (; t < t1; t++) float_tokens(format, 1, w, x, t, rows, y + t * ldy, ldy, add);
}

#include "linear_table.h"

const cec_linear_ops cec_avx512vnni_linear = CEC_LINEAR_OPS;
#else
typedef int cec_avx512vnni_linear_unused;
#endif
