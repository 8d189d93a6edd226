/* SPDX-License-Identifier: Apache-2.0
 *
 * f16 and bf16 to f32 in plain C, exact, for files without the instructions. */
#ifndef CECILIA_HALF_H
#define CECILIA_HALF_H

#include <stdint.h>
#include <string.h>

static inline float cec_bits_f32(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline uint32_t cec_f32_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static inline float cec_bf16_f32(uint16_t h) { return cec_bits_f32((uint32_t)h << 16); }

/* Round to nearest even; NaN stays NaN. */
static inline uint16_t cec_f32_bf16(float f) {
    const uint32_t u = cec_f32_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static inline float cec_f16_f32(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
    if (exponent == 31) return cec_bits_f32(sign | 0x7f800000u | mantissa << 13);
    if (exponent) return cec_bits_f32(sign | (exponent + 112) << 23 | mantissa << 13);
    const float tiny = (float)mantissa * 0x1p-24f; /* subnormal halves are normal floats */
    return sign ? -tiny : tiny;
}

/* Scale, and its inverse, of activations whose largest magnitude is `top`. Below 1e-30, where 127 / top comes to
 * overflow, they count as zeros; NaN and infinity stay in the scale. */
static inline float cec_block_scale(float top, float *inverse) {
    *inverse = top < 1e-30f ? 0 : 127 / top;
    return top < 1e-30f ? 0 : top / 127;
}

#endif
