/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernel table: every compute routine of Cecilia behind function pointers, one table per instruction set.
 * The scalar files are the reference. Letters: T tokens, K columns of a weight, D head width, n elements.
 * Pointers marked [a] are 64-byte aligned. Nothing allocates, fails or touches errno; arguments were checked
 * when operands were bound. */
#ifndef CECILIA_TABLE_H
#define CECILIA_TABLE_H

#include "blocks.h"

/* Activations of T tokens, K wide. A kernel for quantised weights reads q, d, s, c; one for float weights reads f. */
typedef struct {
    const float *f;   /* [T][K] */
    const int8_t *q;  /* [T][K], -127..127; x ~ d * q */
    const float *d;   /* [T][K/32] scale of each block */
    const float *s;   /* [T][K/32] d * sum(q): what a constant offset of the weights is multiplied by */
    const int32_t *c; /* [T][K/32] -8 * sum(q): turns unsigned quants into signed ones inside the integer sum */
    int64_t K;
} cec_acts;

typedef struct {
    /* Quantise one row: per 32-block d = max|x| / 127, q = round-half-even(x * (127 / max|x|)) clamped to +-127.
     * n % 32 == 0. A block with max|x| < 1e-30 has d = 0. A NaN or an infinity makes d one. */
    void (*quantize)(const float *x, int64_t n, int8_t *q, float *d, float *s, int32_t *c);

    /* y[t * ldy + r] (= or +=, by `add`) sum over k of W[r][k] * x[t][k] for the first `rows` rows (1..16) of one
     * tile and tokens t0 <= t < t1. Integer formats: per 32-block an exact int32 sum, turned into float and
     * accumulated as acc = fma(d_w * d_x, sum, acc) in K order (q4a: a second accumulator, fma(m, s, minima), added
     * last): one fused step a block on every instruction set, so that all return the same bytes. Float formats: four
     * sums by k % 4, each in K order, with fused multiply-add where the instruction set has it.
     * w [a]: the tile. scratch [a]: cec_tile_scratch(K) bytes owned by the calling thread. */
    void (*tile[CEC_FORMATS])(const void *w, const cec_acts *x, int64_t t0, int64_t t1, int rows, float *y,
                              int64_t ldy, int add, void *scratch);

    /* out[k] = value of row r of a tile, exactly as dequantised: d * q, d * (q - 8), d * q + m (f32 arithmetic). */
    void (*gather[CEC_FORMATS])(const void *w, int r, int64_t K, float *out);
} cec_linear_ops;

/* Bytes of per-thread scratch for a tile: its quants as bytes, its scales and minima as f32. */
static inline int64_t cec_tile_scratch(int64_t K) {
    return cec_round_up(K, CEC_BLOCK) * CEC_TILE + 2 * (K / CEC_BLOCK + 1) * CEC_TILE * 4 + 4096;
}

typedef struct {
    /* y[i] = x[i] / sqrt(mean(x^2) + eps) * w[i]; y may be x. */
    void (*rmsnorm)(const float *x, const float *w, float eps, int64_t n, float *y);
    /* y[i] = silu(g[i]) * u[i]; y may be g or u. */
    void (*swiglu)(const float *g, const float *u, int64_t n, float *y);
    /* y[i] = 1 / (1 + exp(-x[i])); y may be x. */
    void (*sigmoid)(const float *x, int64_t n, float *y);
    /* Rotate pairs (x[i], x[i + half]) by the angle whose cos[i], sin[i] are given, in place; half = D / 2. */
    void (*rope)(float *x, const float *cos, const float *sin, int64_t half);
    /* The same of the pairs (x[2 i], x[2 i + 1]). */
    void (*rope_pairs)(float *x, const float *cos, const float *sin, int64_t half);
} cec_pointwise_ops;

enum {
    CEC_HEAD_MAX = 256, /* the widest part, D, of a head's keys or values */
    CEC_PARTS_MAX = 17  /* the most parts they have */
};

/* Some dimensions of a KV head in one page: 64 keys or values, D wide, as cec_kv_part_bytes in blocks.h has them. */
typedef struct {
    const void *data;
    int64_t width;
} cec_part;

/* A page as one KV head sees it. Parts lie side by side: a key is as wide as all its parts, a value too; in int8 each
 * part of a row has its own scale. A call's queries, `rows`, come part by part: those of part i
 * are [rows][width], behind those of the parts before it; their scales are [parts][rows]. */
typedef struct {
    int keys, values; /* how many parts */
    cec_part key[CEC_PARTS_MAX], value[CEC_PARTS_MAX];
    int64_t rows;
} cec_head_page;

/* Attention: a query row is one head of one token. Rows of one KV head are contiguous, row = t * G + g, G query
 * heads sharing the KV head. */
