/* SPDX-License-Identifier: Apache-2.0
 *
 * Sampling: the largest logit, the weights that top_k, top_p and min_p keep, and the draw among them. One file serves
 * every instruction set, so a seed gives the same tokens everywhere; the loops are shaped for the compiler's vectoriser.
 *
 * Nothing is sorted. A first pass notes the largest logit of each block of 64, which tells the later ones the blocks
 * they need not look at; what is left, usually some hundred tokens, goes through a radix select on the distance from
 * the largest: the bits of a non-negative float sort like the float, so three histograms (11, 11 and 10 bits) find the
 * last distance kept. Ties at that distance go to the lowest ids. Time is linear in n whatever the logits are. */
#include <float.h>
#include <math.h>

#include "exp.h"
#include "lanes.h"
#include "ops.h"

enum { BLOCK = 64, BINS = 2048 };
static const int SHIFT[3] = {21, 10, 0}, WIDTH[3] = {11, 11, 10};

/* Largest of n values; NaN when any is NaN. maxima, if not NULL, gets the largest of each block; `first` the start of
 * the first block that holds the largest of all. */
static float largest(const float *x, int64_t n, float *maxima, int64_t *first) {
    float top = -INFINITY;
    int32_t nan = 0;
    *first = 0;
    for (int64_t i = 0; i < n; i += BLOCK) {
        float block = -INFINITY;
        if (i + BLOCK <= n)
            block = cec_max64(x + i);
        else
            for (int64_t j = i; j < n; j++) block = cec_larger(x[j], block);
        if (block > top) {
            top = block;
            *first = i;
        }
        if (maxima) maxima[i / BLOCK] = block;
    }
    for (int64_t i = 0; i < n; i++) nan |= x[i] != x[i];
    return nan ? NAN : top;
}

static int64_t argmax(const float *x, int64_t n) {
    int64_t i;
    float top = largest(x, n, NULL, &i);
    if (!isfinite(top)) return -1;
    while (x[i] != top) i++;
    return i;
}

/* Sum of w in a fixed order: CEC_LANES running sums, added up in lane order. */
static double total(const float *w, int64_t n) {
    double sum[CEC_LANES] = {0};
    int64_t i = 0;
    for (; i + CEC_LANES <= n; i += CEC_LANES)
        for (int j = 0; j < CEC_LANES; j++) sum[j] += w[i + j];
    for (int j = 0; i + j < n; j++) sum[j] += w[i + j];
    for (int j = 1; j < CEC_LANES; j++) sum[0] += sum[j];
    return sum[0];
}

/* Sum of exp(x - top), in blocks that total adds up. */
static double total_weight(const float *x, int64_t n, float top) {
    double sum = 0;
    for (int64_t i = 0; i < n; i += BLOCK) {
        float w[BLOCK];
        int count = n - i < BLOCK ? (int)(n - i) : BLOCK;
        for (int j = 0; j < count; j++) w[j] = cec_exp(x[i + j] - top);
        sum += total(w, count);
    }
    return sum;
}

/* w = exp((x - top) * scale) of each listed token. Fetched first, so that the second loop can be vectorised. */
static void weigh(const float *x, float top, float scale, const int32_t *ids, int64_t count, float *restrict w) {
    for (int64_t i = 0; i < count; i++) w[i] = x[ids[i]];
    for (int64_t i = 0; i < count; i++) w[i] = cec_exp((w[i] - top) * scale);
}

/* List the tokens no farther than `reach` from the largest, passing over blocks that are; returns how many. */
static int64_t list_within(const float *x, int64_t n, float top, float reach, const float *maxima, int32_t *ids) {
    int64_t count = 0;
    if (reach == INFINITY) {
        for (; count < n; count++) ids[count] = (int32_t)count;
        return count;
    }
    for (int64_t i = 0; i < n; i += BLOCK) {
        if (top - maxima[i / BLOCK] > reach) continue;
        int64_t end = i + BLOCK < n ? i + BLOCK : n;
        for (int64_t j = i; j < end; j++) {
            ids[count] = (int32_t)j;
            count += top - x[j] <= reach;
        }
    }
    return count;
}

/* Keep, of the listed tokens, those no farther than `reach`. */
static int64_t keep_within(const float *x, float top, float reach, int32_t *ids, int64_t count) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t id = ids[i];
        ids[kept] = id;
        kept += top - x[id] <= reach;
    }
    return kept;
}

/* Where to stop, in order of distance: at `bits` of a distance, with `before` measured nearer than that. */
typedef struct {
    uint32_t bits;
    double before;
} border;

/* Bits of the distance of the i-th of the listed tokens; of all values when ids is NULL. */
static inline uint32_t distance(const float *x, float top, const int32_t *ids, int64_t i) {
    return cec_f32_bits(top - x[ids ? ids[i] : i]);
}

