# SPDX-License-Identifier: Apache-2.0
"""The sampling kernels: shapes are checked here, the arithmetic is in c/scalar_sampling.c."""

from libc.stdint cimport int64_t

from cecilia._kernels.isa cimport table
from cecilia.errors import CeciliaError, UsageError


def argmax(const float[::1] logits not None):
    """Index of the largest of `logits` [V], the lowest such index.

    Raises CeciliaError `numeric_error` when a logit is NaN, or the largest is not finite.
    """
    cdef int64_t best = -1
    if logits.shape[0] > 0:
        with nogil:
            best = table().sampling.argmax(&logits[0], logits.shape[0])
    if best < 0:
        raise _numeric_error(logits.shape[0])
    return best


def weigh(const float[::1] logits not None, double temperature, int64_t top_k, double top_p,
          float[::1] weights not None):
    """Fill `weights` [V] with exp((logit - largest) / temperature) of the tokens kept and 0; return their sum.

    top_k (0: all) chooses first, then top_p (1.0: all); ties go to the lowest index.
    Raises CeciliaError `numeric_error` as argmax does, UsageError `invalid_sampling` for values out of range.
    """
    cdef double mass = -1
    if not (temperature > 0 and top_k >= 0 and 0 < top_p <= 1 and weights.shape[0] == logits.shape[0]):
        raise UsageError(
            "invalid_sampling",
            f"temperature {temperature}, top_k {top_k}, top_p {top_p}, {weights.shape[0]} weights for "
            f"{logits.shape[0]} logits",
        )
    if logits.shape[0] > 0:
        with nogil:
            mass = table().sampling.weigh(&logits[0], logits.shape[0], temperature, top_k, top_p, &weights[0])
    if mass < 0:
        raise _numeric_error(logits.shape[0])
    return mass


def pick(const float[::1] weights not None, double target):
    """First index at which the running sum of `weights` [V] exceeds `target`; else the last with a weight."""
    cdef int64_t index
    if weights.shape[0] == 0:
        raise UsageError("invalid_sampling", "no weights to pick from")
    with nogil:
        index = table().sampling.pick(&weights[0], weights.shape[0], target)
    return index


def _numeric_error(int64_t count):
    return CeciliaError("numeric_error", f"the {count} logits hold NaN, +inf, or nothing finite")
