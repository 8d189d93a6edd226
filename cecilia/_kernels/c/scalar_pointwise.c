/* SPDX-License-Identifier: Apache-2.0
 *
 * Pointwise kernels, the reference: the source is pointwise.h. */
#include "ops.h"
#include "pointwise.h"

const cec_pointwise_ops cec_scalar_pointwise = {rmsnorm, swiglu, sigmoid, rope, rope_pairs};
