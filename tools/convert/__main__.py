# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.convert SRC --out FILE.l3r`: make a `.l3r` of a GGUF file or Hugging Face directory.

Ctrl-C, SIGTERM, a full disk or a damaged source leave no half file. After `kill -9` the hidden
`.FILE.l3r.*.partial` beside the target remains; nothing reads it, and the next conversion removes it once
it is an hour old.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cecilia.errors import CeciliaError
from cecilia.formats.l3r_metadata import WEIGHTS

from .interrupt import Terminated, sigterm_raises
from .pipeline import Options, Report, convert
from .quantisation import QUANTISATIONS


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m tools.convert", description="Convert a checkpoint into a .l3r file."
    )
    found.add_argument(
        "source",
        type=Path,
        metavar="SRC",
        help="a GGUF file, or a directory with config.json and safetensors",
    )
    found.add_argument(
        "--out", type=Path, required=True, metavar="FILE.l3r", help="an existing file is replaced"
    )
    found.add_argument(
        "--quant",
        choices=sorted(QUANTISATIONS),
        default="keep",
        help="keep (default) changes no value that a format of ours can hold; q8 and q4 search scales",
    )
    found.add_argument(
        "--tokenizer",
        metavar="PATH|byte|none",
        help="default: the source's own; else a tokenizer.json, bytes, nothing",
    )
    found.add_argument("--name", help="the model's name; default: the source's")
    found.add_argument("--license", help="the licence of the weights; default: what the GGUF states")
    found.add_argument(
        "--weights", choices=WEIGHTS, default="official", help="what the weights are (default: official)"
    )
    return found


def print_report(report: Report) -> None:
    """Size, bits a weight and what requantising cost, on stdout."""
    for note in report.notes:
        print(f"note: {note}")
    megabytes = report.path.stat().st_size / 1e6
    print(f"{report.path}: {report.parameters:,} weights, {megabytes:.1f} MB")
    print(f"bits a weight: {report.bits_per_weight:.2f}")
    if not report.errors:
        print("values: unchanged")
        return
    for name in report.errors:
        print(f"{name}: relative RMS error {report.relative_rms(name):.5f}")
    worst = max(report.errors, key=report.relative_rms)
    print(
        f"relative RMS error: {report.relative_rms():.5f}; worst {report.relative_rms(worst):.5f} in {worst}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit codes are those of cecilia.errors, 130 and 143 when interrupted."""
    args = parser().parse_args(argv)
    options = Options(args.quant, args.tokenizer, args.name, args.weights, args.license)
    try:
        with sigterm_raises():
            report = convert(args.source, args.out, options)
        print_report(report)
    except CeciliaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"io_error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: no file was written", file=sys.stderr)
        return 130
    except Terminated:
        print("terminated: no file was written", file=sys.stderr)
        return 143
    return 0


if __name__ == "__main__":
    sys.exit(main())