typedef struct {
    /* Write key (value) x [D] at slot 0..63 of a page part. int8: scale = max|x| / 127, round half even. */
    void (*store_k[CEC_KV_FORMATS])(const float *x, int64_t D, void *part, int slot);
    void (*store_v[CEC_KV_FORMATS])(const float *x, int64_t D, void *part, int slot);

    /* Write the keys of a part as values: the same numbers in the other layout. Both [a]. */
    void (*turn[CEC_KV_FORMATS])(const void *kpart, int64_t D, void *vpart);

    /* Quantise one query row for the int8 recipe: q [D] int8, returns its scale (max|x| / 127, 0 for zeros). */
    float (*quantize_query)(const float *x, int64_t D, int8_t *q);

    /* Partial softmax-attention of n query rows, from `row` on, over one page: for row r the first valid[r] (0..64)
     * positions count.
     *   s[p] = q[r] . K[p];  m[r] = max s;  e[p] = exp(s[p] - m[r]);  l[r] = sum e;  o[r][V] = sum e[p] * V[p]
     * Rows with valid 0: m = -inf, l = 0, o = 0. qf f32 already scaled; for int8 qi and its scales qd.
     * int8: s and o from exact int32 sums of each part; s adds the parts in order; e * v_scale is rounded to 14 bits of
     * the page's largest, as two 7-bit halves. */
    void (*partial[CEC_KV_FORMATS])(const cec_head_page *page, const float *qf, const int8_t *qi, const float *qd,
                                    int64_t row, int64_t n, const int32_t *valid, float *m, float *l, float *o);

    /* Merge a partial into a running (M, L, O[D]); start from M = -inf, L = 0, O = 0; pages in position order. */
    void (*merge)(float *M, float *L, float *O, float m, float l, const float *o, int64_t D);
} cec_attention_ops;

/* One token of one head as the recurrence sees it. */
typedef struct {
    const float *q, *k, *decay; /* [K] */
    float beta, kq;             /* kq: sum of k[i] * q[i] */
} cec_delta_token;

/* Kimi Delta Attention of one head, K wide; K % 16 == 0. */
typedef struct {
    /* Sum of x[i] * y[i]; n % 16 == 0. */
    float (*dot)(const float *x, const float *y, int64_t n);
    /* y[i] = silu(sum over w of taps[w * channels + i] * rows[w][i]), w 0..3, the oldest row first. */
    void (*conv)(const float *const *rows, const float *taps, int64_t channels, int64_t n, float *y);
    /* x *= scale / sqrt(sum of x^2 + 1e-6), n % 16 == 0. */
    void (*unit)(float *x, int64_t n, float scale);
    /* d[i] = exp(lowest * sigmoid(a * (f[i] + bias[i]))). */
    void (*decay)(const float *f, const float *bias, float a, float lowest, int64_t n, float *d);
    /* The recurrence on 16 columns of the state S, s [K][16], for T >= 1 tokens; v and o [T][16], rows ldv, ldo apart:
     *   S = diag(decay) S;  u = beta (v - S^T k);  S = S + k u^T;  o = S^T q, computed as (diag(decay) S)^T q + kq u. */
    void (*recur)(float *s, int64_t K, const cec_delta_token *tokens, int64_t T, const float *v, int64_t ldv, float *o,
                  int64_t ldo);
    /* y[i] = o[i] / sqrt(mean(o^2) + eps) * w[i] * sigmoid(z[i]); n % 16 == 0; y may be o. */
    void (*output)(const float *o, const float *w, float eps, const float *z, int64_t n, float *y);
} cec_delta_ops;

typedef struct {
    /* Index of the largest of n values, the lowest such index; -1 when any value is NaN or none is finite. */
    int64_t (*argmax)(const float *x, int64_t n);

    /* The tokens that top_k (0: all), then top_p (1: all), then `reach` (INFINITY: all) keep. Near means near to the
     * largest: top_k keeps the k nearest; top_p the nearest of what is left that make up this share of its
     * sum of exp(x - max x); reach those no farther than it (min_p, as a distance). Ties by lowest index, always at
     * least one. ids gets their indices in ascending order, w their weights exp((x - max x) / temperature)
     * (0 below exp(-87.7)); both have room for n. Returns how many, or -1 where argmax does.
     * 1 <= n < 2^31, top_k >= 0, 0 < top_p <= 1, reach >= 0, temperature > 0. */
    int64_t (*keep)(const float *x, int64_t n, int64_t top_k, double top_p, double reach, double temperature,
                    int32_t *ids, float *w);

    /* The place among n >= 1 weights at which their running sum (f64, in a fixed order) first exceeds u times the
     * whole; 0 <= u < 1. */
    int64_t (*draw)(const float *w, int64_t n, double u);
} cec_sampling_ops;

typedef struct {
    const char *name;
    int (*usable)(void); /* whether this CPU, under this kernel, can run it */
    const cec_linear_ops *linear;
    const cec_pointwise_ops *pointwise;
    const cec_attention_ops *attention;
    const cec_sampling_ops *sampling;
    const cec_delta_ops *delta;
} cec_table;

/* All tables of this build, best first, ended by NULL; the last one is scalar. */
extern const cec_table *const cec_tables[];

#endif
