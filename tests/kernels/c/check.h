/* SPDX-License-Identifier: Apache-2.0
 *
 * What the cases of the runner share: reproducible data, rooms to work in, and comparing with the reference. Data is
 * made from integers and exact conversions, so it is the same on every machine. */
#ifndef CECILIA_CHECK_H
#define CECILIA_CHECK_H

#include <stddef.h>

#include "table.h"

typedef struct {
    const cec_table *scalar, *tested;
    int cases, failures;
} suite;

/* ---- data ---- */

typedef struct {
    uint64_t state;
} random_source;

uint64_t next_bits(random_source *r);
int next_below(random_source *r, int n);
float next_float(random_source *r); /* -1 <= x < 1, mostly far from both */
void fill_floats(random_source *r, float *x, int64_t n, float scale);
void fill_bytes(random_source *r, void *to, int64_t n);

/* n bytes on a 64-byte boundary, all 0xa5, valid until the next forget_rooms. */
void *room(int64_t bytes);
void forget_rooms(void);

/* ---- verdicts: one line each, with a digest of what the reference returned ---- */

/* Equal bytes. */
void same_bytes(suite *s, const char *name, const void *want, const void *got, int64_t bytes);

/* Equal floats. Any NaN equals any NaN: which payload comes out is the machine's business. */
void same_floats(suite *s, const char *name, const float *want, const float *got, int64_t n);

/* |want - got| <= bound, element by element. */
void near_floats(suite *s, const char *name, const float *want, const float *got, const float *bound, int64_t n);

void linear_cases(suite *s);
void attention_cases(suite *s);
void pointwise_cases(suite *s);
void delta_cases(suite *s);

#endif
