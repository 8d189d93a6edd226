# SPDX-License-Identifier: Apache-2.0
# The C contract (c/table.h) as Cython sees it, and the active table.

from libc.stdint cimport int8_t, int32_t, int64_t


cdef extern from "c/blocks.h" nogil:
    const int CEC_TILE
    const int CEC_BLOCK
    const int CEC_PAGE
    const int CEC_ALIGN
    const int CEC_F32
    const int CEC_BF16
    const int CEC_Q8_32
    const int CEC_Q4_32
    const int CEC_Q4A_32
    const int CEC_FORMATS
    const int CEC_KV_F32
    const int CEC_KV_BF16
    const int CEC_KV_INT8
    const int CEC_KV_FORMATS
    int64_t cec_round_up(int64_t n, int64_t to)
    int64_t cec_tile_bytes(int format, int64_t K)
    int64_t cec_kv_part_bytes(int kv, int64_t D)


cdef extern from "c/table.h" nogil:
    ctypedef struct cec_acts:
        const float *f
        const int8_t *q
        const float *d
        const float *s
        const int32_t *c
        int64_t K

    ctypedef struct cec_linear_ops:
        void (*quantize)(const float *x, int64_t n, int8_t *q, float *d, float *s, int32_t *c) noexcept nogil
        void (**tile)(const void *w, const cec_acts *x, int64_t t0, int64_t t1, int rows, float *y,
                      int64_t ldy, int add, void *scratch) noexcept nogil
        void (**gather)(const void *w, int r, int64_t K, float *out) noexcept nogil

    int64_t cec_tile_scratch(int64_t K)

    ctypedef struct cec_pointwise_ops:
        void (*rmsnorm)(const float *x, const float *w, float eps, int64_t n, float *y) noexcept nogil
        void (*swiglu)(const float *g, const float *u, int64_t n, float *y) noexcept nogil
        void (*sigmoid)(const float *x, int64_t n, float *y) noexcept nogil
        void (*rope)(float *x, const float *cos, const float *sin, int64_t half) noexcept nogil
        void (*rope_pairs)(float *x, const float *cos, const float *sin, int64_t half) noexcept nogil

    const int CEC_HEAD_MAX
    const int CEC_PARTS_MAX

    ctypedef struct cec_part:
        const void *data
        int64_t width

    ctypedef struct cec_head_page:
        int keys
        int values
        cec_part *key
        cec_part *value
        int64_t rows

    ctypedef struct cec_attention_ops:
        void (**store_k)(const float *x, int64_t D, void *part, int slot) noexcept nogil
        void (**store_v)(const float *x, int64_t D, void *part, int slot) noexcept nogil
        void (**turn)(const void *kpart, int64_t D, void *vpart) noexcept nogil
        float (*quantize_query)(const float *x, int64_t D, int8_t *q) noexcept nogil
        void (**partial)(const cec_head_page *page, const float *qf, const int8_t *qi, const float *qd,
                         int64_t row, int64_t n, const int32_t *valid, float *m, float *l,
                         float *o) noexcept nogil
        void (*merge)(float *M, float *L, float *O, float m, float l, const float *o,
                      int64_t D) noexcept nogil

    ctypedef struct cec_sampling_ops:
        int64_t (*argmax)(const float *x, int64_t n) noexcept nogil
        int64_t (*keep)(const float *x, int64_t n, int64_t top_k, double top_p, double reach,
                        double temperature, int32_t *ids, float *w) noexcept nogil
        int64_t (*draw)(const float *w, int64_t n, double u) noexcept nogil

    ctypedef struct cec_delta_token:
        const float *q
        const float *k
        const float *decay
        float beta
        float kq

    ctypedef struct cec_delta_ops:
        float (*dot)(const float *x, const float *y, int64_t n) noexcept nogil
        void (*conv)(const float *const *rows, const float *taps, int64_t channels, int64_t n,
                     float *y) noexcept nogil
        void (*unit)(float *x, int64_t n, float scale) noexcept nogil
        void (*decay)(const float *f, const float *bias, float a, float lowest, int64_t n,
                      float *d) noexcept nogil
        void (*recur)(float *s, int64_t K, const cec_delta_token *tokens, int64_t T, const float *v,
                      int64_t ldv, float *o, int64_t ldo) noexcept nogil
        void (*output)(const float *o, const float *w, float eps, const float *z, int64_t n,
                       float *y) noexcept nogil

    ctypedef struct cec_table:
        const char *name
        int (*usable)() noexcept nogil
        const cec_linear_ops *linear
        const cec_pointwise_ops *pointwise
        const cec_attention_ops *attention
        const cec_sampling_ops *sampling
        const cec_delta_ops *delta

    const cec_table *cec_tables[]


cdef const cec_table *table() noexcept nogil
