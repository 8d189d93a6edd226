/* SPDX-License-Identifier: Apache-2.0
 *
 * Pointwise kernels for AVX-512: the source is pointwise.h. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,prefer-vector-width=512")
#include "ops.h"
#include "pointwise.h"

const cec_pointwise_ops cec_avx512vnni_pointwise = {rmsnorm, swiglu, sigmoid, rope, rope_pairs};
#endif
