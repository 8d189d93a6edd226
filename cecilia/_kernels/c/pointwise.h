/* SPDX-License-Identifier: Apache-2.0
 *
 * Pointwise kernels in plain C. Every instruction set compiles this same source under its own target, and the order
 * of operations is written out in 16 lanes, so all of them return the same bytes. */
#ifndef CECILIA_POINTWISE_H
#define CECILIA_POINTWISE_H

#include <math.h>
#include <stdint.h>

#include "exp.h"
#include "lanes.h"

static void rmsnorm(const float *x, const float *w, float eps, int64_t n, float *y) {
    float lane[CEC_LANES] = {0};
    int64_t i = 0;
    for (; i + CEC_LANES <= n; i += CEC_LANES)
        for (int j = 0; j < CEC_LANES; j++) lane[j] += x[i + j] * x[i + j];
    for (int j = 0; i + j < n; j++) lane[j] += x[i + j] * x[i + j];
    const float scale = 1 / sqrtf(cec_sum_lanes(lane) / (float)n + eps);
    for (i = 0; i < n; i++) y[i] = x[i] * scale * w[i];
}

static void swiglu(const float *g, const float *u, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = g[i] / (1 + cec_exp(-g[i])) * u[i];
}

static void sigmoid(const float *x, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = cec_sigmoid(x[i]);
}

static void rope_pairs(float *restrict x, const float *restrict cos, const float *restrict sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cos[i] - b * sin[i];
        x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
}

static void rope(float *restrict x, const float *restrict cos, const float *restrict sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

#endif
