/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention kernels: every recipe, numbers of rows around the groups that share a load, pages filled in part with
 * rubbish behind the last position, rows of zeros, and rows without any position. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "check.h"

static const char *const RECIPE[] = {"f32", "bf16", "int8"};

/* A page of one KV head: its 64 keys [64][K] and values [64][V], rows ldv apart, and the parts they are stored in. */
typedef struct {
    float *keys, *values;
    int64_t K, V, ldv;
    cec_head_page parts;
} page;

enum { TURNING = 16 }; /* width of the part of a latent key that is no value */

static void *key_part(const cec_table *table, int kv, const float *x, int64_t stride, int64_t D) {
    void *part = room(cec_kv_part_bytes(kv, D));
    for (int slot = 0; slot < CEC_PAGE; slot++) table->attention->store_k[kv](x + slot * stride, D, part, slot);
    return part;
}

static void *value_part(const cec_table *table, int kv, const float *x, int64_t stride, int64_t D) {
    void *part = room(cec_kv_part_bytes(kv, D));
    for (int slot = 0; slot < CEC_PAGE; slot++) table->attention->store_v[kv](x + slot * stride, D, part, slot);
    return part;
}

static page make_page(const cec_table *table, int kv, int64_t D, float *keys, float *values) {
    page p = {keys, values, D, D, D, {.keys = 1, .values = 1}};
    p.parts.key[0] = (cec_part){key_part(table, kv, keys, D, D), D};
    p.parts.value[0] = (cec_part){value_part(table, kv, values, D, D), D};
    return p;
}

/* Keys of `parts` parts of D and one more; the values are the first parts, turned by the table. keys [64][K]. */
static page make_latent_page(const cec_table *table, int kv, int64_t D, int parts, float *keys) {
    const int64_t K = parts * D + TURNING;
    page p = {keys, keys, K, parts * D, K, {.keys = parts + 1, .values = parts}};
    for (int i = 0; i <= parts; i++) {
        const int64_t width = i < parts ? D : TURNING;
        p.parts.key[i] = (cec_part){key_part(table, kv, keys + i * D, K, width), width};
        if (i < parts) {
            void *turned = room(cec_kv_part_bytes(kv, D));
            table->attention->turn[kv](p.parts.key[i].data, D, turned);
            p.parts.value[i] = (cec_part){turned, D};
        }
    }
    return p;
}

static float *make_rows(random_source *r, int64_t rows, int64_t D, float scale) {
    float *x = room(rows * D * 4);
    fill_floats(r, x, rows * D, scale);
    memset(x + rows / 2 * D, 0, (size_t)D * 4);
    return x;
}

static void store_case(suite *s, random_source *r, int kv, int64_t D) {
    char name[64];
    float *keys = make_rows(r, CEC_PAGE, D, 4), *values = make_rows(r, CEC_PAGE, D, 1e-39f);
    const page want = make_page(s->scalar, kv, D, keys, values), got = make_page(s->tested, kv, D, keys, values);
    snprintf(name, sizeof name, "store keys %s D=%d", RECIPE[kv], (int)D);
    same_bytes(s, name, want.parts.key[0].data, got.parts.key[0].data, cec_kv_part_bytes(kv, D));
    snprintf(name, sizeof name, "store values %s D=%d", RECIPE[kv], (int)D);
    same_bytes(s, name, want.parts.value[0].data, got.parts.value[0].data, cec_kv_part_bytes(kv, D));
    forget_rooms();
}

/* Turned keys are what storing the same rows as values gives. */
static void turn_case(suite *s, random_source *r, int kv, int64_t D) {
    char name[64];
    float *keys = make_rows(r, CEC_PAGE, D, 4);
    void *turned = room(cec_kv_part_bytes(kv, D));
    s->tested->attention->turn[kv](key_part(s->scalar, kv, keys, D, D), D, turned);
    snprintf(name, sizeof name, "turn %s D=%d", RECIPE[kv], (int)D);
    same_bytes(s, name, value_part(s->scalar, kv, keys, D, D), turned, cec_kv_part_bytes(kv, D));
    forget_rooms();
}

