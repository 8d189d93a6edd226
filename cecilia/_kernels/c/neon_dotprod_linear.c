/* SPDX-License-Identifier: Apache-2.0
 *
 * Linear layers for NEON with dot products. A q register holds 4 K-bytes of 4 rows, a quad; sdot multiplies them by
 * 4 bytes of a token, taken from one lane of a register that holds 16 of them. */
#if defined(__aarch64__)
#pragma GCC target("arch=armv8.2-a+dotprod,tune=cortex-a76")
#include <arm_neon.h>

#include "half.h"
#include "ops.h"
#include "tile.h"

#define INLINE static inline __attribute__((always_inline))

/* Unrolled before arrays are given their places: those of sums then are registers, not memory. */
#define EACH(i, n) _Pragma("GCC unroll 8") for (int i = 0; i < (n); i++)

/* Four tokens share a load of weights: with half a tile their sums and results take 16 of the 32 registers. */
enum { QUADS = CEC_TILE / 4, TOKENS = 4 };

static void quantize(const float *x, int64_t n, int8_t *q, float *d, float *s, int32_t *c) {
    const float32x4_t largest = vdupq_n_f32(127);
    for (int64_t b = 0; b < n / CEC_BLOCK; b++, x += CEC_BLOCK, q += CEC_BLOCK) {
        float32x4_t v[8];
        uint32x4_t top4 = vdupq_n_u32(0);
        int16x8_t i16[4];
        EACH(i, 8) {
            v[i] = vld1q_f32(x + 4 * i);
            top4 = vmaxq_u32(top4, vreinterpretq_u32_f32(vabsq_f32(v[i]))); /* as bits NaN > inf > numbers */
        }
        const float top = cec_bits_f32(vmaxvq_u32(top4));
        float inverse;
        const float scale = cec_block_scale(top, &inverse);
        EACH(i, 8) /* minnm prefers the number: a NaN becomes 127, as in the reference */
            v[i] = vmaxnmq_f32(vminnmq_f32(vmulq_n_f32(v[i], inverse), largest), vnegq_f32(largest));
        EACH(i, 4)
            i16[i] = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(v[2 * i])), vmovn_s32(vcvtnq_s32_f32(v[2 * i + 1])));
        const int8x16_t q0 = vcombine_s8(vmovn_s16(i16[0]), vmovn_s16(i16[1]));
        const int8x16_t q1 = vcombine_s8(vmovn_s16(i16[2]), vmovn_s16(i16[3])), ones = vdupq_n_s8(1);
        vst1q_s8(q, q0);
        vst1q_s8(q + 16, q1);
        const int32_t sum = vaddvq_s32(vdotq_s32(vdotq_s32(vdupq_n_s32(0), q0, ones), q1, ones));
        d[b] = scale;
        s[b] = scale * (float)sum;
        c[b] = -8 * sum;
    }
}

INLINE void put(float *y, float32x4_t v, int rows, int add) {
    if (rows >= 4) {
        vst1q_f32(y, add ? vaddq_f32(vld1q_f32(y), v) : v);
        return;
    }
    float lane[4];
    vst1q_f32(lane, v);
    for (int r = 0; r < rows; r++) y[r] = add ? y[r] + lane[r] : lane[r];
}

/* ---- integer weights: n tokens from t on, `quads` quads of rows from row r0 on ---- */

typedef struct {
    int8x16_t low, high; /* K-groups g and g + 4 of one quad: low and high nibbles of the same bytes */
} groups;

INLINE groups load_groups(int format, const uint8_t *q, int g) {
    if (format == CEC_Q8_32)
        return (groups){vreinterpretq_s8_u8(vld1q_u8(q + g * 64)), vreinterpretq_s8_u8(vld1q_u8(q + (g + 4) * 64))};
    const uint8x16_t pair = vld1q_u8(q + g * 64);
    return (groups){vreinterpretq_s8_u8(vandq_u8(pair, vdupq_n_u8(15))), vreinterpretq_s8_u8(vshrq_n_u8(pair, 4))};
}

/* Integers below 2^22 in size become floats without a conversion, of which the cores have one port: added to the bits
 * of 1.5 * 2^23 they are the bits of 1.5 * 2^23 + sum, exactly. */
enum { MAGIC_BITS = 0x4b400000 };

