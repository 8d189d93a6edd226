# SPDX-License-Identifier: Apache-2.0
"""Show what a `.l3r` model file holds: `python -m tools.inspect FILE [--verify] [--tensors] [--json]`.

Exit codes: 0 the file is sound as far as it was checked, 3 it is not, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from cecilia.errors import CeciliaError
from cecilia.formats.l3r import ModelFile, open_model


def describe(model: ModelFile, *, verified: bool, tensors: bool) -> dict[str, Any]:
    """Everything the tool prints, as JSON-able data. Bits per weight count padding and scales."""
    formats: dict[str, dict[str, Any]] = {}
    for entry in model.tensors.values():
        row = formats.setdefault(entry.format, {"tensors": 0, "weights": 0, "bytes": 0})
        row["tensors"] += 1
        row["weights"] += entry.rows * entry.cols
        row["bytes"] += entry.nbytes
    for row in formats.values():
        row["bits_per_weight"] = round(row["bytes"] * 8 / row["weights"], 3)
    weights = sum(row["weights"] for row in formats.values())
    nbytes = sum(row["bytes"] for row in formats.values())
    report: dict[str, Any] = {
        "path": str(model.path),
        "bytes": model.nbytes,
        "digest": model.digest,
        "verified": verified,
        "metadata": model.metadata,
        "sections": [
            {"name": s.name, "offset": s.offset, "bytes": s.nbytes, "sha256": s.sha256.hex()}
            for s in model.sections.values()
            if s.offset
        ],
        "formats": formats,
        "total": {
            "tensors": len(model.tensors),
            "weights": weights,
            "bytes": nbytes,
            "bits_per_weight": round(nbytes * 8 / weights, 3),
        },
        "slices": len(model.slices),
        "leaves": sum(s.leaves for s in model.slices),
    }
    if tensors:
        report["tensors"] = [
            {
                "name": e.name,
                "format": e.format,
                "shape": [e.cols] if e.rank == 1 else [e.rows, e.cols],
                "layer": e.layer,
                "offset": e.offset,
                "bytes": e.nbytes,
            }
            for e in model.tensors.values()
        ]
    return report


def _format_rows(report: dict[str, Any]) -> list[str]:
    lines = [f"{'format':<8} {'tensors':>8} {'weights':>14} {'bytes':>14} {'bits/weight':>12}"]
    for name, row in [*report["formats"].items(), ("total", report["total"])]:
        lines.append(
            f"{name:<8} {row['tensors']:>8} {row['weights']:>14} {row['bytes']:>14} "
            f"{row['bits_per_weight']:>12.3f}"
        )
    return lines


def _render(report: dict[str, Any]) -> str:
    """The report for a reader. Strings from the file are shown as JSON, so none can move the cursor."""
    checked = "every byte" if report["verified"] else "all but tensor data"
    lines = [
        f"file     {report['path']}",
        f"bytes    {report['bytes']}",
        f"digest   {report['digest']}",
        f"checked  {checked}",
        "",
        "metadata",
    ]
    for key, value in report["metadata"].items():
        lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    lines += ["", f"{'section':<14} {'offset':>10} {'bytes':>10}  sha256"]
    for s in report["sections"]:
        lines.append(f"{s['name']:<14} {s['offset']:>10} {s['bytes']:>10}  {s['sha256']}")
    lines += ["", *_format_rows(report), "", f"{report['slices']} slices, {report['leaves']} leaves"]
    if "tensors" in report:
        lines += ["", f"{'layer':>5} {'format':<8} {'shape':>16} {'offset':>12} {'bytes':>12}  name"]
        for t in report["tensors"]:
            shape = " x ".join(map(str, t["shape"]))
            place = f"{t['offset']:>12} {t['bytes']:>12}"
            lines.append(f"{t['layer']:>5} {t['format']:<8} {shape:>16} {place}  {t['name']}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.inspect", description="Show what a .l3r file holds."
    )
    parser.add_argument("file", metavar="FILE", help="the model file")
    parser.add_argument("--verify", action="store_true", help="also check every byte of tensor data")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        with open_model(args.file, verify=args.verify) as model:
            report = describe(model, verified=args.verify, tensors=args.tensors)
    except CeciliaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    text = json.dumps(report, indent=2) if args.json else _render(report)
    try:
        print(text.encode("ascii", "backslashreplace").decode(), flush=True)
    except BrokenPipeError:  # the reader of a pipe has seen enough; keep the exit from flushing again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
