/* SPDX-License-Identifier: Apache-2.0
 *
 * Pointwise kernels for AVX2: the source is pointwise.h. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include "ops.h"
#include "pointwise.h"

const cec_pointwise_ops cec_avx2_pointwise = {rmsnorm, swiglu, sigmoid, rope, rope_pairs};
#endif
