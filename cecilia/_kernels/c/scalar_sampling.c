/* SPDX-License-Identifier: Apache-2.0
 *
 * Sampling: the largest logit, the weights that top_k and top_p keep, and the draw among them. One file serves every
 * instruction set, so a seed gives the same tokens everywhere; the loops are shaped for the compiler's vectoriser.
 *
 * Selection is a radix select on the distance of a logit from the largest. The bits of a non-negative float sort like
 * the float, so three histograms (11, 11 and 10 bits) find the last distance kept without sorting anything; ties at that
 * distance go to the lowest ids. Time is linear in n whatever the logits are. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "ops.h"

enum { LANES = 16, BINS = 2048 };

/* Largest of n values, the index unknown; NaN when any is NaN. */
static float largest(const float *x, int64_t n) {
    float top[LANES];
    int32_t nan[LANES] = {0};
    for (int j = 0; j < LANES; j++) top[j] = -INFINITY;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            float v = x[i + j];
            top[j] = v > top[j] ? v : top[j];
            nan[j] |= v != v;
        }
    for (int j = 0; i + j < n; j++) {
        top[j] = x[i + j] > top[j] ? x[i + j] : top[j];
        nan[j] |= x[i + j] != x[i + j];
    }
    for (int j = 1; j < LANES; j++) {
        top[0] = top[j] > top[0] ? top[j] : top[0];
        nan[0] |= nan[j];
    }
    return nan[0] ? NAN : top[0];
}

static int64_t argmax(const float *x, int64_t n) {
    float top = largest(x, n);
    if (!isfinite(top)) return -1;
    int64_t i = 0;
    while (x[i] != top) i++;
    return i;
}

/* exp(-y) for y >= 0, relative error below 3e-7; 0 beyond y = 87, where weights no longer count beside the 1 of the
 * largest logit. Written without branches or calls so that the loop around it vectorises.
 * Reduction to |r| <= ln(2)/2 with ln 2 in two parts (Cody and Waite), then the Taylor polynomial of degree 7. */
static inline float exp_minus(float y) {
    float z = y < 87.0f ? y : 87.0f;
    int32_t k = (int32_t)(z * 1.44269504f + 0.5f);
    float r = (float)k * 0.693359375f - z + (float)k * -2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    int32_t bits = (127 - k) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    float e = p * scale;
    return y < 87.0f ? e : 0.0f;
}

static inline uint32_t bits_of(float distance) {
    uint32_t bits;
    memcpy(&bits, &distance, sizeof bits);
    return bits;
}

/* Sum of w in a fixed order: LANES running sums, added up in lane order. */
static double total(const float *w, int64_t n) {
    double sum[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) sum[j] += w[i + j];
    for (int j = 0; i + j < n; j++) sum[j] += w[i + j];
    for (int j = 1; j < LANES; j++) sum[0] += sum[j];
    return sum[0];
}

/* Set to 0 the weights outside the smallest set of nearest logits whose measure reaches `wanted` > 0.
 * The measure of a token is its weight, or 1 when `counting`. A token whose weight is 0 already has no measure. */
static void keep_nearest(const float *x, float top, float *w, int64_t n, double wanted, int counting) {
    static const int shift[3] = {21, 10, 0}, width[3] = {11, 11, 10};
    double reached = 0;
    uint32_t prefix = 0;
    for (int level = 0; level < 3; level++) {
        double measure[BINS] = {0};
        uint32_t mask = (1u << width[level]) - 1;
        int above = shift[level] + width[level]; /* bits already fixed; 32 at the first level */
        for (int64_t i = 0; i < n; i++) {
            uint32_t bits = bits_of(top - x[i]);
            if (w[i] > 0 && (level == 0 || bits >> above == prefix))
                measure[(bits >> shift[level]) & mask] += counting ? 1.0 : (double)w[i];
        }
        /* The first bin that reaches the target; when rounding leaves it just out of reach, the last filled one. */
        uint32_t chosen = 0;
        double before = reached;
        for (uint32_t bin = 0; bin <= mask; bin++)
            if (measure[bin] > 0) {
                chosen = bin;
                before = reached;
                reached += measure[bin];
                if (reached >= wanted) break;
            }
        reached = before;
        prefix = (prefix << width[level]) | chosen;
    }
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = bits_of(top - x[i]);
        if (bits > prefix || (bits == prefix && reached >= wanted)) w[i] = 0;
        if (bits == prefix && w[i] > 0) reached += counting ? 1.0 : (double)w[i];
    }
}

static double weigh(const float *x, int64_t n, double temperature, int64_t top_k, double top_p, float *w) {
    float top = largest(x, n);
    if (!isfinite(top)) return -1;
    /* A temperature too small for a float keeps only logits equal to the largest: 0 * FLT_MAX is 0, not NaN. */
    double inverse = 1.0 / temperature;
    float scale = inverse < FLT_MAX ? (float)inverse : FLT_MAX;
    for (int64_t i = 0; i < n; i++) w[i] = exp_minus((top - x[i]) * scale);
    if (top_k > 0 && top_k < n) keep_nearest(x, top, w, n, (double)top_k, 1);
    if (top_p < 1) keep_nearest(x, top, w, n, top_p * total(w, n), 0);
    return total(w, n);
}

static int64_t pick(const float *w, int64_t n, double target) {
    double sum = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < n; i++)
        if (w[i] > 0) {
            sum += w[i];
            last = i;
            if (sum > target) break;
        }
    return last;
}

const cec_sampling_ops cec_scalar_sampling = {argmax, weigh, pick};
