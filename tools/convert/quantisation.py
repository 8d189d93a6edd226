# SPDX-License-Identifier: Apache-2.0
"""Which format a matrix of the target gets: what was asked for, where the architecture allows it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from cecilia.arch.base import TensorSpec
from cecilia.errors import ModelFileError, UsageError
from cecilia.formats.l3r_layout import TENSOR_ALIGN, PlannedTensor

# An expert is a gate, an up and a down matrix, in this order; the first is aligned so that an expert can be
# dropped from memory and prefetched on its own.
_ROUTED, _FIRST, _EXPERT_ALIGN = ".mlp.experts.", ".gate_proj.weight", 16384


@dataclass(frozen=True)
class Quantisation:
    """Formats of the matrices, and of those of routed experts; None: as the source has them."""

    matrices: str | None
    routed: str | None

    def wanted(self, name: str, keep: str) -> str:
        """The format for the matrix `name`, which the source has in `keep`."""
        return (self.routed if is_routed(name) else self.matrices) or keep


def _all(format: str | None) -> Quantisation:
    return Quantisation(format, format)


QUANTISATIONS = {
    "keep": _all(None),
    "bf16": _all("bf16"),
    "f32": _all("f32"),
    "q8": _all("q8_32"),
    "q4": _all("q4_32"),
    "w8a8": _all("q8_32"),
    "w4a8": Quantisation("q8_32", "q4_32"),
}
"""By the name a user gives."""


def quantisation(name: str, architecture: str, tensors: Iterable[str]) -> Quantisation:
    """What `name` asks for; raises UsageError when it sets routed experts apart and `tensors` has none."""
    found = QUANTISATIONS[name]
    if found.routed != found.matrices and not any(map(is_routed, tensors)):
        raise UsageError(
            "unsupported_quant",
            f"{name} gives routed experts 4 bits, but {architecture} has none; take q4 or w8a8",
        )
    return found


def fitting(spec: TensorSpec, wanted: str, keep: str) -> str:
    """The format of a matrix: `wanted`, else `keep`, else f32, by what the architecture allows it."""
    return next((name for name in (wanted, keep) if name in spec.formats), "f32")


def is_routed(name: str) -> bool:
    """Whether a tensor of the target belongs to an expert that a router chooses."""
    return _ROUTED in name


def alignment(name: str) -> int:
    """The alignment of a tensor's place in the target."""
    return _EXPERT_ALIGN if is_routed(name) and name.endswith(_FIRST) else TENSOR_ALIGN


def check_experts(planned: Iterable[PlannedTensor]) -> None:
    """Refuse routed experts of a layer that have a matrix in two formats: they are computed together.

    Raises ModelFileError `unsupported_model`.
    """
    found: dict[str, str] = {}
    for tensor in planned:
        if is_routed(tensor.name):
            role = re.sub(r"experts\.\d+", "experts.*", tensor.name)
            if found.setdefault(role, tensor.format) != tensor.format:
                raise ModelFileError(
                    "unsupported_model",
                    f"{role} in {found[role]} and {tensor.format}; choose one format with --quant",
                )
