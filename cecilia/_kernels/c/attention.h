/* SPDX-License-Identifier: Apache-2.0
 *
 * What attention is made of besides its dot products: quantising and storing rows, the softmax of one page, merging.
 * Every instruction set compiles this same source under its own target and gives cec_partial_* its own dot products.
 * The order of operations is written out and nothing is fused, so the int8 recipe has the same bytes everywhere. */
#ifndef CECILIA_ATTENTION_H
#define CECILIA_ATTENTION_H

#include <math.h>
#include <string.h>

#include "exp.h"
#include "lanes.h"
#include "table.h"

enum { CEC_ROWS = 6 }; /* query rows that share a load of K or V: 6 x 4 accumulators of 16 lanes fit 32 registers */

/* ---- rows into pages ---- */

/* Quantise x [D] to q [D]; returns the scale max|x| / 127. A row with a NaN or infinity gets a NaN scale. */
static inline float cec_quantize_row(const float *x, int64_t D, int8_t *q) {
    int32_t bits = 0; /* magnitudes compared as bits: NaN > inf > numbers */
    for (int64_t i = 0; i < D; i++) {
        const int32_t magnitude = (int32_t)(cec_f32_bits(x[i]) & 0x7fffffffu);
        bits = magnitude > bits ? magnitude : bits;
    }
    const float scale = bits < 0x7f800000 ? cec_bits_f32((uint32_t)bits) / 127 : NAN;
    if (!(scale > 0)) {
        memset(q, 0, (size_t)D);
        return scale;
    }
    for (int64_t i = 0; i < D; i++) {
        /* Adding 1.5 * 2^23 rounds half to even. Only a subnormal scale lets a quotient pass 127. */
        const int32_t v = (int32_t)cec_f32_bits(x[i] / scale + 0x1.8p23f) - 0x4b400000;
        q[i] = (int8_t)(v > 127 ? 127 : v < -127 ? -127 : v);
    }
    return scale;
}

static void store_k_f32(const float *x, int64_t D, void *part, int slot) {
    for (int64_t d = 0; d < D; d++) ((float *)part)[d * CEC_PAGE + slot] = x[d];
}

static void store_v_f32(const float *x, int64_t D, void *part, int slot) {
    memcpy((float *)part + slot * D, x, (size_t)D * sizeof *x);
}

static void store_k_bf16(const float *x, int64_t D, void *part, int slot) {
    for (int64_t d = 0; d < D; d++) ((uint16_t *)part)[d * CEC_PAGE + slot] = cec_f32_bf16(x[d]);
}

static void store_v_bf16(const float *x, int64_t D, void *part, int slot) {
    for (int64_t d = 0; d < D; d++) ((uint16_t *)part)[slot * D + d] = cec_f32_bf16(x[d]);
}

/* The 64 scales behind the quants of an int8 part. */
static inline float *cec_part_scales(const void *part, int64_t D) {
    return (float *)((uintptr_t)part + (uintptr_t)(CEC_PAGE * D));
}

static void store_k_int8(const float *x, int64_t D, void *part, int slot) {
    int8_t q[CEC_HEAD_MAX];
    cec_part_scales(part, D)[slot] = cec_quantize_row(x, D, q);
    for (int64_t d = 0; d < D; d += 4) memcpy((int8_t *)part + d * CEC_PAGE + slot * 4, q + d, 4);
}

static void store_v_int8(const float *x, int64_t D, void *part, int slot) {
    int8_t q[CEC_HEAD_MAX], *to = (int8_t *)part + slot / 4 * 4 * D + slot % 4;
    cec_part_scales(part, D)[slot] = cec_quantize_row(x, D, q);
    for (int64_t d = 0; d < D; d++) to[d * 4] = q[d];
}

/* ---- keys as values ---- */

static void turn_f32(const void *kpart, int64_t D, void *vpart) {
    for (int p = 0; p < CEC_PAGE; p++)
        for (int64_t d = 0; d < D; d++) ((float *)vpart)[p * D + d] = ((const float *)kpart)[d * CEC_PAGE + p];
}

static void turn_bf16(const void *kpart, int64_t D, void *vpart) {
    for (int p = 0; p < CEC_PAGE; p++)
        for (int64_t d = 0; d < D; d++) ((uint16_t *)vpart)[p * D + d] = ((const uint16_t *)kpart)[d * CEC_PAGE + p];
}

typedef uint8_t cec_bytes16 __attribute__((vector_size(16)));

