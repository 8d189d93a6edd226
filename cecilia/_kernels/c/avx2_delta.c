/* SPDX-License-Identifier: Apache-2.0
 *
 * Delta attention for AVX2: the source is delta.h. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include "delta.h"
#include "ops.h"

const cec_delta_ops cec_avx2_delta = CEC_DELTA_OPS;
#endif
