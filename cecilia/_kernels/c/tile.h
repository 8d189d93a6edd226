/* SPDX-License-Identifier: Apache-2.0
 *
 * Where the parts of a quantised weight tile lie, packed (as in the file) and expanded (in a thread's scratch). */
#ifndef CECILIA_TILE_H
#define CECILIA_TILE_H

#include "blocks.h"

typedef struct {
    const uint8_t *q;  /* quants of block b at q + b * cec_quant_bytes(format) */
    const uint16_t *d; /* f16 [K/32][16] */
    const uint16_t *m; /* f16 [K/32][16]; q4a_32 only */
    int64_t blocks;
} cec_packed;

static inline cec_packed cec_unwrap(const void *w, int format, int64_t K) {
    const int64_t blocks = K / CEC_BLOCK;
    const uint8_t *q = w;
    const uint16_t *d = (const uint16_t *)(q + blocks * cec_quant_bytes(format));
    return (cec_packed){q, d, d + blocks * CEC_TILE, blocks};
}

/* One byte a quant, [K/4][16 rows][4], with scales and minima as f32 [K/32][16]: what a tile looks like to a loop
 * over many tokens. */
typedef struct {
    uint8_t *q;
    float *d;
    float *m;
} cec_expanded;

static inline cec_expanded cec_in_scratch(void *scratch, int64_t K) {
    uint8_t *q = scratch;
    float *d = (float *)(q + K * CEC_TILE);
    return (cec_expanded){q, d, d + K / CEC_BLOCK * CEC_TILE};
}

#endif
