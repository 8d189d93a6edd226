/* SPDX-License-Identifier: Apache-2.0
 *
 * Delta attention for AVX-512: the source is delta.h. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,prefer-vector-width=512")
#include "delta.h"
#include "ops.h"

const cec_delta_ops cec_avx512vnni_delta = CEC_DELTA_OPS;
#endif