/* Four positions of four dimensions are 16 bytes in both layouts, one the transpose of the other. */
static void turn_int8(const void *kpart, int64_t D, void *vpart) {
    const cec_bytes16 transpose = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const cec_bytes16 *k = kpart;
    cec_bytes16 *v = vpart;
    for (int p = 0; p < CEC_PAGE / 4; p++)
        for (int64_t d = 0; d < D / 4; d++) v[p * (D / 4) + d] = __builtin_shuffle(k[d * (CEC_PAGE / 4) + p], transpose);
    memcpy(cec_part_scales(vpart, D), cec_part_scales(kpart, D), CEC_PAGE * sizeof(float));
}

/* ---- one page of one row ---- */

/* Scores s [64] become weights exp(s - m); positions from `valid` on are ignored whatever they hold, weight 0. */
CEC_INLINE void cec_softmax(float s[CEC_PAGE], int valid, float *m, float *l) {
    if (valid == 0) {
        memset(s, 0, CEC_PAGE * sizeof *s);
        *m = -INFINITY;
        *l = 0;
        return;
    }
    for (int p = 0; p < CEC_PAGE; p++) s[p] = p < valid ? s[p] : -INFINITY;
    const float top = cec_max64(s);
    for (int p = 0; p < CEC_PAGE; p++) s[p] = cec_exp(s[p] - top);
    *m = top;
    *l = cec_sum64(s);
}

/* Write e[p] * scales[p] as integers 0..16383 = 128 hi + lo, relative to the largest; returns the value of one step.
 * A page whose weighted scales all stay below 2^-100 counts as zeros. */
CEC_INLINE float cec_split_weights(const float e[CEC_PAGE], const float *scales, int valid, uint8_t hi[CEC_PAGE],
                                   uint8_t lo[CEC_PAGE]) {
    float w[CEC_PAGE];
    int32_t bits = 0;
    for (int p = 0; p < CEC_PAGE; p++) w[p] = e[p] * scales[p];
    for (int p = 0; p < CEC_PAGE; p++) {
        w[p] = p < valid ? w[p] : 0;
        const int32_t magnitude = (int32_t)(cec_f32_bits(w[p]) & 0x7fffffffu);
        bits = magnitude > bits ? magnitude : bits;
    }
    const float top = cec_bits_f32((uint32_t)bits), steps = 16383;
    if (top < 0x1p-100f) {
        memset(hi, 0, CEC_PAGE);
        memset(lo, 0, CEC_PAGE);
        return 0;
    }
    const float inverse = steps / top;
    for (int p = 0; p < CEC_PAGE; p++) {
        const uint32_t u = cec_f32_bits(w[p] * inverse + 0x1p23f); /* rounds half to even, integer in the low bits */
        hi[p] = (uint8_t)(u >> 7 & 127);
        lo[p] = (uint8_t)(u & 127);
    }
    return top / steps;
}

/* ---- one page of many rows, over the dot products of an instruction set; n is 1..CEC_ROWS in these ---- */

/* s[r][p] = sum over d of q[r][d] K[d][p], all 64 positions. */
typedef void (*cec_int_scores)(const int8_t *q, int n, int64_t D, const int8_t *k, int32_t s[][CEC_PAGE]);
typedef void (*cec_float_scores)(const float *q, int n, int64_t D, const void *k, float s[][CEC_PAGE]);

/* o[r][d] = sum over the first 4 * groups positions of (128 hi[r][p] + lo[r][p]) V[p][d]. */
typedef void (*cec_int_values)(const uint8_t hi[][CEC_PAGE], const uint8_t lo[][CEC_PAGE], int n, int64_t D,
                               const int8_t *v, int groups, int32_t *o);

/* o[r][d] += e[r][p] V[p][d] for p0 <= p < p1, in that order. */
typedef void (*cec_float_values)(const float e[][CEC_PAGE], int n, int64_t D, const void *v, int p0, int p1, float *o);

/* How wide a head's values are. */
static inline int64_t cec_value_width(const cec_head_page *page) {
    int64_t width = 0;
    for (int i = 0; i < page->values; i++) width += page->value[i].width;
    return width;
}

/* e = the scores of `rows` rows from `row` on, part by part. */
CEC_INLINE void cec_scores_int8(cec_int_scores scores, const cec_head_page *page, const int8_t *q, const float *qd,
                                int64_t row, int rows, float e[][CEC_PAGE]) {
    int32_t sums[CEC_ROWS][CEC_PAGE];
    for (int i = 0; i < page->keys; i++) {
        const int64_t D = page->key[i].width;
        const float *kd = cec_part_scales(page->key[i].data, D);
        scores(q + row * D, rows, D, page->key[i].data, sums);
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < CEC_PAGE; p++) {
                const float s = (float)sums[r][p] * (qd[row + r] * kd[p]);
                e[r][p] = i ? e[r][p] + s : s;
            }
        q += page->rows * D;
        qd += page->rows;
    }
}