/* The distance at which the measure of the nearest reaches `wanted` > 0. A token measures w, or 1 when w is NULL. */
static border find_border(const float *x, float top, const int32_t *ids, const float *w, int64_t count, double wanted) {
    border at = {0, 0};
    for (int level = 0; level < 3; level++) {
        double measure[BINS] = {0};
        uint32_t mask = (1u << WIDTH[level]) - 1, chosen = 0;
        for (int64_t i = 0; i < count; i++) {
            uint32_t bits = distance(x, top, ids, i);
            if (level == 0 || bits >> SHIFT[level - 1] == at.bits)
                measure[(bits >> SHIFT[level]) & mask] += w ? (double)w[i] : 1.0;
        }
        /* The first bin that reaches the target; when rounding leaves it just out of reach, the last filled one. */
        double reached = at.before;
        for (uint32_t bin = 0; bin <= mask; bin++)
            if (measure[bin] > 0) {
                chosen = bin;
                at.before = reached;
                reached += measure[bin];
                if (reached >= wanted) break;
            }
        at.bits = (at.bits << WIDTH[level]) | chosen;
    }
    return at;
}

/* Keep, of the listed tokens, the smallest set of nearest ones whose measure reaches `wanted`. */
static int64_t keep_nearest(const float *x, float top, int32_t *ids, float *w, int64_t count, double wanted) {
    border at = find_border(x, top, ids, w, count, wanted);
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = distance(x, top, ids, i);
        if (bits > at.bits || (bits == at.bits && at.before >= wanted)) continue;
        if (bits == at.bits) at.before += w ? (double)w[i] : 1.0;
        ids[kept++] = ids[i];
    }
    return kept;
}

/* The k nearest. There are k blocks no farther than the k-th nearest block, and so k tokens. */
static int64_t list_nearest(const float *x, int64_t n, float top, int64_t k, const float *maxima, int32_t *ids) {
    int64_t blocks = (n + BLOCK - 1) / BLOCK;
    float reach = INFINITY;
    if (k <= blocks) reach = cec_bits_f32(find_border(maxima, top, NULL, NULL, blocks, (double)k).bits);
    int64_t count = list_within(x, n, top, reach, maxima, ids);
    return keep_nearest(x, top, ids, NULL, count, (double)k);
}

/* The distance beyond which no token can be among those that top_p keeps. Tokens lighter than (1 - top_p) * mass / n
 * together weigh less than what top_p leaves out, so none is kept; the half allows for rounding. With that weight at
 * least 2^e, what is farther than -e ln2 is lighter. */
static float reach_of_top_p(double top_p, double mass, int64_t n) {
    float least = (float)(0.5 * (1 - top_p) * mass / (double)n);
    int exponent = (int)(cec_f32_bits(least) >> 23) - 127;
    return -(float)exponent * 0x1.62e430p-1f;
}

static int64_t keep(const float *x, int64_t n, int64_t top_k, double top_p, double reach, double temperature,
                    int32_t *ids, float *w) {
    float *maxima = w; /* until the weights are known */
    int64_t first;
    float top = largest(x, n, maxima, &first);
    if (!isfinite(top)) return -1;
    int64_t count;
    if (top_k > 0 && top_k < n) {
        count = list_nearest(x, n, top, top_k, maxima, ids);
    } else if (top_p < 1) {
        double mass = total_weight(x, n, top);
        count = list_within(x, n, top, reach_of_top_p(top_p, mass, n), maxima, ids);
        weigh(x, top, 1, ids, count, w);
        count = keep_nearest(x, top, ids, w, count, top_p * mass);
        top_p = 1;
    } else {
        count = list_within(x, n, top, (float)reach, maxima, ids);
    }
    if (top_p < 1) {
        weigh(x, top, 1, ids, count, w);
        count = keep_nearest(x, top, ids, w, count, top_p * total(w, count));
    }
    count = keep_within(x, top, (float)reach, ids, count);
    /* A temperature too small for a float keeps only logits equal to the largest: 0 * FLT_MAX is 0, not NaN. */
    double inverse = 1.0 / temperature;
    weigh(x, top, inverse < FLT_MAX ? (float)inverse : FLT_MAX, ids, count, w);
    return count;
}

static int64_t draw(const float *w, int64_t n, double u) {
    double target = u * total(w, n), sum = 0, block;
    int64_t i = 0;
    for (; i + BLOCK < n && sum + (block = total(w + i, BLOCK)) <= target; i += BLOCK) sum += block;
    for (; i < n; i++) {
        sum += w[i];
        if (sum > target) return i;
    }
    while (n > 1 && w[n - 1] == 0) n--; /* sums differ by rounding, and u was next to 1 */
    return n - 1;
}

const cec_sampling_ops cec_scalar_sampling = {argmax, keep, draw};