INLINE float32x4_t to_float(int32x4_t magic_sum) {
    return vsubq_f32(vreinterpretq_f32_s32(magic_sum), vdupq_n_f32(0x1.8p23f));
}

/* Adds the products of a block to `sum`, exactly. Nibbles count as 0..15. */
INLINE void add_block(int format, int n, int quads, const uint8_t *q, const int8_t *x, int64_t K,
                      int32x4_t sum[TOKENS][QUADS]) {
    int8x16_t low[TOKENS], high[TOKENS];
    EACH(i, n) {
        low[i] = vld1q_s8(x + i * K);
        high[i] = vld1q_s8(x + i * K + 16);
    }
#define GROUP(G)                                                                                                       \
    EACH(j, quads) {                                                                                                   \
        const groups w = load_groups(format, q + 16 * j, G);                                                           \
        EACH(i, n) sum[i][j] = vdotq_laneq_s32(sum[i][j], w.low, low[i], G);                                           \
        EACH(i, n) sum[i][j] = vdotq_laneq_s32(sum[i][j], w.high, high[i], G);                                         \
    }
    GROUP(0)
    GROUP(1)
    GROUP(2)
    GROUP(3)
#undef GROUP
}

INLINE float32x4_t halves(const uint16_t *h) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h))); }

/* A loop of its own: beside the sums there are no registers left for a second set of results. */
INLINE void add_minima(int n, int quads, const uint16_t *m, const float *s, int64_t blocks,
                       float32x4_t acc[TOKENS][QUADS]) {
    float32x4_t minima[TOKENS][QUADS];
    EACH(i, n)
        EACH(j, quads) minima[i][j] = vdupq_n_f32(0);
    for (int64_t b = 0; b < blocks; b++)
        EACH(j, quads) {
            const float32x4_t row = halves(m + b * CEC_TILE + 4 * j);
            EACH(i, n) minima[i][j] = vfmaq_n_f32(minima[i][j], row, s[i * blocks + b]);
        }
    EACH(i, n)
        EACH(j, quads) acc[i][j] = vaddq_f32(acc[i][j], minima[i][j]);
}

/* `format` says how p->q is packed; `minima` whether p->m is there. */
INLINE void integer_tokens(int format, int minima, int n, int quads, const cec_packed *p, int r0, const cec_acts *x,
                           int64_t t, int rows, float *y, int64_t ldy, int add) {
    const int8_t *xq = x->q + t * x->K;
    const float *xd = x->d + t * p->blocks;
    const int32_t *xc = x->c + t * p->blocks;
    float32x4_t acc[TOKENS][QUADS];
    EACH(i, n)
        EACH(j, quads) acc[i][j] = vdupq_n_f32(0);
    for (int64_t b = 0; b < p->blocks; b++) {
        int32x4_t sum[TOKENS][QUADS];
        EACH(i, n)
            EACH(j, quads)
                sum[i][j] = vdupq_n_s32(MAGIC_BITS + (format == CEC_Q4_32 ? xc[i * p->blocks + b] : 0));
        add_block(format, n, quads, p->q + b * cec_quant_bytes(format) + 4 * r0, xq + b * CEC_BLOCK, x->K, sum);
        EACH(j, quads) {
            const float32x4_t d = halves(p->d + b * CEC_TILE + r0 + 4 * j);
            EACH(i, n)
                acc[i][j] = vfmaq_f32(acc[i][j], vmulq_n_f32(d, xd[i * p->blocks + b]), to_float(sum[i][j]));
        }
    }
    if (minima) add_minima(n, quads, p->m + r0, x->s + t * p->blocks, p->blocks, acc);
    EACH(i, n)
        EACH(j, quads) put(y + i * ldy + r0 + 4 * j, acc[i][j], rows - r0 - 4 * j, add);
}

/* The same tile with its nibbles as signed bytes, in scratch. */
INLINE cec_packed expand(int format, const cec_packed *p, void *scratch) {
    uint8_t *to = scratch;
    const int8x16_t offset = vdupq_n_s8(format == CEC_Q4_32 ? 8 : 0);
    for (int64_t b = 0; b < p->blocks; b++)
        for (int g = 0; g < 4; g++)
            for (int j = 0; j < QUADS; j++) {
                const groups w = load_groups(format, p->q + b * cec_quant_bytes(format) + 16 * j, g);
                int8_t *at = (int8_t *)to + b * CEC_TILE * CEC_BLOCK + 64 * g + 16 * j;
                vst1q_s8(at, vsubq_s8(w.low, offset));
                vst1q_s8(at + 4 * 64, vsubq_s8(w.high, offset));
            }
    return (cec_packed){to, p->d, p->m, p->blocks};
}

