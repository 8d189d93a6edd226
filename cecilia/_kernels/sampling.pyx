# SPDX-License-Identifier: Apache-2.0
"""The sampling kernels: shapes are checked here, the arithmetic is in c/scalar_sampling.c."""

from libc.stdint cimport int32_t, int64_t

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


def keep(const float[::1] logits not None, int32_t[::1] ids not None, float[::1] weights not None, *,
         int64_t top_k, double top_p, double reach, double temperature):
    """Find the tokens that top_k (0: all), then top_p (1: all), then reach (inf: all) keep; return how many.

    top_p counts exp(logit) at temperature 1; `reach` is the farthest distance from the largest logit.
    `ids` and `weights` [V] get, in ascending order of id, each kept token and its
    exp((logit - largest) / temperature).
    Raises CeciliaError `numeric_error` as argmax does, UsageError `invalid_sampling` for values out of range.
    """
    cdef int64_t count = -1
    if not (top_k >= 0 and 0 < top_p <= 1 and reach >= 0 and temperature > 0):
        raise UsageError(
            "invalid_sampling", f"top_k {top_k}, top_p {top_p}, reach {reach}, temperature {temperature}"
        )
    if not ids.shape[0] == weights.shape[0] == logits.shape[0] < 2**31:
        raise UsageError(
            "invalid_sampling",
            f"{ids.shape[0]} ids and {weights.shape[0]} weights for {logits.shape[0]} logits",
        )
    if logits.shape[0] > 0:
        with nogil:
            count = table().sampling.keep(
                &logits[0], logits.shape[0], top_k, top_p, reach, temperature, &ids[0], &weights[0]
            )
    if count < 0:
        raise _numeric_error(logits.shape[0])
    return count


def draw(const float[::1] weights not None, int64_t count, double u):
    """Place in the first `count` of `weights` at which their running sum exceeds `u` (0 <= u < 1) of all."""
    cdef int64_t place
    if not (1 <= count <= weights.shape[0] and 0 <= u < 1):
        raise UsageError("invalid_sampling", f"{count} of {weights.shape[0]} weights, u {u}")
    with nogil:
        place = table().sampling.draw(&weights[0], count, u)
    return place


def _numeric_error(int64_t count):
    return CeciliaError("numeric_error", f"the {count} logits hold NaN, +inf, or nothing finite")
