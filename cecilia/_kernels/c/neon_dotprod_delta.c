/* SPDX-License-Identifier: Apache-2.0
 *
 * Delta attention for NEON with dot products: the source is delta.h. */
#if defined(__aarch64__)
#pragma GCC target("arch=armv8.2-a+dotprod,tune=cortex-a76")
#include "delta.h"
#include "ops.h"

const cec_delta_ops cec_neon_dotprod_delta = CEC_DELTA_OPS;
#endif