static void query_case(suite *s, random_source *r, int64_t D) {
    char name[64];
    float *x = make_rows(r, 4, D, 5), scale[2][4];
    int8_t *q[2] = {room(4 * D), room(4 * D)};
    x[3 * D + 1] = NAN;
    for (int i = 0; i < 4; i++) {
        scale[0][i] = s->scalar->attention->quantize_query(x + i * D, D, q[0] + i * D);
        scale[1][i] = s->tested->attention->quantize_query(x + i * D, D, q[1] + i * D);
    }
    snprintf(name, sizeof name, "query D=%d", (int)D);
    same_bytes(s, name, q[0], q[1], 4 * D);
    same_floats(s, name, scale[0], scale[1], 4);
    forget_rooms();
}

/* ---- a page under many rows ---- */

typedef struct {
    float *m, *l, *o; /* [n], [n], [n][D] */
} partial;

static partial partial_rooms(int64_t n, int64_t D) { return (partial){room(n * 4), room(n * 4), room(n * D * 4)}; }

/* Not fmax: gcc 12 for aarch64 breaks down on a loop around it. */
static double larger(double a, double b) { return a > b ? a : b; }

/* What float rows may differ by: each score is a sum of D products in two ways, weights follow the scores, and the
 * results are sums of up to 64 weights. */
static partial bounds(const float *q, const page *p, int64_t n, const int32_t *valid, const partial *want) {
    const int64_t K = p->K, V = p->V;
    partial b = partial_rooms(n, V);
    for (int64_t r = 0; r < n; r++) {
        double score = 0, value = 0;
        for (int slot = 0; slot < valid[r]; slot++) {
            double size = 0;
            for (int64_t d = 0; d < K; d++) size += fabs((double)q[r * K + d] * (double)p->keys[slot * K + d]);
            for (int64_t d = 0; d < V; d++) value = larger(value, fabs((double)p->values[slot * p->ldv + d]));
            score = fmax(score, size);
        }
        score *= 1.01 * (double)K * 0x1p-23; /* 1.01: bf16 rounds the factors */
        const double share = expm1(2 * score) + 100 * 0x1p-23;
        b.m[r] = (float)score;
        b.l[r] = (float)(share * (double)want->l[r]);
        for (int64_t d = 0; d < V; d++) b.o[r * V + d] = (float)(share * (double)want->l[r] * 1.01 * value);
    }
    return b;
}

/* Rows of rubbish [64][D] behind the first `from` that stand in x. */
static void spoil(float *x, int64_t D, int from) {
    for (int64_t i = from * D; i < CEC_PAGE * D; i++) x[i] = i % 3 ? NAN : INFINITY;
}

/* Queries [n][K] as the kernels take them: part by part, quantised too. */
typedef struct {
    float *f, *scales;
    int8_t *q;
} queries;

static queries pack_queries(const cec_table *table, page *p, const float *q, int64_t n) {
    queries packed = {room(n * p->K * 4), room(p->parts.keys * n * 4), room(n * p->K)};
    int64_t at = 0;
    p->parts.rows = n;
    for (int i = 0; i < p->parts.keys; i++) {
        const int64_t D = p->parts.key[i].width;
        for (int64_t r = 0; r < n; r++) {
            float *to = packed.f + n * at + r * D;
            memcpy(to, q + r * p->K + at, (size_t)D * 4);
            packed.scales[i * n + r] = table->attention->quantize_query(to, D, packed.q + n * at + r * D);
        }
        at += D;
    }
    return packed;
}

