/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention for NEON with dot products. Up to six query rows share each load of K or V; a row's factors come from the
 * lanes of one register, four steps at a time. */
#if defined(__aarch64__)
#pragma GCC target("arch=armv8.2-a+dotprod,tune=cortex-a76")
#include <arm_neon.h>

#include "attention.h"
#include "ops.h"

enum { WIDE = 4 }; /* registers of 4 lanes, positions or dimensions, at most */

/* Twelve sums of 4 lanes: enough to hide the latency, and factors and K or V fit beside them. */
#define WIDTH(rows) ((rows) <= 3 ? WIDE : WIDE / 2)

/* Call f(rows, width, ...) with both compile-time constants, so that accumulators live in registers. */
#define BY_ROWS(n, f, ...)                                       \
    switch (n) {                                                 \
    case 1: f(1, WIDTH(1), __VA_ARGS__); break;                  \
    case 2: f(2, WIDTH(2), __VA_ARGS__); break;                  \
    case 3: f(3, WIDTH(3), __VA_ARGS__); break;                  \
    case 4: f(4, WIDTH(4), __VA_ARGS__); break;                  \
    case 5: f(5, WIDTH(5), __VA_ARGS__); break;                  \
    default: f(CEC_ROWS, WIDTH(CEC_ROWS), __VA_ARGS__);          \
    }

/* ---- int8 ---- */

/* acc[r][j] += 16 bytes of each row . four groups of 4 bytes at b, `stride` apart, for 4 * width lanes. */
CEC_INLINE void add_products(int rows, int width, const int8x16_t a[CEC_ROWS], const int8_t *b, int64_t stride,
                             int32x4_t acc[CEC_ROWS][WIDE]) {
#define GROUP(G)                                                                                                       \
    for (int j = 0; j < width; j++) {                                                                                  \
        const int8x16_t four = vld1q_s8(b + G * stride + j * 16);                                                      \
        for (int r = 0; r < rows; r++) acc[r][j] = vdotq_laneq_s32(acc[r][j], four, a[r], G);                          \
    }
    GROUP(0)
    GROUP(1)
    GROUP(2)
    GROUP(3)
#undef GROUP
}

/* 4 * width positions from p on. */
CEC_INLINE void score_rows(int rows, int width, const int8_t *q, int64_t D, const int8_t *k, int p,
                           int32_t s[][CEC_PAGE]) {
    int32x4_t acc[CEC_ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < width; j++) acc[r][j] = vdupq_n_s32(0);
    for (int64_t d = 0; d < D; d += 16) {
        int8x16_t query[CEC_ROWS];
        for (int r = 0; r < rows; r++) query[r] = vld1q_s8(q + r * D + d);
        add_products(rows, width, query, k + d * CEC_PAGE + p * 4, 4 * CEC_PAGE, acc);
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < width; j++) vst1q_s32(&s[r][p + 4 * j], acc[r][j]);
}

static void scores_int8(const int8_t *q, int n, int64_t D, const int8_t *k, int32_t s[][CEC_PAGE]) {
    for (int p = 0; p < CEC_PAGE; p += 4 * WIDTH(n)) BY_ROWS(n, score_rows, q, D, k, p, s)
}

/* Sixteen positions at a time: weights behind the last group are zeros. */
CEC_INLINE void add_values(int rows, int width, const uint8_t weights[][CEC_PAGE], int64_t D, const int8_t *v,
                           int groups, int32x4_t acc[CEC_ROWS][WIDE]) {
    for (int g = 0; g < groups; g += 4) {
        int8x16_t weight[CEC_ROWS];
        for (int r = 0; r < rows; r++) weight[r] = vreinterpretq_s8_u8(vld1q_u8(&weights[r][4 * g]));
        add_products(rows, width, weight, v + g * D * 4, D * 4, acc);
    }
}

