/* SPDX-License-Identifier: Apache-2.0
 *
 * Linear layers for AVX2. A ymm register holds 4 K-bytes of 8 rows, so a tile is two halves. vpmaddubsw multiplies
 * unsigned by signed bytes into int16 pairs, saturating: a nibble's products sum safely over a whole block
 * (8 * 2 * 15 * 127 < 32768), a byte's do not, so bytes go through |w| and sign(x, w), one addition at a time. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

#include "half.h"
#include "ops.h"
#include "tile.h"

enum { GROUPS = CEC_BLOCK / 4, TOKENS = 4, HALF = CEC_TILE / 2 };

static inline __m256i magnitude(__m256 x) {
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
}

static inline __m256i scaled(__m256 x, __m256 by) {
    /* min(a, b) returns b when a is NaN: a NaN becomes 127, as in the reference. */
    const __m256 v = _mm256_min_ps(_mm256_mul_ps(x, by), _mm256_set1_ps(127));
    return _mm256_cvtps_epi32(_mm256_max_ps(v, _mm256_set1_ps(-127)));
}

static void quantize(const float *x, int64_t n, int8_t *q, float *d, float *s, int32_t *c) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t b = 0; b < n / CEC_BLOCK; b++, x += CEC_BLOCK, q += CEC_BLOCK) {
        __m256 v[4];
        __m256i top8 = _mm256_setzero_si256(), sum8 = _mm256_setzero_si256(), i32[4];
        for (int i = 0; i < 4; i++) {
            v[i] = _mm256_loadu_ps(x + 8 * i);
            top8 = _mm256_max_epi32(top8, magnitude(v[i])); /* as bits NaN > inf > numbers */
        }
        int32_t lane[8], most = 0, sum = 0;
        _mm256_storeu_si256((__m256i *)lane, top8);
        for (int i = 0; i < 8; i++) most = lane[i] > most ? lane[i] : most;
        const float top = cec_bits_f32((uint32_t)most);
        float inverse;
        const float scale = cec_block_scale(top, &inverse);
        for (int i = 0; i < 4; i++) {
            i32[i] = scaled(v[i], _mm256_set1_ps(inverse));
            sum8 = _mm256_add_epi32(sum8, i32[i]);
        }
        const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(i32[0], i32[1]), _mm256_packs_epi32(i32[2], i32[3]));
        _mm256_storeu_si256((__m256i *)q, _mm256_permutevar8x32_epi32(packed, order));
        _mm256_storeu_si256((__m256i *)lane, sum8);
        for (int i = 0; i < 8; i++) sum += lane[i];
        d[b] = scale;
        s[b] = scale * (float)sum;
        c[b] = -8 * sum;
    }
}

/* ---- one block of half a tile ---- */

static inline __m256i four(const int8_t *x) {
    int32_t bytes;
    __builtin_memcpy(&bytes, x, 4);
    return _mm256_set1_epi32(bytes);
}

/* `w` holds the half's 8 groups: nibbles as unsigned bytes, or signed bytes. c is -8 * sum(x). */
static inline __m256i block_sum(int format, const __m256i w[GROUPS], const int8_t *x, const int32_t *c) {
    const __m256i ones = _mm256_set1_epi16(1);
    if (format == CEC_Q8_32) {
        __m256i sum = _mm256_setzero_si256();
        for (int g = 0; g < GROUPS; g++) {
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w[g]), _mm256_sign_epi8(four(x + 4 * g), w[g]));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
        }
        return sum;
    }
    __m256i pairs = _mm256_maddubs_epi16(w[0], four(x));
    for (int g = 1; g < GROUPS; g++) pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w[g], four(x + 4 * g)));
    const __m256i sum = _mm256_madd_epi16(pairs, ones);
    return format == CEC_Q4_32 ? _mm256_add_epi32(sum, _mm256_set1_epi32(*c)) : sum;
}

static inline void load_packed(int format, const uint8_t *q, __m256i w[GROUPS]) {
    const __m256i low = _mm256_set1_epi8(15);
    if (format == CEC_Q8_32) {
        for (int g = 0; g < GROUPS; g++) w[g] = _mm256_load_si256((const __m256i *)(q + g * 64));
        return;
    }
    for (int g = 0; g < GROUPS / 2; g++) {
        const __m256i pair = _mm256_load_si256((const __m256i *)(q + g * 64));
        w[g] = _mm256_and_si256(pair, low);
        w[g + GROUPS / 2] = _mm256_and_si256(_mm256_srli_epi16(pair, 4), low);
    }
}

