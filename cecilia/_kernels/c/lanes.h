/* SPDX-License-Identifier: Apache-2.0
 *
 * Reductions in a written-out order: 16 lanes, then halves folded onto each other. Vector units of any width can
 * follow it, so a sum has the same bytes on each of them. */
#ifndef CECILIA_LANES_H
#define CECILIA_LANES_H

#define CEC_INLINE static inline __attribute__((always_inline))

enum { CEC_LANES = 16 };

/* Sum of 16 lanes; overwrites them. */
static inline float cec_sum_lanes(float lane[CEC_LANES]) {
    for (int i = 0; i < 8; i++) lane[i] += lane[i + 8];
    for (int i = 0; i < 4; i++) lane[i] += lane[i + 4];
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

/* Sum of the 64 values of a page. */
static inline float cec_sum64(const float x[4 * CEC_LANES]) {
    float lane[CEC_LANES];
    for (int i = 0; i < CEC_LANES; i++)
        lane[i] = (x[i] + x[i + CEC_LANES]) + (x[i + 2 * CEC_LANES] + x[i + 3 * CEC_LANES]);
    return cec_sum_lanes(lane);
}

static inline float cec_larger(float a, float b) { return a > b ? a : b; }

/* Largest of the 64 values of a page. */
static inline float cec_max64(const float x[4 * CEC_LANES]) {
    float lane[CEC_LANES];
    for (int i = 0; i < CEC_LANES; i++)
        lane[i] = cec_larger(cec_larger(x[i], x[i + CEC_LANES]), cec_larger(x[i + 2 * CEC_LANES], x[i + 3 * CEC_LANES]));
    for (int i = 0; i < 8; i++) lane[i] = cec_larger(lane[i], lane[i + 8]);
    for (int i = 0; i < 4; i++) lane[i] = cec_larger(lane[i], lane[i + 4]);
    return cec_larger(cec_larger(lane[0], lane[2]), cec_larger(lane[1], lane[3]));
}

#endif
