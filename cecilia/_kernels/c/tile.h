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

/* Ask for the quants AHEAD blocks behind block b, and for block b's scales in the next tile. Few tokens wait for memory
 * alone, and the hardware's prefetchers neither cross pages nor see where the scales of the next tile are. Tiles are
 * taken to lie one after another; behind the last one nothing is lost but a few lines. Always inlined: to gcc 12 a
 * function that only prefetches has no effect, and it drops the call. */
static inline __attribute__((always_inline)) void cec_prefetch(int format, const cec_packed *p, int64_t b) {
    enum { AHEAD = 16 };
    const int64_t block = cec_quant_bytes(format), tile = cec_tile_bytes(format, p->blocks * CEC_BLOCK);
    const int64_t past = b + AHEAD < p->blocks ? 0 : tile - p->blocks * block;
    const uint8_t *quants = p->q + (b + AHEAD) * block + past;
    for (int64_t i = 0; i < block; i += 64) __builtin_prefetch(quants + i);
    __builtin_prefetch((const uint8_t *)(p->d + b * CEC_TILE) + tile);
    if (format == CEC_Q4A_32) __builtin_prefetch((const uint8_t *)(p->m + b * CEC_TILE) + tile);
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
