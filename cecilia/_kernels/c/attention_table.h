/* SPDX-License-Identifier: Apache-2.0
 *
 * The last lines of each *_attention.c: its scores_* and values_* made into table entries. Included after them. */

static void scores_f32(const float *q, int n, int64_t D, const void *k, float s[][CEC_PAGE]) {
    scores_float(CEC_KV_F32, q, n, D, k, s);
}

static void scores_bf16(const float *q, int n, int64_t D, const void *k, float s[][CEC_PAGE]) {
    scores_float(CEC_KV_BF16, q, n, D, k, s);
}

static void values_f32(const float e[][CEC_PAGE], int n, int64_t D, const void *v, int p0, int p1, float *o) {
    values_float(CEC_KV_F32, e, n, D, v, p0, p1, o);
}

static void values_bf16(const float e[][CEC_PAGE], int n, int64_t D, const void *v, int p0, int p1, float *o) {
    values_float(CEC_KV_BF16, e, n, D, v, p0, p1, o);
}

static void partial_f32(const cec_head_page *page, const float *qf, const int8_t *qi, const float *qd, int64_t row,
                        int64_t n, const int32_t *valid, float *m, float *l, float *o) {
    cec_partial_float(scores_f32, values_f32, page, qf, row, n, valid, m, l, o);
}

static void partial_bf16(const cec_head_page *page, const float *qf, const int8_t *qi, const float *qd, int64_t row,
                         int64_t n, const int32_t *valid, float *m, float *l, float *o) {
    cec_partial_float(scores_bf16, values_bf16, page, qf, row, n, valid, m, l, o);
}

static void partial_int8(const cec_head_page *page, const float *qf, const int8_t *qi, const float *qd, int64_t row,
                         int64_t n, const int32_t *valid, float *m, float *l, float *o) {
    cec_partial_int8(scores_int8, values_int8, page, qi, qd, row, n, valid, m, l, o);
}

#define CEC_ATTENTION_OPS                            \
    {                                                \
        {store_k_f32, store_k_bf16, store_k_int8},   \
        {store_v_f32, store_v_bf16, store_v_int8},   \
        {turn_f32, turn_bf16, turn_int8},            \
        cec_quantize_row,                            \
        {partial_f32, partial_bf16, partial_int8},   \
        merge,                                       \
    }
