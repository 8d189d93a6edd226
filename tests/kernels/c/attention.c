/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention kernels: every recipe, numbers of rows around the groups that share a load, pages filled in part with
 * rubbish behind the last position, rows of zeros, and rows without any position. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "check.h"

static const char *const RECIPE[] = {"f32", "bf16", "int8"};

/* A page of one KV head: its first 64 keys and values [64][D] and the parts they are stored in. */
typedef struct {
    float *keys, *values;
    void *kpart, *vpart;
    int64_t bytes;
} page;

static page make_page(const cec_table *table, int kv, int64_t D, float *keys, float *values) {
    page p = {keys, values, NULL, NULL, cec_kv_part_bytes(kv, D)};
    p.kpart = room(p.bytes);
    p.vpart = room(p.bytes);
    for (int slot = 0; slot < CEC_PAGE; slot++) {
        table->attention->store_k[kv](keys + slot * D, D, p.kpart, slot);
        table->attention->store_v[kv](values + slot * D, D, p.vpart, slot);
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
    same_bytes(s, name, want.kpart, got.kpart, want.bytes);
    snprintf(name, sizeof name, "store values %s D=%d", RECIPE[kv], (int)D);
    same_bytes(s, name, want.vpart, got.vpart, want.bytes);
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

/* What float rows may differ by: each score is a sum of D products in two ways, weights follow the scores, and the
 * results are sums of up to 64 weights. */
static partial bounds(const float *q, const page *p, int64_t n, int64_t D, const int32_t *valid, const partial *want) {
    partial b = partial_rooms(n, D);
    for (int64_t r = 0; r < n; r++) {
        double score = 0, value = 0;
        for (int slot = 0; slot < valid[r]; slot++) {
            double size = 0;
            for (int64_t d = 0; d < D; d++) {
                size += fabs((double)q[r * D + d] * (double)p->keys[slot * D + d]);
                value = fmax(value, fabs((double)p->values[slot * D + d]));
            }
            score = fmax(score, size);
        }
        score *= 1.01 * (double)D * 0x1p-23; /* 1.01: bf16 rounds the factors */
        const double share = expm1(2 * score) + 100 * 0x1p-23;
        b.m[r] = (float)score;
        b.l[r] = (float)(share * (double)want->l[r]);
        for (int64_t d = 0; d < D; d++) b.o[r * D + d] = (float)(share * (double)want->l[r] * 1.01 * value);
    }
    return b;
}

/* Rubbish in the slots no row counts. */
static void spoil(const cec_table *table, int kv, int64_t D, const page *p, int from) {
    float *x = room(D * 4);
    for (int64_t d = 0; d < D; d++) x[d] = d % 3 ? NAN : INFINITY;
    for (int slot = from; slot < CEC_PAGE; slot++) {
        table->attention->store_k[kv](x, D, p->kpart, slot);
        table->attention->store_v[kv](x, D, p->vpart, slot);
    }
    if (kv == CEC_KV_INT8)
        for (int slot = from; slot < CEC_PAGE; slot++)
            memset((int8_t *)p->vpart + slot / 4 * 4 * D + slot % 4, 0x80, 1);
}

static void partial_case(suite *s, random_source *r, int kv, int64_t D, int64_t n, int most) {
    static const char *const PART[] = {"m", "l", "o"};
    const cec_attention_ops *scalar = s->scalar->attention, *tested = s->tested->attention;
    float *keys = make_rows(r, CEC_PAGE, D, 3), *values = make_rows(r, CEC_PAGE, D, 2);
    float *q = make_rows(r, n, D, 1), *qd = room(n * 4);
    int8_t *qi = room(n * D);
    int32_t *valid = room(n * 4);
    const page p = make_page(s->scalar, kv, D, keys, values);
    for (int64_t i = 0; i < n; i++) {
        valid[i] = i == 0 ? most : next_below(r, 3) ? next_below(r, most + 1) : most;
        qd[i] = scalar->quantize_query(q + i * D, D, qi + i * D);
    }
    spoil(s->scalar, kv, D, &p, most);
    const partial want = partial_rooms(n, D), got = partial_rooms(n, D);
    scalar->partial[kv](q, qi, qd, n, p.kpart, p.vpart, D, D, valid, want.m, want.l, want.o);
    tested->partial[kv](q, qi, qd, n, p.kpart, p.vpart, D, D, valid, got.m, got.l, got.o);
    const partial bound = bounds(q, &p, n, D, valid, &want);
    const float *all[][3] = {{want.m, got.m, bound.m}, {want.l, got.l, bound.l}, {want.o, got.o, bound.o}};
    for (int part = 0; part < 3; part++) {
        char name[64];
        const int64_t count = part == 2 ? n * D : n;
        snprintf(name, sizeof name, "partial %s D=%d rows=%d most=%d: %s", RECIPE[kv], (int)D, (int)n, most, PART[part]);
        if (kv == CEC_KV_INT8)
            same_floats(s, name, all[part][0], all[part][1], count);
        else
            near_floats(s, name, all[part][0], all[part][1], all[part][2], count);
    }
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
            for (int n = 1; n <= 13; n += n < 7 ? 1 : 6) partial_case(s, &r, kv, HEADS[i], n, MOST[(n + i) % 7]);
        }
    }
}