/* All rows over a page, from the second on where there is one: rows need not start with the call's first. */
static void partial_case(suite *s, random_source *r, int kv, page *p, const char *kind, int64_t n, int most) {
    static const char *const PART[] = {"m", "l", "o"};
    const int64_t K = p->K, V = p->V, first = n > 1, count = n - first;
    const float *q = make_rows(r, n, K, 1);
    const queries packed = pack_queries(s->scalar, p, q, n);
    int32_t *valid = room(n * 4);
    for (int64_t i = 0; i < n; i++) valid[i] = i > 1 && next_below(r, 3) ? next_below(r, most + 1) : most;
    const partial want = partial_rooms(n, V), got = partial_rooms(n, V);
    s->scalar->attention->partial[kv](&p->parts, packed.f, packed.q, packed.scales, first, count, valid + first, want.m,
                                      want.l, want.o);
    s->tested->attention->partial[kv](&p->parts, packed.f, packed.q, packed.scales, first, count, valid + first, got.m,
                                      got.l, got.o);
    const partial bound = bounds(q + first * K, p, count, valid + first, &want);
    const float *all[][3] = {{want.m, got.m, bound.m}, {want.l, got.l, bound.l}, {want.o, got.o, bound.o}};
    for (int part = 0; part < 3; part++) {
        char name[80];
        const int64_t size = part == 2 ? count * V : count;
        snprintf(name, sizeof name, "partial %s %s K=%d rows=%d most=%d: %s", kind, RECIPE[kv], (int)K, (int)n, most,
                 PART[part]);
        if (kv == CEC_KV_INT8)
            same_floats(s, name, all[part][0], all[part][1], size);
        else
            near_floats(s, name, all[part][0], all[part][1], all[part][2], size);
    }
}

/* Keys and values of their own. The unused slots of int8 values hold -128 too, which no row is ever stored as. */
static void heads_case(suite *s, random_source *r, int kv, int64_t D, int64_t n, int most) {
    float *keys = make_rows(r, CEC_PAGE, D, 3), *values = make_rows(r, CEC_PAGE, D, 2);
    spoil(keys, D, most);
    spoil(values, D, most);
    page p = make_page(s->scalar, kv, D, keys, values);
    if (kv == CEC_KV_INT8)
        for (int slot = most; slot < CEC_PAGE; slot++)
            memset((int8_t *)p.parts.value[0].data + slot / 4 * 4 * D + slot % 4, 0x80, 1);
    partial_case(s, r, kv, &p, "heads", n, most);
    forget_rooms();
}

static void latent_case(suite *s, random_source *r, int kv, int64_t D, int parts, int64_t n, int most) {
    float *keys = make_rows(r, CEC_PAGE, parts * D + TURNING, 2);
    spoil(keys, parts * D + TURNING, most);
    page p = make_latent_page(s->scalar, kv, D, parts, keys);
    partial_case(s, r, kv, &p, "latent", n, most);
    forget_rooms();
}

/* Four pages into one running result, the second without any position. */
static void merge_case(suite *s, random_source *r, int64_t D) {
    char name[64];
    float *o = make_rows(r, 4, D, 9), *total[2] = {room(D * 4), room(D * 4)};
    float run[2][2] = {{-INFINITY, 0}, {-INFINITY, 0}};
    for (int i = 0; i < 2; i++) memset(total[i], 0, (size_t)D * 4);
    for (int step = 0; step < 4; step++) {
        const float m = step == 1 ? -INFINITY : next_float(r) * 30, l = step == 1 ? 0 : 1 + next_float(r);
        for (int i = 0; i < 2; i++)
            (i ? s->tested : s->scalar)->attention->merge(&run[i][0], &run[i][1], total[i], m, l, o + step * D, D);
    }
    snprintf(name, sizeof name, "merge D=%d", (int)D);
    same_floats(s, name, run[0], run[1], 2);
    same_floats(s, name, total[0], total[1], D);
    forget_rooms();
}

void attention_cases(suite *s) {
    static const int HEADS[] = {16, 64, 80, 256}, MOST[] = {0, 1, 6, 17, 33, 63, 64};
    random_source r = {2};
    for (int i = 0; i < 4; i++) {
        query_case(s, &r, HEADS[i]);
        merge_case(s, &r, HEADS[i]);
        for (int kv = 0; kv < CEC_KV_FORMATS; kv++) {
            store_case(s, &r, kv, HEADS[i]);
            turn_case(s, &r, kv, HEADS[i]);
            for (int n = 1; n <= 13; n += n < 7 ? 1 : 6) {
                heads_case(s, &r, kv, HEADS[i], n, MOST[(n + i) % 7]);
                latent_case(s, &r, kv, HEADS[i], 1 + (n + i) % 4, n, MOST[(n + i) % 7]);
            }
        }
    }
}
