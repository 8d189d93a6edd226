/* SPDX-License-Identifier: Apache-2.0
 *
 * Delta attention, the reference: the source is delta.h. */
#include "delta.h"
#include "ops.h"

const cec_delta_ops cec_scalar_delta = CEC_DELTA_OPS;
