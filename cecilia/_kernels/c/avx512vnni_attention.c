/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention for AVX-512 VNNI: its dot products. Up to six query rows share each load of K or V. vpdpbusd multiplies
 * unsigned by signed bytes: keys get an offset of 128, and accumulators start at -128 * sum(q) to take it out again. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,prefer-vector-width=512")
#include <immintrin.h>

#include "attention.h"
#include "ops.h"

enum { WIDE = 4 }; /* registers of 16 lanes: the 64 positions of a page, or 64 dimensions */

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
CEC_INLINE __m512i broadcast4(const void *p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
}

/* ---- int8 ---- */

static inline int32_t sum_bytes(const int8_t *q, int64_t D) {
    __m128i sum = _mm_setzero_si128();
    for (int64_t d = 0; d < D; d += 16)
        sum = _mm_dpbusd_epi32(sum, _mm_set1_epi8(1), _mm_loadu_si128((const __m128i *)(q + d)));
    sum = _mm_add_epi32(sum, _mm_unpackhi_epi64(sum, sum));
    return _mm_cvtsi128_si32(sum) + _mm_extract_epi32(sum, 1);
}

CEC_INLINE void score_rows(const int rows, const int8_t *q, int64_t D, const int8_t *k, int32_t s[][CEC_PAGE]) {
    const __m512i offset = _mm512_set1_epi8((char)0x80);
    __m512i acc[CEC_ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < WIDE; j++) acc[r][j] = _mm512_set1_epi32(-128 * sum_bytes(q + r * D, D));
    for (int64_t d = 0; d < D; d += 4, k += 4 * CEC_PAGE) {
        __m512i keys[WIDE];
        for (int j = 0; j < WIDE; j++) keys[j] = _mm512_xor_si512(_mm512_load_si512(k + j * 64), offset);
        for (int r = 0; r < rows; r++) {
            const __m512i query = broadcast4(q + r * D + d);
            for (int j = 0; j < WIDE; j++) acc[r][j] = _mm512_dpbusd_epi32(acc[r][j], keys[j], query);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < WIDE; j++) _mm512_storeu_si512(&s[r][j * 16], acc[r][j]);
}

static void scores_int8(const int8_t *q, int n, int64_t D, const int8_t *k, int32_t s[][CEC_PAGE]) {
    BY_ROWS(n, score_rows, q, D, k, s)
}

/* acc += weights . V over all groups of four positions, for 16 * wide dimensions. */
CEC_INLINE void add_values(const int rows, const int wide, const uint8_t weights[][CEC_PAGE], int64_t D,
                           const int8_t *v, int groups, __m512i acc[][WIDE]) {
    for (int g = 0; g < groups; g++) {
        __m512i values[WIDE];
        for (int j = 0; j < wide; j++) values[j] = _mm512_load_si512(v + g * D * 4 + j * 64);
        for (int r = 0; r < rows; r++) {
            const __m512i weight = broadcast4(&weights[r][4 * g]);
            for (int j = 0; j < wide; j++) acc[r][j] = _mm512_dpbusd_epi32(acc[r][j], weight, values[j]);
        }
    }
}

CEC_INLINE void value_rows(const int rows, const int wide, const uint8_t hi[][CEC_PAGE], const uint8_t lo[][CEC_PAGE],
                           int64_t D, const int8_t *v, int groups, int32_t *o) {
    __m512i acc[CEC_ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < wide; j++) acc[r][j] = _mm512_setzero_si512();
    add_values(rows, wide, hi, D, v, groups, acc);
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < wide; j++) acc[r][j] = _mm512_slli_epi32(acc[r][j], 7);
    add_values(rows, wide, lo, D, v, groups, acc);
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < wide; j++) _mm512_storeu_si512(o + r * D + j * 16, acc[r][j]);
}

static void values_int8(const uint8_t hi[][CEC_PAGE], const uint8_t lo[][CEC_PAGE], int n, int64_t D, const int8_t *v,
                        int groups, int32_t *o) {
    int64_t d = 0;
    for (; d + 16 * WIDE <= D; d += 16 * WIDE) BY_ROWS(n, value_rows, WIDE, hi, lo, D, v + d * 4, groups, o + d)
    for (; d < D; d += 16) BY_ROWS(n, value_rows, 1, hi, lo, D, v + d * 4, groups, o + d)
}

/* ---- f32 and bf16 ---- */

CEC_INLINE __m512 load16(int kv, const void *part, int64_t i) {
    if (kv == CEC_KV_F32) return _mm512_load_ps((const float *)part + i);
    const __m256i halves = _mm256_load_si256((const __m256i *)((const uint16_t *)part + i));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

CEC_INLINE void score_float_rows(const int rows, int kv, const float *q, int64_t D, const void *k,
                                 float s[][CEC_PAGE]) {
    __m512 acc[CEC_ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < WIDE; j++) acc[r][j] = _mm512_setzero_ps();
    for (int64_t d = 0; d < D; d++) {
        __m512 keys[WIDE];
        for (int j = 0; j < WIDE; j++) keys[j] = load16(kv, k, d * CEC_PAGE + j * 16);
        for (int r = 0; r < rows; r++) {
            const __m512 query = _mm512_set1_ps(q[r * D + d]);
            for (int j = 0; j < WIDE; j++) acc[r][j] = _mm512_fmadd_ps(query, keys[j], acc[r][j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < WIDE; j++) _mm512_storeu_ps(&s[r][j * 16], acc[r][j]);
}

CEC_INLINE void scores_float(int kv, const float *q, int n, int64_t D, const void *k, float s[][CEC_PAGE]) {
    BY_ROWS(n, score_float_rows, kv, q, D, k, s)
}

/* 16 * wide dimensions from d on. */
CEC_INLINE void value_float_rows(const int rows, const int wide, int kv, const float e[][CEC_PAGE], int64_t D,
                                 const void *v, int64_t d, int p0, int p1, float *o) {
    __m512 acc[CEC_ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < wide; j++) acc[r][j] = _mm512_loadu_ps(o + r * D + d + j * 16);
    for (int p = p0; p < p1; p++) {
        __m512 values[WIDE];
        for (int j = 0; j < wide; j++) values[j] = load16(kv, v, p * D + d + j * 16);
        for (int r = 0; r < rows; r++) {
            const __m512 weight = _mm512_set1_ps(e[r][p]);
            for (int j = 0; j < wide; j++) acc[r][j] = _mm512_fmadd_ps(weight, values[j], acc[r][j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < wide; j++) _mm512_storeu_ps(o + r * D + d + j * 16, acc[r][j]);
}

CEC_INLINE void values_float(int kv, const float e[][CEC_PAGE], int n, int64_t D, const void *v, int p0, int p1,
                             float *o) {
    int64_t d = 0;
    for (; d + 16 * WIDE <= D; d += 16 * WIDE) BY_ROWS(n, value_float_rows, WIDE, kv, e, D, v, d, p0, p1, o)
    for (; d < D; d += 16) BY_ROWS(n, value_float_rows, 1, kv, e, D, v, d, p0, p1, o)
}

#include "attention_table.h"

const cec_attention_ops cec_avx512vnni_attention = CEC_ATTENTION_OPS;
#endif
