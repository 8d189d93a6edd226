/* SPDX-License-Identifier: Apache-2.0
 *
 * What each (instruction set, family) file exports to select.c, and nothing else. */
#ifndef CECILIA_OPS_H
#define CECILIA_OPS_H

#include "table.h"

extern const cec_linear_ops cec_scalar_linear;
extern const cec_pointwise_ops cec_scalar_pointwise;
extern const cec_attention_ops cec_scalar_attention;
extern const cec_sampling_ops cec_scalar_sampling;
extern const cec_delta_ops cec_scalar_delta;

/* Exact copies out of a tile; one plain C version serves every instruction set. */
void cec_gather_f32(const void *w, int r, int64_t K, float *out);
void cec_gather_bf16(const void *w, int r, int64_t K, float *out);
void cec_gather_q8(const void *w, int r, int64_t K, float *out);
void cec_gather_q4(const void *w, int r, int64_t K, float *out);
void cec_gather_q4a(const void *w, int r, int64_t K, float *out);

#if defined(__x86_64__)
extern const cec_linear_ops cec_avx2_linear, cec_avx512vnni_linear, cec_avx512amx_linear;
extern const cec_pointwise_ops cec_avx2_pointwise, cec_avx512vnni_pointwise;
extern const cec_attention_ops cec_avx2_attention, cec_avx512vnni_attention;
extern const cec_delta_ops cec_avx2_delta, cec_avx512vnni_delta;
#elif defined(__aarch64__)
extern const cec_linear_ops cec_neon_dotprod_linear;
extern const cec_pointwise_ops cec_neon_dotprod_pointwise;
extern const cec_attention_ops cec_neon_dotprod_attention;
extern const cec_delta_ops cec_neon_dotprod_delta;
#endif

#endif
