/* SPDX-License-Identifier: Apache-2.0
 *
 * Pointwise kernels: lengths around the 16 lanes, in place, and values that overflow, vanish or are none. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "check.h"

static const float AWKWARD[] = {0, -0.0f, 1e-45f, 1e-38f, 87.8f, -87.8f, 89, -89, 3e38f, INFINITY, -INFINITY, NAN};
enum { AWKWARDS = sizeof AWKWARD / sizeof *AWKWARD };

static float *copy(const float *x, int64_t n) { return memcpy(room(n * 4), x, (size_t)n * 4); }

static void rmsnorm_case(suite *s, random_source *r, int64_t n, float scale) {
    char name[64];
    float *x = room(n * 4), *w = room(n * 4);
    fill_floats(r, x, n, scale);
    fill_floats(r, w, n, 2);
    float *want = copy(x, n), *got = copy(x, n);
    s->scalar->pointwise->rmsnorm(want, w, 1e-5f, n, want);
    s->tested->pointwise->rmsnorm(got, w, 1e-5f, n, got);
    snprintf(name, sizeof name, "rmsnorm n=%d scale=%g", (int)n, (double)scale);
    same_floats(s, name, want, got, n);
}

static void swiglu_case(suite *s, random_source *r, int64_t n, int awkward) {
    char name[64];
    float *g = room(n * 4), *u = room(n * 4);
    fill_floats(r, g, n, 20);
    fill_floats(r, u, n, 5);
    if (awkward)
        for (int64_t i = 0; i < n; i++) g[i] = AWKWARD[i % AWKWARDS];
    float *want = copy(g, n), *got = copy(g, n);
    s->scalar->pointwise->swiglu(want, u, n, want);
    s->tested->pointwise->swiglu(got, u, n, got);
    snprintf(name, sizeof name, "swiglu n=%d%s", (int)n, awkward ? " awkward" : "");
    same_floats(s, name, want, got, n);
}

static void sigmoid_case(suite *s, random_source *r, int64_t n) {
    char name[64];
    float *x = room(n * 4);
    fill_floats(r, x, n, 20);
    for (int64_t i = 0; i < n; i += 3) x[i] = AWKWARD[i % AWKWARDS];
    float *want = copy(x, n), *got = copy(x, n);
    s->scalar->pointwise->sigmoid(want, n, want);
    s->tested->pointwise->sigmoid(got, n, got);
    snprintf(name, sizeof name, "sigmoid n=%d", (int)n);
    same_floats(s, name, want, got, n);
}

static void rope_case(suite *s, random_source *r, int64_t half) {
    char name[64];
    float *x = room(half * 8), *c = room(half * 4), *sine = room(half * 4);
    fill_floats(r, x, 2 * half, 3);
    fill_floats(r, c, half, 1);
    fill_floats(r, sine, half, 1);
    float *want = copy(x, 2 * half), *got = copy(x, 2 * half);
    s->scalar->pointwise->rope(want, c, sine, half);
    s->tested->pointwise->rope(got, c, sine, half);
    snprintf(name, sizeof name, "rope half=%d", (int)half);
    same_floats(s, name, want, got, 2 * half);
    s->scalar->pointwise->rope_pairs(want, c, sine, half);
    s->tested->pointwise->rope_pairs(got, c, sine, half);
    snprintf(name, sizeof name, "rope of pairs half=%d", (int)half);
    same_floats(s, name, want, got, 2 * half);
}

void pointwise_cases(suite *s) {
    static const int LENGTHS[] = {1, 3, 15, 16, 17, 31, 33, 64, 576, 1537};
    random_source r = {3};
    for (size_t i = 0; i < sizeof LENGTHS / sizeof *LENGTHS; i++) {
        rmsnorm_case(s, &r, LENGTHS[i], 1);
        rmsnorm_case(s, &r, LENGTHS[i], 0);
        rmsnorm_case(s, &r, LENGTHS[i], 1e30f);
        swiglu_case(s, &r, LENGTHS[i], 0);
        swiglu_case(s, &r, LENGTHS[i], 1);
        sigmoid_case(s, &r, LENGTHS[i]);
        rope_case(s, &r, LENGTHS[i]);
        forget_rooms();
    }
}
