/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention, the reference: its dot products. Everything else is attention.h. */
#include "attention.h"
#include "ops.h"

static void scores_int8(const int8_t *q, int n, int64_t D, const int8_t *k, int32_t s[][CEC_PAGE]) {
    for (int r = 0; r < n; r++, q += D) {
        memset(s[r], 0, sizeof s[r]);
        for (int64_t d = 0; d < D; d += 4)
            for (int p = 0; p < CEC_PAGE; p++)
                for (int j = 0; j < 4; j++) s[r][p] += q[d + j] * k[d * CEC_PAGE + p * 4 + j];
    }
}

static void values_int8(const uint8_t hi[][CEC_PAGE], const uint8_t lo[][CEC_PAGE], int n, int64_t D, const int8_t *v,
                        int groups, int32_t *o) {
    memset(o, 0, (size_t)(n * D) * sizeof *o);
    for (int r = 0; r < n; r++, o += D)
        for (int p = 0; p < 4 * groups; p += 4)
            for (int64_t d = 0; d < D; d++)
                for (int j = 0; j < 4; j++) o[d] += (128 * hi[r][p + j] + lo[r][p + j]) * v[p * D + d * 4 + j];
}

static inline float element(int kv, const void *part, int64_t i) {
    return kv == CEC_KV_F32 ? ((const float *)part)[i] : cec_bf16_f32(((const uint16_t *)part)[i]);
}

CEC_INLINE void scores_float(int kv, const float *q, int n, int64_t D, const void *k, float s[][CEC_PAGE]) {
    for (int r = 0; r < n; r++) {
        memset(s[r], 0, sizeof s[r]);
        for (int64_t d = 0; d < D; d++)
            for (int p = 0; p < CEC_PAGE; p++) s[r][p] += q[r * D + d] * element(kv, k, d * CEC_PAGE + p);
    }
}

CEC_INLINE void values_float(int kv, const float e[][CEC_PAGE], int n, int64_t D, const void *v, int p0, int p1,
                             float *o) {
    for (int r = 0; r < n; r++)
        for (int p = p0; p < p1; p++)
            for (int64_t d = 0; d < D; d++) o[r * D + d] += e[r][p] * element(kv, v, p * D + d);
}

#include "attention_table.h"

const cec_attention_ops cec_scalar_attention = CEC_ATTENTION_OPS;