/* 4 * width dimensions; v and o point at the first of them. */
CEC_INLINE void value_rows(int rows, int width, const uint8_t hi[][CEC_PAGE], const uint8_t lo[][CEC_PAGE], int64_t D,
                           const int8_t *v, int groups, int32_t *o) {
    int32x4_t acc[CEC_ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < width; j++) acc[r][j] = vdupq_n_s32(0);
    add_values(rows, width, hi, D, v, groups, acc);
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < width; j++) acc[r][j] = vshlq_n_s32(acc[r][j], 7);
    add_values(rows, width, lo, D, v, groups, acc);
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < width; j++) vst1q_s32(o + r * D + 4 * j, acc[r][j]);
}

static void values_int8(const uint8_t hi[][CEC_PAGE], const uint8_t lo[][CEC_PAGE], int n, int64_t D, const int8_t *v,
                        int groups, int32_t *o) {
    for (int64_t d = 0; d < D; d += 4 * WIDTH(n)) BY_ROWS(n, value_rows, hi, lo, D, v + d * 4, groups, o + d)
}

/* ---- f32 and bf16 ---- */

CEC_INLINE float32x4_t load4(int kv, const void *part, int64_t i) {
    if (kv == CEC_KV_F32) return vld1q_f32((const float *)part + i);
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)part + i), 16));
}

/* 4 * width positions from p on. */
CEC_INLINE void score_float_rows(int rows, int width, int kv, const float *q, int64_t D, const void *k, int p,
                                 float s[][CEC_PAGE]) {
    float32x4_t acc[CEC_ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < width; j++) acc[r][j] = vdupq_n_f32(0);
    for (int64_t d = 0; d < D; d += 4) {
        float32x4_t query[CEC_ROWS];
        for (int r = 0; r < rows; r++) query[r] = vld1q_f32(q + r * D + d);
#define DIMENSION(I)                                                                                                   \
    for (int j = 0; j < width; j++) {                                                                                  \
        const float32x4_t keys = load4(kv, k, (d + I) * CEC_PAGE + p + 4 * j);                                         \
        for (int r = 0; r < rows; r++) acc[r][j] = vfmaq_laneq_f32(acc[r][j], keys, query[r], I);                      \
    }
        DIMENSION(0)
        DIMENSION(1)
        DIMENSION(2)
        DIMENSION(3)
#undef DIMENSION
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < width; j++) vst1q_f32(&s[r][p + 4 * j], acc[r][j]);
}

CEC_INLINE void scores_float(int kv, const float *q, int n, int64_t D, const void *k, float s[][CEC_PAGE]) {
    for (int p = 0; p < CEC_PAGE; p += 4 * WIDTH(n)) BY_ROWS(n, score_float_rows, kv, q, D, k, p, s)
}

/* 4 * width dimensions from d on. */
CEC_INLINE void value_float_rows(int rows, int width, int kv, const float e[][CEC_PAGE], int64_t D, const void *v,
                                 int64_t d, int p0, int p1, float *o) {
    float32x4_t acc[CEC_ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < width; j++) acc[r][j] = vld1q_f32(o + r * D + d + 4 * j);
    for (int p = p0; p < p1; p++)
        for (int j = 0; j < width; j++) {
            const float32x4_t values = load4(kv, v, p * D + d + 4 * j);
            for (int r = 0; r < rows; r++) acc[r][j] = vfmaq_n_f32(acc[r][j], values, e[r][p]);
        }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < width; j++) vst1q_f32(o + r * D + d + 4 * j, acc[r][j]);
}

CEC_INLINE void values_float(int kv, const float e[][CEC_PAGE], int n, int64_t D, const void *v, int p0, int p1,
                             float *o) {
    for (int64_t d = 0; d < D; d += 4 * WIDTH(n)) BY_ROWS(n, value_float_rows, kv, e, D, v, d, p0, p1, o)
}

#include "attention_table.h"

const cec_attention_ops cec_neon_dotprod_attention = CEC_ATTENTION_OPS;
#endif
