/* SPDX-License-Identifier: Apache-2.0
 *
 * Pointwise kernels for NEON with dot products: the source is pointwise.h. */
#if defined(__aarch64__)
#pragma GCC target("arch=armv8.2-a+dotprod,tune=cortex-a76")
#include "ops.h"
#include "pointwise.h"

const cec_pointwise_ops cec_neon_dotprod_pointwise = {rmsnorm, swiglu, sigmoid, rope, rope_pairs};
#endif
