/* SPDX-License-Identifier: Apache-2.0
 *
 * The one exponential of the project. Multiplications and additions only, never fused, so that every instruction set
 * returns the same bytes; selections only where the compiler can take them into vector code. */
#ifndef CECILIA_EXP_H
#define CECILIA_EXP_H

#include "half.h"

/* e^x to 1 ulp; exactly 1 at 0, exactly 0 below -87.7, inf above 88.4, NaN for NaN.
 * x = n ln2 + r with |r| <= ln2 / 2; e^r = 1 + r + r^2 P(r), P a minimax fit of relative error 4e-9. */
static inline float cec_exp(float x) {
    const float magic = 0x1.8p23f; /* adding it rounds to an integer, which then stands in the low bits */
    const float magnitude = cec_bits_f32(cec_f32_bits(x) & 0x7fffffffu);
    const float clamped = 89 < magnitude ? 89 : magnitude; /* NaN passes */
    x = cec_bits_f32(cec_f32_bits(clamped) | (cec_f32_bits(x) & 0x80000000u));
    const float shifted = x * 0x1.715476p+0f + magic;
    const float n = shifted - magic;
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f; /* ln2 in two parts; the first product is exact */
    float p = 0.001381459878757596f;
    p = p * r + 0.008368716575205326f;
    p = p * r + 0.04166838899254799f;
    p = p * r + 0.1666652113199234f;
    p = p * r + 0.4999999403953552f;
    const float mantissa = (p * (r * r) + r) + 1;
    const int32_t exponent = (int32_t)(cec_f32_bits(shifted) - cec_f32_bits(magic)) + 127; /* of 2^n: -1..255 */
    return mantissa * cec_bits_f32((uint32_t)(exponent > 0 ? exponent : 0) << 23);
}

static inline float cec_sigmoid(float x) { return 1 / (1 + cec_exp(-x)); }

#endif
