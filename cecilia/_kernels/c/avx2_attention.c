/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention for AVX2: its dot products. Up to six query rows share each load of K or V. vpmaddubsw multiplies unsigned
 * by signed bytes into 16-bit pair sums, exact here: one factor is at most 127, the other at most 128 in magnitude. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

#include "attention.h"
#include "ops.h"

/* Call f(rows, ...) with the number of rows a compile-time constant, so that accumulators live in registers. */
#define BY_ROWS(n, f, ...)                                \
    switch (n) {                                          \
    case 1: f(1, __VA_ARGS__); break;                     \
    case 2: f(2, __VA_ARGS__); break;                     \
    case 3: f(3, __VA_ARGS__); break;                     \
    case 4: f(4, __VA_ARGS__); break;                     \
    case 5: f(5, __VA_ARGS__); break;                     \
    default: f(CEC_ROWS, __VA_ARGS__);                    \
    }

/* Four bytes in every lane. */
CEC_INLINE __m256i broadcast4(const void *p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return _mm256_set1_epi32(four);
}

/* acc + sums of four products: a unsigned, b signed. */
CEC_INLINE __m256i add_products(__m256i acc, __m256i a, __m256i b) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
}

CEC_INLINE __m256i load_bytes(const int8_t *p) { return _mm256_load_si256((const __m256i *)p); }

/* ---- int8 ---- */

/* Eight positions; q * k = (q with the sign of k) * |k|. */
CEC_INLINE void score_rows(const int rows, const int8_t *q, int64_t D, const int8_t *k, int p, int32_t s[][CEC_PAGE]) {
    __m256i acc[CEC_ROWS];
    for (int r = 0; r < rows; r++) acc[r] = _mm256_setzero_si256();
    for (int64_t d = 0; d < D; d += 4) {
        const __m256i keys = load_bytes(k + d * CEC_PAGE + p * 4), magnitudes = _mm256_abs_epi8(keys);
        for (int r = 0; r < rows; r++)
            acc[r] = add_products(acc[r], magnitudes, _mm256_sign_epi8(broadcast4(q + r * D + d), keys));
    }
    for (int r = 0; r < rows; r++) _mm256_storeu_si256((__m256i *)&s[r][p], acc[r]);
}

static void scores_int8(const int8_t *q, int n, int64_t D, const int8_t *k, int32_t s[][CEC_PAGE]) {
    for (int p = 0; p < CEC_PAGE; p += 8) BY_ROWS(n, score_rows, q, D, k, p, s)
}

/* Eight dimensions; v points at the first of them. */
CEC_INLINE void value_rows(const int rows, const uint8_t hi[][CEC_PAGE], const uint8_t lo[][CEC_PAGE], int64_t D,
                           const int8_t *v, int groups, int32_t *o) {
    __m256i high[CEC_ROWS], low[CEC_ROWS];
    for (int r = 0; r < rows; r++) high[r] = low[r] = _mm256_setzero_si256();
    for (int g = 0; g < groups; g++) {
        const __m256i values = load_bytes(v + g * D * 4);
        for (int r = 0; r < rows; r++) {
            high[r] = add_products(high[r], broadcast4(&hi[r][4 * g]), values);
            low[r] = add_products(low[r], broadcast4(&lo[r][4 * g]), values);
        }
    }
    for (int r = 0; r < rows; r++)
        _mm256_storeu_si256((__m256i *)(o + r * D), _mm256_add_epi32(_mm256_slli_epi32(high[r], 7), low[r]));
}

static void values_int8(const uint8_t hi[][CEC_PAGE], const uint8_t lo[][CEC_PAGE], int n, int64_t D, const int8_t *v,
                        int groups, int32_t *o) {
    for (int64_t d = 0; d < D; d += 8) BY_ROWS(n, value_rows, hi, lo, D, v + d * 4, groups, o + d)
}

/* ---- f32 and bf16 ---- */

enum { WIDE = 2 }; /* registers of 8 lanes, positions or dimensions */

CEC_INLINE __m256 load8(int kv, const void *part, int64_t i) {
    if (kv == CEC_KV_F32) return _mm256_load_ps((const float *)part + i);
    const __m128i halves = _mm_load_si128((const __m128i *)((const uint16_t *)part + i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

CEC_INLINE void score_float_rows(const int rows, int kv, const float *q, int64_t D, const void *k, int p,
                                 float s[][CEC_PAGE]) {
    __m256 acc[CEC_ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < WIDE; j++) acc[r][j] = _mm256_setzero_ps();
    for (int64_t d = 0; d < D; d++) {
        __m256 keys[WIDE];
        for (int j = 0; j < WIDE; j++) keys[j] = load8(kv, k, d * CEC_PAGE + p + j * 8);
        for (int r = 0; r < rows; r++) {
            const __m256 query = _mm256_set1_ps(q[r * D + d]);
            for (int j = 0; j < WIDE; j++) acc[r][j] = _mm256_fmadd_ps(query, keys[j], acc[r][j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < WIDE; j++) _mm256_storeu_ps(&s[r][p + j * 8], acc[r][j]);
}

CEC_INLINE void scores_float(int kv, const float *q, int n, int64_t D, const void *k, float s[][CEC_PAGE]) {
    for (int p = 0; p < CEC_PAGE; p += 8 * WIDE) BY_ROWS(n, score_float_rows, kv, q, D, k, p, s)
}

/* 16 dimensions from d on. */
CEC_INLINE void value_float_rows(const int rows, int kv, const float e[][CEC_PAGE], int64_t D, const void *v,
                                 int64_t d, int p0, int p1, float *o) {
    __m256 acc[CEC_ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < WIDE; j++) acc[r][j] = _mm256_loadu_ps(o + r * D + d + j * 8);
    for (int p = p0; p < p1; p++) {
        __m256 values[WIDE];
        for (int j = 0; j < WIDE; j++) values[j] = load8(kv, v, p * D + d + j * 8);
        for (int r = 0; r < rows; r++) {
            const __m256 weight = _mm256_set1_ps(e[r][p]);
            for (int j = 0; j < WIDE; j++) acc[r][j] = _mm256_fmadd_ps(weight, values[j], acc[r][j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < WIDE; j++) _mm256_storeu_ps(o + r * D + d + j * 8, acc[r][j]);
}

CEC_INLINE void values_float(int kv, const float e[][CEC_PAGE], int n, int64_t D, const void *v, int p0, int p1,
                             float *o) {
    for (int64_t d = 0; d < D; d += 8 * WIDE) BY_ROWS(n, value_float_rows, kv, e, D, v, d, p0, p1, o)
}

#include "attention_table.h"

const cec_attention_ops cec_avx2_attention = CEC_ATTENTION_OPS;
#endif
