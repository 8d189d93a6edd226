# SPDX-License-Identifier: Apache-2.0
"""Make a model of any size with random weights and a byte tokenizer, in seconds, for tests and the curious.

    python -m tools.make_tiny --out FILE.l3r [--architecture llama --layers 2 --width 64 ...] [--seed 0]
    python -m tools.make_tiny --out FILE.l3r --architecture ling3 --full [--layers 8]

The same arguments give the same file. `--full` takes the sizes of the published model, which makes a file of
some 5 GB in minutes; with `--layers` fewer of the same layers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cecilia.arch import ARCHITECTURES
from cecilia.errors import CeciliaError
from cecilia.formats.l3r_write import ModelWriter, PlannedTensor
from cecilia.formats.quant import FORMATS
from tools.convert.byte_vocabulary import byte_vocabulary
from tools.convert.quantisation import QUANTISATIONS, Quantisation, alignment, fitting, quantisation
from tools.random_weights import RandomWeights
from tools.shapes import FULL, MICRO, hyper

QUANTS = (*FORMATS, "w8a8", "w4a8")
DEFAULT_QUANT, DEFAULT_FULL_QUANT = "q8_32", "w4a8"


def make_tiny(
    path: Path,
    *,
    architecture: str = "llama",
    quant: str | None = None,
    seed: int = 0,
    full: bool = False,
    **changes: Any,
) -> Path:
    """Write the model to `path` and return it.

    `quant`: one of QUANTS, by default q8_32, or w4a8 for a full size; a matrix that cannot have its format is
    f32. `changes`: hyper-parameters in place of those of tools.shapes. Raises ModelFileError and UsageError
    when the shapes are none this architecture or tokenizer can have.
    """
    quant = quant or (DEFAULT_FULL_QUANT if full else DEFAULT_QUANT)
    wanted = hyper(architecture, full=full, changes=changes)
    words = byte_vocabulary(wanted["vocab"], architecture)
    arch = ARCHITECTURES[architecture]
    specs = arch.tensors(arch.spec_from(wanted))
    formats = _formats(quant, architecture, list(specs))
    plan = [
        PlannedTensor(
            name,
            "f32" if s.rank == 1 else fitting(s, formats.wanted(name, "f32"), "f32"),
            s.rank,
            s.rows,
            s.cols,
            s.layer,
            alignment(name),
        )
        for name, s in specs.items()
    ]
    metadata = {
        "architecture": architecture,
        "hyper": wanted,
        "name": f"{architecture} of full width, random weights" if full else "tiny",
        "weights": "random",
        "license": "Apache-2.0",
        "provenance": {"source": f"seed {seed}", "converter": "make_tiny", "quant": quant},
        "text": words.text,
        "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0},
    }
    writer = ModelWriter(
        path, metadata=metadata, tokenizer=words.tokenizer, chat_template=words.chat_template, tensors=plan
    )
    weights = RandomWeights(architecture, seed, noise=full)
    with writer:
        for tensor in plan:
            writer.write_parts(tensor.name, weights.parts(tensor))
        writer.finish()
    return path


def _formats(quant: str, architecture: str, names: Sequence[str]) -> Quantisation:
    if quant in QUANTISATIONS:
        return quantisation(quant, architecture, names)
    return Quantisation(quant, quant)


def parser(architecture: str) -> argparse.ArgumentParser:
    """The command line, with a flag for each of the architecture's hyper-parameters."""
    found = argparse.ArgumentParser(
        prog="python -m tools.make_tiny", description=(__doc__ or "").split("\n")[0]
    )
    found.add_argument("--out", type=Path, required=True)
    found.add_argument("--architecture", choices=MICRO, default="llama")
    found.add_argument(
        "--quant",
        choices=QUANTS,
        help="format of the matrices; w4a8: routed experts q4_32, others q8_32 "
        f"(default: {DEFAULT_QUANT}, full sizes {DEFAULT_FULL_QUANT})",
    )
    found.add_argument("--seed", type=int, default=0)
    found.add_argument(
        "--full", action="store_true", help=f"the published sizes; there are those of: {' '.join(FULL)}"
    )
    shape = found.add_argument_group("shape", "defaults of a micro model")
    for key, value in MICRO[architecture].items():
        flag = f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            shape.add_argument(flag, action="store_true", default=None)
        else:
            shape.add_argument(flag, type=type(value), help=f"default: {value}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--architecture", choices=MICRO, default="llama")
    known, _ = first.parse_known_args(argv)
    given = vars(parser(known.architecture).parse_args(argv))
    try:
        path = make_tiny(**{"path": given.pop("out")} | {k: v for k, v in given.items() if v is not None})
    except CeciliaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{path}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