CEC_INLINE void cec_partial_int8(cec_int_scores scores, cec_int_values values, const cec_head_page *page,
                                 const int8_t *q, const float *qd, int64_t row, int64_t n, const int32_t *valid,
                                 float *m, float *l, float *o) {
    const int64_t V = cec_value_width(page);
    int32_t dots[CEC_ROWS * CEC_HEAD_MAX];
    uint8_t hi[CEC_ROWS][CEC_PAGE], lo[CEC_ROWS][CEC_PAGE];
    float step[CEC_ROWS], e[CEC_ROWS][CEC_PAGE];
    for (int64_t r0 = 0; r0 < n; r0 += CEC_ROWS) {
        const int rows = (int)(n - r0 < CEC_ROWS ? n - r0 : CEC_ROWS);
        float *out = o + r0 * V;
        int last = 0;
        cec_scores_int8(scores, page, q, qd, row + r0, rows, e);
        for (int r = 0; r < rows; r++) {
            cec_softmax(e[r], valid[r0 + r], &m[r0 + r], &l[r0 + r]);
            last = valid[r0 + r] > last ? valid[r0 + r] : last;
        }
        for (int i = 0; i < page->values; i++) {
            const int64_t D = page->value[i].width;
            const float *vd = cec_part_scales(page->value[i].data, D);
            for (int r = 0; r < rows; r++) step[r] = cec_split_weights(e[r], vd, valid[r0 + r], hi[r], lo[r]);
            values((const uint8_t(*)[CEC_PAGE])hi, (const uint8_t(*)[CEC_PAGE])lo, rows, D, page->value[i].data,
                   (last + 3) / 4, dots);
            for (int r = 0; r < rows; r++)
                for (int64_t d = 0; d < D; d++) out[r * V + d] = step[r] * (float)dots[r * D + d];
            out += D;
        }
    }
}

/* e = the scores of `rows` rows from `row` on, part by part. */
CEC_INLINE void cec_scores_float(cec_float_scores scores, const cec_head_page *page, const float *q, int64_t row,
                                 int rows, float e[][CEC_PAGE]) {
    float sums[CEC_ROWS][CEC_PAGE];
    for (int i = 0; i < page->keys; i++) {
        const int64_t D = page->key[i].width;
        scores(q + row * D, rows, D, page->key[i].data, sums);
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < CEC_PAGE; p++) e[r][p] = i ? e[r][p] + sums[r][p] : sums[r][p];
        q += page->rows * D;
    }
}

CEC_INLINE void cec_partial_float(cec_float_scores scores, cec_float_values values, const cec_head_page *page,
                                  const float *q, int64_t row, int64_t n, const int32_t *valid, float *m, float *l,
                                  float *o) {
    const int64_t V = cec_value_width(page);
    float e[CEC_ROWS][CEC_PAGE], sums[CEC_ROWS * CEC_HEAD_MAX];
    for (int64_t r0 = 0; r0 < n; r0 += CEC_ROWS) {
        const int rows = (int)(n - r0 < CEC_ROWS ? n - r0 : CEC_ROWS);
        float *out = o + r0 * V;
        int common = CEC_PAGE; /* positions that count for every row; the rest is each row's own */
        cec_scores_float(scores, page, q, row + r0, rows, e);
        for (int r = 0; r < rows; r++) {
            cec_softmax(e[r], valid[r0 + r], &m[r0 + r], &l[r0 + r]);
            common = valid[r0 + r] < common ? valid[r0 + r] : common;
        }
        for (int i = 0; i < page->values; i++) {
            const int64_t D = page->value[i].width;
            memset(sums, 0, (size_t)(rows * D) * sizeof *sums);
            values((const float(*)[CEC_PAGE])e, rows, D, page->value[i].data, 0, common, sums);
            for (int r = 0; r < rows; r++) {
                if (common < valid[r0 + r])
                    values((const float(*)[CEC_PAGE])&e[r], 1, D, page->value[i].data, common, valid[r0 + r],
                           sums + r * D);
                memcpy(out + r * V, sums + r * D, (size_t)D * sizeof *out);
            }
            out += D;
        }
    }
}

/* ---- pages of one row ---- */

static void merge(float *restrict M, float *restrict L, float *restrict O, float m, float l, const float *restrict o,
                  int64_t D) {
    if (m == -INFINITY && l == 0) return; /* no position counted: exp(m - M) would be NaN at the start */
    const float top = cec_larger(m, *M), old = cec_exp(*M - top), new = cec_exp(m - top);
    for (int64_t d = 0; d < D; d++) O[d] = O[d] * old + o[d] * new;
    *L = *L * old + l * new;
    *M = top;
}

#endif
