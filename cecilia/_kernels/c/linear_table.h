/* SPDX-License-Identifier: Apache-2.0
 *
 * The last lines of each vector *_linear.c: its quantize, integer_tile and float_tile, both always inlined, made into
 * table entries with the format a constant. Included after them. */

#define TILE(NAME, KIND, FORMAT)                                                                                       \
    static void NAME(const void *w, const cec_acts *x, int64_t t0, int64_t t1, int rows, float *y, int64_t ldy,        \
                     int add, void *scratch) {                                                                         \
        KIND(FORMAT, w, x, t0, t1, rows, y, ldy, add, scratch);                                                        \
    }

TILE(tile_f32, float_tile, CEC_F32)
TILE(tile_bf16, float_tile, CEC_BF16)
TILE(tile_q8, integer_tile, CEC_Q8_32)
TILE(tile_q4, integer_tile, CEC_Q4_32)
TILE(tile_q4a, integer_tile, CEC_Q4A_32)

#undef TILE

#define CEC_LINEAR_OPS                                                                                                 \
    {                                                                                                                  \
        quantize, {tile_f32, tile_bf16, tile_q8, tile_q4, tile_q4a},                                                   \
            {cec_gather_f32, cec_gather_bf16, cec_gather_q8, cec_gather_q4, cec_gather_q4a},                           \
    }
