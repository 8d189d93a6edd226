/* SPDX-License-Identifier: Apache-2.0
 *
 * Linear kernels: every format, partial tiles, token counts around the groups that share a load, both ways to store,
 * and quants, scales and activations at their limits. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "half.h"

enum { PADDING = 5 }; /* columns of y behind the tile's rows, which must stay as they are */

typedef enum { ORDINARY, LIMITS, ANY_SCALE, KINDS } kind;

static const char *const FORMAT[] = {"f32", "bf16", "q8_32", "q4_32", "q4a_32"};
static const char *const KIND[] = {"ordinary", "limits", "any-scale"};

static int is_float(int format) { return cec_quant_bytes(format) == 0; }

/* ---- operands ---- */

/* An f16 between 2^-14 and 2 in size, or one of zero and the subnormals; `any`: whatever bits there are. */
static uint16_t next_half(random_source *r, int any) {
    const uint16_t bits = (uint16_t)(next_bits(r) >> 48);
    if (any) return bits;
    return next_below(r, 9) ? (uint16_t)((bits & 0x83ff) | (1 + bits % 14) << 10) : bits & 0x83ff;
}

static void *make_tile(random_source *r, int format, int64_t K, kind how) {
    const int64_t bytes = cec_tile_bytes(format, K), quants = K / CEC_BLOCK * cec_quant_bytes(format);
    uint8_t *tile = room(bytes);
    memset(tile, 0, (size_t)bytes);
    if (is_float(format)) {
        for (int64_t i = 0; i < K * CEC_TILE; i++) {
            const float x = next_float(r);
            if (format == CEC_F32)
                ((float *)tile)[i] = x;
            else
                ((uint16_t *)tile)[i] = cec_f32_bf16(x);
        }
        return tile;
    }
    uint16_t *scales = (uint16_t *)(tile + quants);
    fill_bytes(r, tile, quants);
    if (how == LIMITS) memset(tile, format == CEC_Q8_32 ? 0x80 : 0xff, (size_t)quants);
    for (int64_t i = 0; i < K / CEC_BLOCK * CEC_TILE * (format == CEC_Q4A_32 ? 2 : 1); i++)
        scales[i] = how == LIMITS ? 0x3c00 : next_half(r, how == ANY_SCALE);
    return tile;
}

/* Token 1 is zero; with LIMITS all others are +-127 throughout. */
static cec_acts make_acts(suite *s, random_source *r, int64_t T, int64_t K, kind how) {
    const int64_t blocks = K / CEC_BLOCK;
    float *f = room(T * K * 4), *d = room(T * blocks * 4), *sums = room(T * blocks * 4);
    int32_t *c = room(T * blocks * 4);
    int8_t *q = room(T * K);
    fill_floats(r, f, T * K, 3);
    if (how == LIMITS)
        for (int64_t i = 0; i < T * K; i++) f[i] = i / K % 2 ? -127 : 127;
    for (int64_t k = 0; k < K && T > 1; k++) f[K + k] = 0;
    for (int64_t t = 0; t < T && K % CEC_BLOCK == 0; t++)
        s->scalar->linear->quantize(f + t * K, K, q + t * K, d + t * blocks, sums + t * blocks, c + t * blocks);
    return (cec_acts){f, q, d, sums, c, K};
}

/* ---- cases ---- */

typedef struct {
    int rows, t0, t1, add;
} shape;

/* Two sums of K products in different orders, four running sums each, differ by no more than this. */
static void fill_bounds(suite *s, int format, const void *w, const cec_acts *x, shape a, const float *y, float *bound,
                        int64_t ldy) {
    float *row = room(x->K * 4);
    for (int r = 0; r < a.rows; r++) {
        s->scalar->linear->gather[format](w, r, x->K, row);
        for (int t = a.t0; t < a.t1; t++) {
            double size = a.add ? fabs((double)y[t * ldy + r]) : 0;
            for (int64_t k = 0; k < x->K; k++) size += fabs((double)row[k] * (double)x->f[t * x->K + k]);
            bound[t * ldy + r] = (float)(size * (double)(x->K / 4 + 4) * 0x1p-23);
        }
    }
}

