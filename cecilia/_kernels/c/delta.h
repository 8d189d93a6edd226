/* SPDX-License-Identifier: Apache-2.0
 *
 * Kimi Delta Attention of one head in plain C: every instruction set compiles this same source under its own target.
 * The order of operations is written out and every fused multiply-add is one, so all of them return the same bytes. */
#ifndef CECILIA_DELTA_H
#define CECILIA_DELTA_H

#include <math.h>
#include <string.h>

#include "exp.h"
#include "lanes.h"
#include "table.h"

/* Sum of x[i] * y[i]; n % 16 == 0. */
static float delta_dot(const float *x, const float *y, int64_t n) {
    float lane[CEC_LANES] = {0};
    for (int64_t i = 0; i < n; i += CEC_LANES)
        for (int j = 0; j < CEC_LANES; j++) lane[j] += x[i + j] * y[i + j];
    return cec_sum_lanes(lane);
}

/* silu of the four taps of one channel each, the oldest row first. */
static void delta_conv(const float *const *rows, const float *taps, int64_t channels, int64_t n, float *restrict y) {
    const float *a = rows[0], *b = rows[1], *c = rows[2], *d = rows[3];
    const float *ta = taps, *tb = ta + channels, *tc = tb + channels, *td = tc + channels;
    for (int64_t i = 0; i < n; i++) {
        const float x = ((ta[i] * a[i] + tb[i] * b[i]) + tc[i] * c[i]) + td[i] * d[i];
        y[i] = x / (1 + cec_exp(-x));
    }
}

static void delta_unit(float *x, int64_t n, float scale) {
    const float factor = scale / sqrtf(delta_dot(x, x, n) + 1e-6f);
    for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

static void delta_decay(const float *f, const float *bias, float a, float lowest, int64_t n, float *restrict d) {
    for (int64_t i = 0; i < n; i++) d[i] = cec_exp(lowest * cec_sigmoid(a * (f[i] + bias[i])));
}

static void delta_output(const float *o, const float *w, float eps, const float *z, int64_t n, float *y) {
    const float scale = 1 / sqrtf(delta_dot(o, o, n) / (float)n + eps);
    for (int64_t i = 0; i < n; i++) y[i] = o[i] * scale * w[i] * cec_sigmoid(z[i]);
}

enum { CEC_CHAINS = 4 }; /* sums kept apart, by k % 4: one alone would wait for its own last addition */

/* One token of the recurrence on 16 columns of the state. What the token before adds to the state, k u, is added on
 * the way: the state is read and written once a token. With `pending` 0 there is nothing to add. */
CEC_INLINE void delta_step(float *restrict s, int64_t K, const cec_delta_token *now, const float *last_k,
                           float u[CEC_LANES], const float *v, int pending, float *restrict o) {
    float sk[CEC_CHAINS][CEC_LANES] = {{0}}, sq[CEC_CHAINS][CEC_LANES] = {{0}};
    for (int64_t k = 0; k < K; k += CEC_CHAINS)
        for (int c = 0; c < CEC_CHAINS; c++) {
            float *row = s + (k + c) * CEC_LANES;
            const float added = pending ? last_k[k + c] : 0, kept = now->decay[k + c];
            const float key = now->k[k + c], query = now->q[k + c];
            for (int j = 0; j < CEC_LANES; j++) {
                const float x = kept * (pending ? fmaf(added, u[j], row[j]) : row[j]);
                row[j] = x;
                sk[c][j] = fmaf(key, x, sk[c][j]);
                sq[c][j] = fmaf(query, x, sq[c][j]);
            }
        }
    for (int j = 0; j < CEC_LANES; j++) {
        const float seen = (sk[0][j] + sk[1][j]) + (sk[2][j] + sk[3][j]);
        const float read = (sq[0][j] + sq[1][j]) + (sq[2][j] + sq[3][j]);
        u[j] = now->beta * (v[j] - seen);
        o[j] = fmaf(now->kq, u[j], read);
    }
}

static void delta_recur(float *s, int64_t K, const cec_delta_token *tokens, int64_t T, const float *v, int64_t ldv,
                        float *o, int64_t ldo) {
    float u[CEC_LANES];
    for (int64_t t = 0; t < T; t++)
        if (t == 0)
            delta_step(s, K, tokens, NULL, u, v, 0, o);
        else
            delta_step(s, K, tokens + t, tokens[t - 1].k, u, v + t * ldv, 1, o + t * ldo);
    const float *k = tokens[T - 1].k;
    for (int64_t i = 0; i < K; i++)
        for (int j = 0; j < CEC_LANES; j++) s[i * CEC_LANES + j] = fmaf(k[i], u[j], s[i * CEC_LANES + j]);
}

#define CEC_DELTA_OPS {delta_dot, delta_conv, delta_unit, delta_decay, delta_recur, delta_output}

#endif
