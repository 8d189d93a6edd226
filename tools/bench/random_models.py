# SPDX-License-Identifier: Apache-2.0
"""Random weights of real shapes for side-by-side speed, made once: speed does not depend on values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.bench.engines import Pair
from tools.bench.export_gguf import export_gguf
from tools.make_tiny import make_tiny

CACHE = Path.home() / ".cache" / "cecilia" / "models"

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architecture": "qwen3",
        "layers": 28,
        "width": 1024,
        "ff": 3072,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 128,
        "vocab": 151936,
        "context": 40960,
        "norm_eps": 1e-6,
        "rope_base": 1e6,
        "tied": True,
    },
    "ling3-tiny": {"architecture": "ling3", "full": True},
    "ling3-tiny-8-layers": {"architecture": "ling3", "full": True, "layers": 8},
}
"""What `make_tiny` is told, by name."""


def random_pair(name: str, folder: Path = CACHE) -> Pair:
    """The same 4-bit weights (q4_32 is GGUF's Q4_0, value for value) for this engine and for the peers."""
    pair = Pair(folder / f"{name}-random-q4_0.l3r", folder / f"{name}-random-q4_0.gguf")
    folder.mkdir(parents=True, exist_ok=True)
    if not pair.model.is_file():
        make_tiny(pair.model, quant="q4_32", **SHAPES[name])
    if not pair.gguf.is_file():
        part = pair.gguf.with_suffix(".partial")
        export_gguf(pair.model, part).rename(pair.gguf)
    return pair