static void tile_case(suite *s, random_source *r, int format, int64_t K, kind how, shape a) {
    char name[128];
    const int64_t ldy = a.rows + PADDING, n = (a.t1 + 1) * ldy;
    const void *w = make_tile(r, format, K, how);
    const cec_acts x = make_acts(s, r, a.t1, K, how);
    float *want = room(n * 4), *got = room(n * 4), *bound = room(n * 4);
    void *scratch = room(cec_tile_scratch(K));
    fill_floats(r, want, n, 1);
    memcpy(got, want, (size_t)n * 4);
    memset(bound, 0, (size_t)n * 4);
    if (is_float(format)) fill_bounds(s, format, w, &x, a, want, bound, ldy);
    s->scalar->linear->tile[format](w, &x, a.t0, a.t1, a.rows, want, ldy, a.add, scratch);
    s->tested->linear->tile[format](w, &x, a.t0, a.t1, a.rows, got, ldy, a.add, scratch);
    snprintf(name, sizeof name, "tile %s K=%d rows=%d tokens=%d..%d%s %s", FORMAT[format], (int)K, a.rows, a.t0, a.t1,
             a.add ? " added" : "", KIND[how]);
    if (is_float(format))
        near_floats(s, name, want, got, bound, n);
    else
        same_floats(s, name, want, got, n);
    forget_rooms();
}

static void gather_case(suite *s, random_source *r, int format, int64_t K) {
    char name[64];
    const void *w = make_tile(r, format, K, ORDINARY);
    float *want = room(CEC_TILE * K * 4), *got = room(CEC_TILE * K * 4);
    for (int row = 0; row < CEC_TILE; row++) {
        s->scalar->linear->gather[format](w, row, K, want + row * K);
        s->tested->linear->gather[format](w, row, K, got + row * K);
    }
    snprintf(name, sizeof name, "gather %s K=%d", FORMAT[format], (int)K);
    same_floats(s, name, want, got, CEC_TILE * K);
    forget_rooms();
}

/* Blocks of one kind: ordinary, zeros, ties of the rounding, tiny, subnormal, huge, with an infinity, with a NaN. */
static void fill_block(random_source *r, int which, float *x) {
    static const float SCALE[] = {1, 0, 1, 1e-38f, 1e-44f, 3e38f, 1, 1};
    fill_floats(r, x, CEC_BLOCK, SCALE[which]);
    if (which == 2) {
        for (int i = 0; i < CEC_BLOCK; i++) x[i] = (float)next_below(r, 254) - 126.5f;
        x[next_below(r, CEC_BLOCK)] = 127;
    }
    if (which == 6) x[next_below(r, CEC_BLOCK)] = next_below(r, 2) ? INFINITY : -INFINITY;
    if (which == 7) x[next_below(r, CEC_BLOCK)] = next_below(r, 2) ? NAN : -NAN;
}

static void quantize_case(suite *s, random_source *r, int which) {
    enum { BLOCKS = 11 };
    static const char *const PART[] = {"q", "d", "s", "c"};
    const int64_t bytes[] = {BLOCKS * CEC_BLOCK, BLOCKS * 4, BLOCKS * 4, BLOCKS * 4};
    void *out[2][4];
    float *x = room(BLOCKS * CEC_BLOCK * 4);
    for (int b = 0; b < BLOCKS; b++) fill_block(r, which, x + b * CEC_BLOCK);
    for (int i = 0; i < 2; i++) {
        for (int part = 0; part < 4; part++) out[i][part] = room(bytes[part]);
        (i ? s->tested : s->scalar)
            ->linear->quantize(x, BLOCKS * CEC_BLOCK, out[i][0], out[i][1], out[i][2], out[i][3]);
    }
    for (int part = 0; part < 4; part++) {
        char name[64];
        snprintf(name, sizeof name, "quantize kind %d: %s", which, PART[part]);
        if (part == 1 || part == 2)
            same_floats(s, name, out[0][part], out[1][part], BLOCKS);
        else
            same_bytes(s, name, out[0][part], out[1][part], bytes[part]);
    }
    forget_rooms();
}

void linear_cases(suite *s) {
    static const shape SHAPES[] = {{16, 0, 1, 0}, {16, 1, 3, 1}, {3, 0, 4, 0},  {8, 0, 5, 1},  {9, 2, 9, 0},
                                   {16, 0, 8, 1}, {1, 1, 2, 1},  {13, 0, 3, 0}, {12, 3, 7, 1}, {16, 0, 17, 0}};
    static const int64_t WIDTHS[] = {32, 96, 608, 1536}, ODD[] = {1, 2, 7, 32, 101, 600};
    random_source r = {1};
    for (int which = 0; which < 8; which++) quantize_case(s, &r, which);
    for (int format = 0; format < CEC_FORMATS; format++) {
        const int64_t *widths = is_float(format) ? ODD : WIDTHS;
        for (int i = 0; i < (is_float(format) ? 6 : 4); i++) {
            gather_case(s, &r, format, widths[i]);
            for (size_t a = 0; a < sizeof SHAPES / sizeof *SHAPES; a++)
                for (int how = 0; how < (is_float(format) ? LIMITS : KINDS); how++)
                    tile_case(s, &r, format, widths[i], (kind)how, SHAPES[a]);
        }
    }
}
