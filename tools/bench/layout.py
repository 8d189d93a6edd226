# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.bench.layout`: the candidate weight layouts, timed here and estimated for an ARM core.

layout.c is compiled twice: natively, to be run; and for aarch64 with dot products, whose inner loops llvm-mca
then estimates for a Neoverse N1 (a model of an out-of-order core, no measurement of any board).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from cecilia.errors import CeciliaError
from tools.bench import system

SOURCE = Path(__file__).with_suffix(".c")
MCA = ("llvm-mca-19", "llvm-mca")
CROSS = "aarch64-linux-gnu-gcc"
CORE = "neoverse-n1"
BLOCK = 32

REGION = re.compile(r"// LLVM-MCA-BEGIN (\w+)\n(.*?)// LLVM-MCA-END", re.S)
THROUGHPUT = re.compile(r"Block RThroughput: ([\d.]+)")


def regions(assembly: str) -> Iterator[tuple[str, str]]:
    """(name, instructions) of each marked loop body, the compiler's own comments left out."""
    for name, body in REGION.findall(assembly):
        yield name, "".join(line + "\n" for line in body.splitlines() if not re.match(r"\s*(//|#)", line))


def weights_per_cycle(name: str, report: str) -> float:
    """Weights of one block of a tile over the cycles it takes at least; `name` is like q4_16x4."""
    found = THROUGHPUT.search(report)
    if found is None:
        raise CeciliaError("estimate_failed", f"{name}: llvm-mca gives no throughput")
    rows = int(name.split("_")[1].split("x")[0])
    return rows * BLOCK / float(found.group(1))


def native(folder: Path) -> None:
    """Compile, check and time on this machine; the program prints its own rows."""
    print(
        "| instruction set | weights | rows x K bytes | G multiply-adds/s, one thread, min / median / max |"
    )
    print("|---|---|---|---|", flush=True)
    _run("gcc", "-O3", "-o", str(folder / "layout"), str(SOURCE), "-lm")
    print(_run(str(folder / "layout")), end="")


def estimate(folder: Path) -> None:
    """Compile for aarch64 and print what llvm-mca makes of each loop; say so when a tool is not installed."""
    mca = next((name for name in MCA if shutil.which(name)), None)
    if mca is None or shutil.which(CROSS) is None:
        print(f"\nno estimate for aarch64: {CROSS} and llvm-mca are needed")
        return
    target = folder / "layout.s"
    _run(CROSS, "-march=armv8.2-a+dotprod", "-O3", "-S", "-o", str(target), str(SOURCE))
    print(f"\n| {CORE} (llvm-mca) | weights per cycle, at most |\n|---|---|")
    for name, body in regions(target.read_text(encoding="utf-8")):
        report = _run(mca, "-mtriple=aarch64", f"-mcpu={CORE}", text=body)
        print(f"| {name} | {weights_per_cycle(name, report):.1f} |")


def _run(*command: str, text: str = "") -> str:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise CeciliaError("tool_missing", f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise CeciliaError(
            "tool_failed", f"{command[0]}: {error.stderr.strip().splitlines()[-1:]}"
        ) from error
    return done.stdout


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables as Markdown; exit codes are those of cecilia.errors."""
    about = "Candidate weight layouts, timed and estimated."
    argparse.ArgumentParser(prog="python -m tools.bench.layout", description=about).parse_args(argv)
    system.raise_priority()
    print(system.machine() + "\n")
    try:
        with tempfile.TemporaryDirectory() as folder:
            native(Path(folder))
            estimate(Path(folder))
    except CeciliaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