static inline __m256 halves(const uint16_t *h) { return _mm256_cvtph_ps(_mm_load_si128((const __m128i *)h)); }

static inline void put(float *y, __m256 v, int rows, int add) {
    if (rows >= HALF) {
        _mm256_storeu_ps(y, add ? _mm256_add_ps(_mm256_loadu_ps(y), v) : v);
        return;
    }
    float lane[HALF];
    _mm256_storeu_ps(lane, v);
    for (int r = 0; r < rows; r++) y[r] = add ? y[r] + lane[r] : lane[r];
}

/* ---- few tokens: straight from the packed tile ---- */

static inline void packed_half(int format, const cec_packed *p, int h, const cec_acts *x, int64_t t, int rows, float *y,
                               int add) {
    const int8_t *xq = x->q + t * x->K;
    const float *xd = x->d + t * p->blocks, *xs = x->s + t * p->blocks;
    const int32_t *xc = x->c + t * p->blocks;
    __m256 acc = _mm256_setzero_ps(), minima = _mm256_setzero_ps();
    for (int64_t b = 0; b < p->blocks; b++) {
        if (h == 0) cec_prefetch(format, p, b);
        __m256i w[GROUPS];
        load_packed(format, p->q + b * cec_quant_bytes(format) + h * 32, w);
        const __m256 sum = _mm256_cvtepi32_ps(block_sum(format, w, xq + b * CEC_BLOCK, xc + b));
        const __m256 scale = _mm256_mul_ps(halves(p->d + b * CEC_TILE + h * HALF), _mm256_set1_ps(xd[b]));
        acc = _mm256_fmadd_ps(scale, sum, acc);
        if (format == CEC_Q4A_32)
            minima = _mm256_fmadd_ps(halves(p->m + b * CEC_TILE + h * HALF), _mm256_set1_ps(xs[b]), minima);
    }
    put(y + h * HALF, format == CEC_Q4A_32 ? _mm256_add_ps(acc, minima) : acc, rows - h * HALF, add);
}

/* ---- many tokens: expand once; the weights of a block come from L1 ---- */

static inline void expand(int format, const cec_packed *p, const cec_expanded *e) {
    for (int64_t b = 0; b < p->blocks; b++)
        for (int h = 0; h < 2; h++) {
            __m256i w[GROUPS];
            const int64_t at = b * CEC_TILE + h * HALF;
            load_packed(format, p->q + b * cec_quant_bytes(format) + h * 32, w);
            for (int g = 0; g < GROUPS; g++)
                _mm256_store_si256((__m256i *)(e->q + (b * GROUPS + g) * 64 + h * 32), w[g]);
            _mm256_store_ps(e->d + at, halves(p->d + at));
            if (format == CEC_Q4A_32) _mm256_store_ps(e->m + at, halves(p->m + at));
        }
}

static inline __attribute__((always_inline)) void expanded_half(int format, int n, const cec_expanded *e, int h,
                                                                const cec_acts *x, int64_t t, int rows, float *y,
                                                                int64_t ldy, int add) {
    const int64_t blocks = x->K / CEC_BLOCK;
    const int8_t *xq = x->q + t * x->K;
    const float *xd = x->d + t * blocks, *xs = x->s + t * blocks;
    const int32_t *xc = x->c + t * blocks;
    __m256 acc[TOKENS], minima[TOKENS];
    for (int i = 0; i < n; i++) acc[i] = minima[i] = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) {
        const __m256i *w = (const __m256i *)(e->q + b * GROUPS * 64 + h * 32);
        __m256i block[GROUPS];
        for (int g = 0; g < GROUPS; g++) block[g] = _mm256_load_si256(w + 2 * g);
        const __m256 d = _mm256_load_ps(e->d + b * CEC_TILE + h * HALF);
#pragma GCC unroll 4
        for (int i = 0; i < n; i++) {
            const __m256i sum = block_sum(format, block, xq + i * x->K + b * CEC_BLOCK, xc + i * blocks + b);
            const __m256 scale = _mm256_mul_ps(d, _mm256_set1_ps(xd[i * blocks + b]));
            acc[i] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(sum), acc[i]);
            if (format == CEC_Q4A_32)
                minima[i] = _mm256_fmadd_ps(_mm256_load_ps(e->m + b * CEC_TILE + h * HALF),
                                            _mm256_set1_ps(xs[i * blocks + b]), minima[i]);
        }
    }
    for (int i = 0; i < n; i++)
        put(y + i * ldy + h * HALF, format == CEC_Q4A_32 ? _mm256_add_ps(acc[i], minima[i]) : acc[i], rows - h * HALF,
            add);
}

