# SPDX-License-Identifier: Apache-2.0
"""Make a model of any size with random weights and a byte tokenizer, in seconds, for tests and the curious.

    python -m tools.make_tiny --out FILE.l3r [--architecture llama --layers 2 --width 64 ...] [--seed 0]

The same arguments give the same file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cecilia.arch import ARCHITECTURES
from cecilia.arch.base import TensorSpec
from cecilia.errors import CeciliaError
from cecilia.formats.l3r_write import ModelWriter, PlannedTensor
from cecilia.formats.quant import FORMATS, pack, quantise
from tools.convert.vocabulary import byte_vocabulary

Values = np.ndarray[Any, np.dtype[np.float32]]

DENSE = ("llama", "qwen2", "qwen3")
"""Architectures whose hyper-parameters are those of HYPER."""

HYPER: dict[str, Any] = {
    "layers": 2,
    "width": 64,
    "ff": 160,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "vocab": 320,
    "context": 512,
    "norm_eps": 1e-5,
    "rope_base": 10000.0,
    "tied": False,  # a tied random model says the last token again and again
}


def tensors(specs: dict[str, TensorSpec], seed: int) -> Iterator[tuple[str, Values]]:
    """Random f32 weights, one tensor at a time: matrices [R, K] scaled to keep the size of what passes, norms
    [D] near one, biases near zero."""
    rng = np.random.default_rng(seed)
    for name, spec in specs.items():
        if spec.rank == 2:
            values = rng.standard_normal((spec.rows, spec.cols), np.float32)
            values *= np.float32(spec.cols**-0.5)
        elif name.endswith(".bias"):
            values = rng.uniform(-0.5, 0.5, spec.cols)
        else:
            values = rng.uniform(0.5, 1.5, spec.cols)
        yield name, values.astype(np.float32, copy=False)


def make_tiny(
    path: Path, *, architecture: str = "llama", quant: str = "q8_32", seed: int = 0, **hyper: Any
) -> Path:
    """Write the model to `path` and return it. `quant`: format of the matrices; `hyper`: in place of HYPER's.

    Raises ModelFileError and UsageError when the shapes are none this architecture or tokenizer can have.
    """
    wanted = HYPER | hyper
    words = byte_vocabulary(wanted["vocab"])
    arch = ARCHITECTURES[architecture]
    specs = arch.tensors(arch.spec_from(wanted))
    plan = [
        PlannedTensor(name, "f32" if s.rank == 1 else quant, s.rank, s.rows, s.cols, s.layer)
        for name, s in specs.items()
    ]
    metadata = {
        "architecture": architecture,
        "hyper": wanted,
        "name": "tiny",
        "weights": "random",
        "license": "Apache-2.0",
        "provenance": {"source": f"seed {seed}", "converter": "make_tiny", "quant": quant},
        "text": words.text,
        "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0},
    }
    writer = ModelWriter(
        path, metadata=metadata, tokenizer=words.tokenizer, chat_template=words.chat_template, tensors=plan
    )
    with writer:
        for name, values in tensors(specs, seed):
            writer.write(name, values if values.ndim == 1 else pack(quantise(values, quant)))
        writer.finish()
    return path


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.make_tiny", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--architecture", choices=DENSE, default="llama")
    parser.add_argument("--quant", choices=FORMATS, default="q8_32", help="format of the matrices")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tied", action="store_true", help="use the embedding as the head")
    for key, value in HYPER.items():
        if key != "tied":
            parser.add_argument(f"--{key.replace('_', '-')}", type=type(value), default=value)
    arguments = vars(parser.parse_args())
    try:
        path = make_tiny(arguments.pop("out"), **arguments)
    except CeciliaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{path}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
