/* SPDX-License-Identifier: Apache-2.0
 *
 * Data, rooms and verdicts: check.h. */
#include "check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "half.h"

enum { ARENA = 32 << 20 };

/* splitmix64 */
uint64_t next_bits(random_source *r) {
    uint64_t z = r->state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

int next_below(random_source *r, int n) { return (int)((next_bits(r) >> 32) % (uint64_t)n); }

float next_float(random_source *r) {
    int32_t sum = 0; /* of four 21-bit integers */
    for (int i = 0; i < 4; i++) sum += (int32_t)(next_bits(r) >> 43);
    return (float)(sum - (1 << 22)) * 0x1p-22f;
}

void fill_floats(random_source *r, float *x, int64_t n, float scale) {
    for (int64_t i = 0; i < n; i++) x[i] = next_float(r) * scale;
}

void fill_bytes(random_source *r, void *to, int64_t n) {
    for (int64_t i = 0; i < n; i++) ((uint8_t *)to)[i] = (uint8_t)(next_bits(r) >> 56);
}

static _Alignas(CEC_ALIGN) uint8_t arena[ARENA];
static int64_t used;

void *room(int64_t bytes) {
    uint8_t *start = arena + used;
    used += cec_round_up(bytes, CEC_ALIGN);
    if (used > ARENA) {
        fprintf(stderr, "the arena of %d bytes is too small\n", ARENA);
        exit(3);
    }
    memset(start, 0xa5, (size_t)(arena + used - start));
    return start;
}

void forget_rooms(void) { used = 0; }

static uint64_t fnv1a(uint64_t hash, uint32_t value) {
    for (int i = 0; i < 4; i++) hash = (hash ^ (value >> 8 * i & 255)) * 0x100000001b3;
    return hash;
}

static uint32_t canonical(float x) { return x != x ? 0x7fc00000 : cec_f32_bits(x); }

static uint64_t digest_floats(const float *x, int64_t n) {
    uint64_t hash = 0xcbf29ce484222325;
    for (int64_t i = 0; i < n; i++) hash = fnv1a(hash, canonical(x[i]));
    return hash;
}

/* `wrong` is the first element that differs, -1 for none. */
static void report(suite *s, const char *name, uint64_t digest, int64_t wrong) {
    s->cases++;
    s->failures += wrong >= 0;
    printf("%016llx %s: ", (unsigned long long)digest, name);
    if (wrong < 0)
        puts("ok");
    else
        printf("DIFFERS at %lld\n", (long long)wrong);
}

void same_bytes(suite *s, const char *name, const void *want, const void *got, int64_t bytes) {
    const uint8_t *a = want, *b = got;
    uint64_t hash = 0xcbf29ce484222325;
    int64_t wrong = -1;
    for (int64_t i = 0; i < bytes; i++) {
        hash = fnv1a(hash, a[i]);
        if (wrong < 0 && a[i] != b[i]) wrong = i;
    }
    report(s, name, hash, wrong);
}

void same_floats(suite *s, const char *name, const float *want, const float *got, int64_t n) {
    int64_t wrong = -1;
    for (int64_t i = 0; i < n && wrong < 0; i++)
        if (canonical(want[i]) != canonical(got[i])) wrong = i;
    report(s, name, digest_floats(want, n), wrong);
}

void near_floats(suite *s, const char *name, const float *want, const float *got, const float *bound, int64_t n) {
    int64_t wrong = -1;
    for (int64_t i = 0; i < n && wrong < 0; i++)
        if (canonical(want[i]) != canonical(got[i]) && !(fabsf(want[i] - got[i]) <= bound[i])) wrong = i;
    report(s, name, digest_floats(want, n), wrong);
}