INLINE void integer_tile(int format, const void *w, const cec_acts *x, int64_t t0, int64_t t1, int rows, float *y,
                         int64_t ldy, int add, void *scratch) {
    const int minima = format == CEC_Q4A_32;
    const cec_packed p = cec_unwrap(w, format, x->K);
    int64_t t = t0;
    if (t1 - t0 >= TOKENS) {
        const cec_packed e = format == CEC_Q8_32 ? p : expand(format, &p, scratch);
        const int64_t end = t0 + (t1 - t0) / TOKENS * TOKENS;
        for (int r0 = 0; r0 < rows; r0 += CEC_TILE / 2)
            for (t = t0; t < end; t += TOKENS)
                integer_tokens(CEC_Q8_32, minima, TOKENS, QUADS / 2, &e, r0, x, t, rows, y + t * ldy, ldy, add);
    }
    for (; t < t1; t++) integer_tokens(format, minima, 1, QUADS, &p, 0, x, t, rows, y + t * ldy, ldy, add);
}

/* ---- float weights: four running sums by k % 4 ---- */

enum { FLOAT_TOKENS = 3 }; /* with half a tile: 24 registers of sums */

INLINE float32x4_t load_floats(int format, const void *w, int64_t i) {
    if (format == CEC_F32) return vld1q_f32((const float *)w + i);
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)w + i), 16));
}

INLINE void float_tokens(int format, int n, int quads, const void *w, int r0, const cec_acts *x, int64_t t, int rows,
                         float *y, int64_t ldy, int add) {
    const float *xt = x->f + t * x->K;
    float32x4_t acc[4][FLOAT_TOKENS][QUADS];
    EACH(s, 4)
        EACH(i, n)
            EACH(j, quads) acc[s][i][j] = vdupq_n_f32(0);
#define COLUMN(S, FMA)                                                                                                 \
    EACH(j, quads) {                                                                                                   \
        const float32x4_t row = load_floats(format, w, (k + S) * CEC_TILE + r0 + 4 * j);                               \
        EACH(i, n) acc[S][i][j] = FMA;                                                                                 \
    }
#define BY_LANE(S) COLUMN(S, vfmaq_laneq_f32(acc[S][i][j], row, v[i], S))
#define BY_VALUE(S) if (k + S < x->K) COLUMN(S, vfmaq_n_f32(acc[S][i][j], row, xt[i * x->K + k + S]))
    int64_t k = 0;
    for (; k + 4 <= x->K; k += 4) {
        float32x4_t v[FLOAT_TOKENS];
        EACH(i, n) v[i] = vld1q_f32(xt + i * x->K + k);
        BY_LANE(0)
        BY_LANE(1)
        BY_LANE(2)
        BY_LANE(3)
    }
    BY_VALUE(0)
    BY_VALUE(1)
    BY_VALUE(2)
#undef BY_VALUE
#undef BY_LANE
#undef COLUMN
    EACH(i, n)
        EACH(j, quads) {
            const float32x4_t even = vaddq_f32(acc[0][i][j], acc[1][i][j]), odd = vaddq_f32(acc[2][i][j], acc[3][i][j]);
            put(y + i * ldy + r0 + 4 * j, vaddq_f32(even, odd), rows - r0 - 4 * j, add);
        }
}

INLINE void float_tile(int format, const void *w, const cec_acts *x, int64_t t0, int64_t t1, int rows, float *y,
                       int64_t ldy, int add, void *scratch) {
    (void)scratch;
    int64_t t = t0;
    for (; t + FLOAT_TOKENS <= t1; t += FLOAT_TOKENS)
        for (int r0 = 0; r0 < rows; r0 += CEC_TILE / 2)
            float_tokens(format, FLOAT_TOKENS, QUADS / 2, w, r0, x, t, rows, y + t * ldy, ldy, add);
    for (; t < t1; t++) float_tokens(format, 1, QUADS, w, 0, x, t, rows, y + t * ldy, ldy, add);
}

#include "linear_table.h"

const cec_linear_ops cec_neon_dotprod_linear = CEC_LINEAR_OPS;
#else
typedef int cec_neon_dotprod_linear_unused;
#endif
