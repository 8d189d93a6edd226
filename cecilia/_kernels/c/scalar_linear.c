/* SPDX-License-Identifier: Apache-2.0
 *
 * Linear layers, the reference: what every other instruction set must return. */
#include <math.h>

#include "half.h"
#include "ops.h"
#include "tile.h"

static void quantize(const float *x, int64_t n, int8_t *q, float *d, float *s, int32_t *c) {
    for (int64_t b = 0; b < n / CEC_BLOCK; b++, x += CEC_BLOCK, q += CEC_BLOCK) {
        /* The largest magnitude, compared as bits: NaN > inf > numbers, so that no NaN is lost in the scale. */
        uint32_t bits = 0;
        for (int i = 0; i < CEC_BLOCK; i++) {
            const uint32_t magnitude = cec_f32_bits(x[i]) & 0x7fffffff;
            bits = magnitude > bits ? magnitude : bits;
        }
        const float top = cec_bits_f32(bits);
        float inverse;
        const float scale = cec_block_scale(top, &inverse);
        int32_t sum = 0;
        for (int i = 0; i < CEC_BLOCK; i++) {
            /* fminf sends NaN to 127: the conversion stays defined, and the scale already carries the NaN. */
            const float v = fmaxf(-127, fminf(127, nearbyintf(x[i] * inverse)));
            q[i] = (int8_t)v;
            sum += q[i];
        }
        d[b] = scale;
        s[b] = scale * (float)sum;
        c[b] = -8 * sum;
    }
}

/* The quant of row r, element i (0..31) of a block, as an unsigned nibble or a signed byte. */
static inline int nibble(const uint8_t *q, int r, int i) {
    return q[((i % 16) / 4 * CEC_TILE + r) * 4 + i % 4] >> (i < 16 ? 0 : 4) & 15;
}

static inline int signed_byte(const uint8_t *q, int r, int i) { return (int8_t)q[(i / 4 * CEC_TILE + r) * 4 + i % 4]; }

static inline int quant(int format, const uint8_t *q, int r, int i) {
    return format == CEC_Q8_32 ? signed_byte(q, r, i) : nibble(q, r, i) - (format == CEC_Q4_32 ? 8 : 0);
}

static inline void integer_tile(int format, const void *w, const cec_acts *x, int64_t t0, int64_t t1, int rows, float *y,
                                int64_t ldy, int add) {
    const cec_packed tile = cec_unwrap(w, format, x->K);
    for (int64_t t = t0; t < t1; t++) {
        for (int r = 0; r < rows; r++) {
            float acc = 0, minima = 0;
            for (int64_t b = 0; b < tile.blocks; b++) {
                const uint8_t *q = tile.q + b * cec_quant_bytes(format);
                const int8_t *xq = x->q + t * x->K + b * CEC_BLOCK;
                int32_t sum = 0;
                for (int i = 0; i < CEC_BLOCK; i++) sum += quant(format, q, r, i) * xq[i];
                const float dx = x->d[t * tile.blocks + b], dw = cec_f16_f32(tile.d[b * CEC_TILE + r]);
                acc = fmaf(dw * dx, (float)sum, acc);
                if (format == CEC_Q4A_32)
                    minima = fmaf(cec_f16_f32(tile.m[b * CEC_TILE + r]), x->s[t * tile.blocks + b], minima);
            }
            const float v = format == CEC_Q4A_32 ? acc + minima : acc;
            y[t * ldy + r] = add ? y[t * ldy + r] + v : v;
        }
    }
}

static inline float weight(int format, const void *w, int64_t i) {
    return format == CEC_F32 ? ((const float *)w)[i] : cec_bf16_f32(((const uint16_t *)w)[i]);
}

static inline void float_tile(int format, const void *w, const cec_acts *x, int64_t t0, int64_t t1, int rows, float *y,
                              int64_t ldy, int add) {
    for (int64_t t = t0; t < t1; t++) {
        const float *xt = x->f + t * x->K;
        float acc[4][CEC_TILE] = {{0}};
        for (int64_t k = 0; k < x->K; k++)
            for (int r = 0; r < CEC_TILE; r++) acc[k % 4][r] += weight(format, w, k * CEC_TILE + r) * xt[k];
        for (int r = 0; r < rows; r++) {
            const float v = (acc[0][r] + acc[1][r]) + (acc[2][r] + acc[3][r]);
            y[t * ldy + r] = add ? y[t * ldy + r] + v : v;
        }
    }
}

static inline void integer_row(int format, const void *w, int r, int64_t K, float *out) {
    const cec_packed tile = cec_unwrap(w, format, K);
    for (int64_t b = 0; b < tile.blocks; b++) {
        const float d = cec_f16_f32(tile.d[b * CEC_TILE + r]);
        const float m = format == CEC_Q4A_32 ? cec_f16_f32(tile.m[b * CEC_TILE + r]) : 0;
        for (int i = 0; i < CEC_BLOCK; i++)
            out[b * CEC_BLOCK + i] = d * (float)quant(format, tile.q + b * cec_quant_bytes(format), r, i) + m;
    }
}

#define TILE(NAME, KIND, FORMAT)                                                                                       \
    static void NAME(const void *w, const cec_acts *x, int64_t t0, int64_t t1, int rows, float *y, int64_t ldy,        \
                     int add, void *scratch) {                                                                         \
        KIND(FORMAT, w, x, t0, t1, rows, y, ldy, add);                                                                 \
    }

TILE(tile_f32, float_tile, CEC_F32)
TILE(tile_bf16, float_tile, CEC_BF16)
TILE(tile_q8, integer_tile, CEC_Q8_32)
TILE(tile_q4, integer_tile, CEC_Q4_32)
TILE(tile_q4a, integer_tile, CEC_Q4A_32)

void cec_gather_f32(const void *w, int r, int64_t K, float *out) {
    for (int64_t k = 0; k < K; k++) out[k] = weight(CEC_F32, w, k * CEC_TILE + r);
}
void cec_gather_bf16(const void *w, int r, int64_t K, float *out) {
    for (int64_t k = 0; k < K; k++) out[k] = weight(CEC_BF16, w, k * CEC_TILE + r);
}
void cec_gather_q8(const void *w, int r, int64_t K, float *out) { integer_row(CEC_Q8_32, w, r, K, out); }
void cec_gather_q4(const void *w, int r, int64_t K, float *out) { integer_row(CEC_Q4_32, w, r, K, out); }
void cec_gather_q4a(const void *w, int r, int64_t K, float *out) { integer_row(CEC_Q4A_32, w, r, K, out); }

const cec_linear_ops cec_scalar_linear = {
    quantize,
    {tile_f32, tile_bf16, tile_q8, tile_q4, tile_q4a},
    {cec_gather_f32, cec_gather_bf16, cec_gather_q8, cec_gather_q4, cec_gather_q4a},
};
