# SPDX-License-Identifier: Apache-2.0
"""The architectures, one module each, by the name that stands in model files."""

from __future__ import annotations

from typing import Any

from cecilia.arch import ling3, llama, qwen2, qwen3
from cecilia.arch.base import Architecture
from cecilia.errors import ModelFileError

ARCHITECTURES: dict[str, Architecture[Any]] = {
    "ling3": ling3,
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
}


def architecture(name: object) -> Architecture[Any]:
    """The architecture called `name`. Raises ModelFileError `unsupported_architecture`."""
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = " ".join(ARCHITECTURES)
        raise ModelFileError("unsupported_architecture", f"architecture {name!r} is not one of: {known}")
    return ARCHITECTURES[name]