static inline __attribute__((always_inline)) void integer_tile(int format, const void *w, const cec_acts *x, int64_t t0,
                                                               int64_t t1, int rows, float *y, int64_t ldy, int add,
                                                               void *scratch) {
    const cec_packed p = cec_unwrap(w, format, x->K);
    const int halves_used = rows > HALF ? 2 : 1;
    if (t1 - t0 < TOKENS) {
        for (int64_t t = t0; t < t1; t++)
            for (int h = 0; h < halves_used; h++) packed_half(format, &p, h, x, t, rows, y + t * ldy, add);
        return;
    }
    const cec_expanded e = cec_in_scratch(scratch, x->K);
    expand(format, &p, &e);
    for (int h = 0; h < halves_used; h++) {
        int64_t t = t0;
        for (; t + TOKENS <= t1; t += TOKENS) expanded_half(format, TOKENS, &e, h, x, t, rows, y + t * ldy, ldy, add);
        for (; t < t1; t++) expanded_half(format, 1, &e, h, x, t, rows, y + t * ldy, ldy, add);
    }
}

/* ---- float weights: lanes are rows, four running sums by k % 4 ---- */

static inline __m256 float_half(int format, const void *w, int64_t k, int h) {
    if (format == CEC_F32) return _mm256_load_ps((const float *)w + k * CEC_TILE + h * HALF);
    const __m128i bits = _mm_load_si128((const __m128i *)((const uint16_t *)w + k * CEC_TILE + h * HALF));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

static inline __attribute__((always_inline)) void float_tokens(int format, int n, const void *w, int h,
                                                               const cec_acts *x, int64_t t, int rows, float *y,
                                                               int64_t ldy, int add) {
    const float *xt = x->f + t * x->K;
    __m256 acc[4][2];
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < n; i++) acc[j][i] = _mm256_setzero_ps();
    int64_t k = 0;
    for (; k + 4 <= x->K; k += 4)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const __m256 row = float_half(format, w, k + j, h);
            for (int i = 0; i < n; i++)
                acc[j][i] = _mm256_fmadd_ps(row, _mm256_set1_ps(xt[i * x->K + k + j]), acc[j][i]);
        }
    for (; k < x->K; k++)
        for (int i = 0; i < n; i++)
            acc[k % 4][i] = _mm256_fmadd_ps(float_half(format, w, k, h), _mm256_set1_ps(xt[i * x->K + k]), acc[k % 4][i]);
    for (int i = 0; i < n; i++)
        put(y + i * ldy + h * HALF,
            _mm256_add_ps(_mm256_add_ps(acc[0][i], acc[1][i]), _mm256_add_ps(acc[2][i], acc[3][i])), rows - h * HALF, add);
}

static inline __attribute__((always_inline)) void float_tile(int format, const void *w, const cec_acts *x, int64_t t0,
                                                             int64_t t1, int rows, float *y, int64_t ldy, int add,
                                                             void *scratch) {
    (void)scratch;
    for (int h = 0; h < (rows > HALF ? 2 : 1); h++) {
        int64_t t = t0;
        for (; t + 2 <= t1; t += 2) float_tokens(format, 2, w, h, x, t, rows, y + t * ldy, ldy, add);
        for (; t < t1; t++) float_tokens(format, 1, w, h, x, t, rows, y + t * ldy, ldy, add);
    }
}

#include "linear_table.h"

const cec_linear_ops cec_avx2_linear = CEC_LINEAR_OPS;
#else
typedef int cec_avx2_linear_unused;
#endif
