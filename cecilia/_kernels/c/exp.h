/* SPDX-License-Identifier: Apache-2.0
 *
 * The one exponential of the project. Multiplications and additions only, never fused, so that every instruction set
 * returns the same bytes; one selection, so that a loop over it becomes vector code. */
#ifndef CECILIA_EXP_H
#define CECILIA_EXP_H

#include "half.h"

/* e^x to about 1 ulp; exactly 1 at 0, exactly 0 below -87.7, e^88 above 88, NaN for NaN.
 * x = n ln2 + r with |r| <= ln2 / 2; e^r = 1 + r + r^2 P(r), P a minimax fit of relative error 4e-9. */
static inline float cec_exp(float x) {
    const float magic = 0x1.8p23f; /* adding it rounds to an integer, which then stands in the low bits */
    const float magnitude = cec_bits_f32(cec_f32_bits(x) & 0x7fffffffu);
    const float clamped = 88 < magnitude ? 88 : magnitude; /* NaN passes; at -88 n = -127, the exponent field of zero */
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
    return mantissa * cec_bits_f32((cec_f32_bits(shifted) << 23) + 0x3f800000u); /* times 2^n */
}

#endif
