/* SPDX-License-Identifier: Apache-2.0
 *
 * Delta attention: head widths of the checkpoints, one token and several, and gates far outside their range. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "check.h"

enum { TOKENS = 5 };

static float *random_floats(random_source *r, int64_t n, float scale) {
    float *x = room(n * 4);
    fill_floats(r, x, n, scale);
    return x;
}

static float *copy(const float *x, int64_t n) { return memcpy(room(n * 4), x, (size_t)n * 4); }

static void recur_case(suite *s, random_source *r, int64_t K, int64_t T) {
    char name[64];
    cec_delta_token tokens[TOKENS];
    float *state = random_floats(r, K * 16, 2), *v = random_floats(r, T * K, 1);
    for (int64_t t = 0; t < T; t++) {
        float *decay = random_floats(r, K, 0.5f);
        for (int64_t k = 0; k < K; k++) decay[k] += 0.5f; /* 0 to 1 */
        tokens[t] = (cec_delta_token){random_floats(r, K, 0.3f), random_floats(r, K, 0.3f), decay, 0.75f, next_float(r)};
    }
    float *want_state = copy(state, K * 16), *got_state = copy(state, K * 16);
    float *want = room(T * 16 * 4), *got = room(T * 16 * 4);
    s->scalar->delta->recur(want_state, K, tokens, T, v, K, want, 16);
    s->tested->delta->recur(got_state, K, tokens, T, v, K, got, 16);
    snprintf(name, sizeof name, "delta recur K=%d T=%d", (int)K, (int)T);
    same_floats(s, name, want, got, T * 16);
    snprintf(name, sizeof name, "delta state K=%d T=%d", (int)K, (int)T);
    same_floats(s, name, want_state, got_state, K * 16);
}

static void conv_case(suite *s, random_source *r, int64_t n) {
    char name[64];
    const float *rows[4], *taps = random_floats(r, 4 * (n + 16), 1);
    for (int i = 0; i < 4; i++) rows[i] = random_floats(r, n, 3);
    float *want = room(n * 4), *got = room(n * 4);
    s->scalar->delta->conv(rows, taps, n + 16, n, want);
    s->tested->delta->conv(rows, taps, n + 16, n, got);
    snprintf(name, sizeof name, "delta conv n=%d", (int)n);
    same_floats(s, name, want, got, n);
}

static void unit_case(suite *s, random_source *r, int64_t n, float scale) {
    char name[64];
    float *x = random_floats(r, n, scale), *want = copy(x, n), *got = copy(x, n);
    s->scalar->delta->unit(want, n, 0.25f);
    s->tested->delta->unit(got, n, 0.25f);
    snprintf(name, sizeof name, "delta unit n=%d scale=%g", (int)n, (double)scale);
    same_floats(s, name, want, got, n);
    const float one = s->scalar->delta->dot(x, want, n), other = s->tested->delta->dot(x, want, n);
    snprintf(name, sizeof name, "delta dot n=%d scale=%g", (int)n, (double)scale);
    same_floats(s, name, &one, &other, 1);
}

static void gates_case(suite *s, random_source *r, int64_t n, float scale) {
    char name[64];
    float *f = random_floats(r, n, scale), *bias = random_floats(r, n, 1), *w = random_floats(r, n, 1);
    float *want = room(n * 4), *got = room(n * 4);
    s->scalar->delta->decay(f, bias, 2.5f, -5, n, want);
    s->tested->delta->decay(f, bias, 2.5f, -5, n, got);
    snprintf(name, sizeof name, "delta decay n=%d scale=%g", (int)n, (double)scale);
    same_floats(s, name, want, got, n);
    s->scalar->delta->output(bias, w, 1e-6f, f, n, want);
    s->tested->delta->output(bias, w, 1e-6f, f, n, got);
    snprintf(name, sizeof name, "delta output n=%d scale=%g", (int)n, (double)scale);
    same_floats(s, name, want, got, n);
}

void delta_cases(suite *s) {
    static const int WIDTHS[] = {16, 48, 128, 256};
    random_source r = {7};
    for (size_t i = 0; i < sizeof WIDTHS / sizeof *WIDTHS; i++) {
        recur_case(s, &r, WIDTHS[i], 1);
        recur_case(s, &r, WIDTHS[i], TOKENS);
        conv_case(s, &r, WIDTHS[i]);
        unit_case(s, &r, WIDTHS[i], 1);
        unit_case(s, &r, WIDTHS[i], 0);
        unit_case(s, &r, WIDTHS[i], 1e25f);
        gates_case(s, &r, WIDTHS[i], 4);
        gates_case(s, &r, WIDTHS[i], 1e30f);
        forget_rooms();
    }
}
