/* SPDX-License-Identifier: Apache-2.0
 *
 * Sizes every kernel and every Cython module agrees on: weight tiles, activation blocks, KV pages.
 * The weight layouts are those of docs/FORMAT-L3R.md; the KV layouts exist only in memory. */
#ifndef CECILIA_BLOCKS_H
#define CECILIA_BLOCKS_H

#include <stdint.h>

enum {
    CEC_TILE = 16,  /* weight rows in a tile: one zmm, two ymm or four NEON registers of int32 */
    CEC_BLOCK = 32, /* K elements that share a scale, in weights and in activations */
    CEC_PAGE = 64,  /* positions in a KV page; also the block of the attention sum */
    CEC_ALIGN = 64  /* bytes: every tile, page part and buffer starts on such a boundary */
};

/* Weight formats; the numbers stand in model files. */
enum cec_format { CEC_F32 = 0, CEC_BF16 = 1, CEC_Q8_32 = 2, CEC_Q4_32 = 3, CEC_Q4A_32 = 4, CEC_FORMATS = 5 };

/* KV recipes. */
enum cec_kv { CEC_KV_F32 = 0, CEC_KV_BF16 = 1, CEC_KV_INT8 = 2, CEC_KV_FORMATS = 3 };

static inline int64_t cec_round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* Bytes of the quants of one K-block of one tile; 0 for float formats. */
static inline int64_t cec_quant_bytes(int format) {
    return format == CEC_Q8_32 ? CEC_TILE * CEC_BLOCK
         : format == CEC_Q4_32 || format == CEC_Q4A_32 ? CEC_TILE * CEC_BLOCK / 2 : 0;
}

/* Bytes of one tile of 16 rows x K columns. Quantised: all quants, then d as f16 [K/32][16], then (q4a) m alike. */
static inline int64_t cec_tile_bytes(int format, int64_t K) {
    const int64_t blocks = K / CEC_BLOCK, scales = blocks * CEC_TILE * 2;
    switch (format) {
    case CEC_F32: return cec_round_up(K * CEC_TILE * 4, CEC_ALIGN);
    case CEC_BF16: return cec_round_up(K * CEC_TILE * 2, CEC_ALIGN);
    case CEC_Q4A_32: return cec_round_up(blocks * cec_quant_bytes(format) + 2 * scales, CEC_ALIGN);
    default: return cec_round_up(blocks * cec_quant_bytes(format) + scales, CEC_ALIGN);
    }
}

/* Bytes of the K part, and of the V part, of one page of one KV head of width D (D % 16 == 0).
 *   f32, bf16: K[D][64] (lanes are positions), V[64][D] (lanes are dimensions)
 *   int8:      K int8 [D/4][64][4], scale f32 [64];  V int8 [64/4][D][4], scale f32 [64] */
static inline int64_t cec_kv_part_bytes(int kv, int64_t D) {
    return kv == CEC_KV_INT8 ? CEC_PAGE * (D + 4) : CEC_PAGE * D * (kv == CEC_KV_BF16 ? 2 : 4);
}

#endif
