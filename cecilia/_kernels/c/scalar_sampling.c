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

#include "exp.h"
#include "ops.h"

enum { LANES = 16, BINS = 2048 };
static const int SHIFT[3] = {21, 10, 0}, WIDTH[3] = {11, 11, 10};

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

/* w[i] = exp((x[i] - top) * scale). */
static void exponentials(const float *restrict x, int64_t n, float top, float scale, float *restrict w) {
    for (int64_t i = 0; i < n; i++) w[i] = cec_exp((x[i] - top) * scale);
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

/* List every id in a bin, of the first histogram, that may hold one of the k nearest logits; returns how many. */
static int64_t list_nearest(const float *x, float top, int64_t n, int64_t k, int32_t *ids) {
    int64_t filled[BINS] = {0}, reached = 0, count = 0;
    for (int64_t i = 0; i < n; i++) filled[cec_f32_bits(top - x[i]) >> SHIFT[0]]++;
    uint32_t bin = 0;
    while ((reached += filled[bin]) < k) bin++;
    for (int64_t i = 0; i < n; i++)
        if (cec_f32_bits(top - x[i]) >> SHIFT[0] <= bin) ids[count++] = (int32_t)i;
    return count;
}

/* Keep, of the listed tokens, those whose weight is at least `least`. */
static int64_t drop_light(int32_t *ids, float *w, int64_t count, double least) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++)
        if (w[i] >= least) {
            ids[kept] = ids[i];
            w[kept++] = w[i];
        }
    return kept;
}

/* Keep, of the listed tokens, the smallest set of nearest logits whose measure reaches `wanted` > 0; the measure of a
 * token is its weight, or 1 when `counting`. */
static int64_t keep_nearest(const float *x, float top, int32_t *ids, float *w, int64_t count, double wanted,
                            int counting) {
    double reached = 0;
    uint32_t prefix = 0;
    for (int level = 0; level < 3; level++) {
        double measure[BINS] = {0};
        uint32_t mask = (1u << WIDTH[level]) - 1, chosen = 0;
        for (int64_t i = 0; i < count; i++) {
            uint32_t bits = cec_f32_bits(top - x[ids[i]]);
            if (level == 0 || bits >> SHIFT[level - 1] == prefix)
                measure[(bits >> SHIFT[level]) & mask] += counting ? 1.0 : (double)w[i];
        }
        /* The first bin that reaches the target; when rounding leaves it just out of reach, the last filled one. */
        double before = reached;
        for (uint32_t bin = 0; bin <= mask; bin++)
            if (measure[bin] > 0) {
                chosen = bin;
                before = reached;
                reached += measure[bin];
                if (reached >= wanted) break;
            }
        reached = before;
        prefix = (prefix << WIDTH[level]) | chosen;
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = cec_f32_bits(top - x[ids[i]]);
        if (bits > prefix || (bits == prefix && reached >= wanted)) continue;
        if (bits == prefix) reached += counting ? 1.0 : (double)w[i];
        ids[kept] = ids[i];
        w[kept++] = w[i];
    }
    return kept;
}

static int64_t keep(const float *x, int64_t n, double temperature, int64_t top_k, double top_p, int32_t *ids, float *w) {
    float top = largest(x, n);
    if (!isfinite(top)) return -1;
    /* A temperature too small for a float keeps only logits equal to the largest: 0 * FLT_MAX is 0, not NaN. */
    double inverse = 1.0 / temperature;
    float scale = inverse < FLT_MAX ? (float)inverse : FLT_MAX;
    int64_t count = n;
    if (top_k > 0 && top_k < n) {
        count = list_nearest(x, top, n, top_k, ids);
        count = keep_nearest(x, top, ids, w, count, (double)top_k, 1);
        for (int64_t i = 0; i < count; i++) w[i] = cec_exp((x[ids[i]] - top) * scale);
    } else {
        for (int64_t i = 0; i < n; i++) ids[i] = (int32_t)i;
        exponentials(x, n, top, scale, w);
    }
    if (top_p < 1) {
        double mass = total(w, count);
        /* Tokens lighter than (1 - top_p) * mass / count together weigh less than what top_p leaves out, so none of
         * them is kept: usually all but a few hundred. The half allows for rounding. */
        count = drop_light(ids, w, count, 0.5 * (1 - top_p) * mass / (double)count);
        count = keep_nearest(x, top, ids, w, count, top_p * mass, 0);
    }
    return count;
}

static int64_t draw(const float *w, int64_t n, double u) {
    double target = u * total(w, n), sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += w[i];
        if (sum > target) return i;
    }
    while (n > 1 && w[n - 1] == 0) n--; /* the two sums differ by rounding, and u was next to 1 */
    return n - 1;
}

const cec_sampling_ops cec_scalar_sampling = {argmax, keep, draw};
