# SPDX-License-Identifier: Apache-2.0
"""From a checked source to a finished file: plan every tensor first, then stream them one by one."""

from __future__ import annotations

import glob
import hashlib
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cecilia import __version__
from cecilia.errors import CeciliaError, ModelFileError, UsageError
from cecilia.formats.l3r_layout import naming
from cecilia.formats.l3r_write import ModelWriter, PlannedTensor
from cecilia.formats.quant import FORMATS, TILE, Blocks, dequantise, pack, quantise, tensor_bytes

from . import arch_llama
from .arch_llama import Mapped
from .gguf_blocks import SourceType, source_type
from .gguf_source import GgufSource, SourceTensor, shown
from .progress import Progress
from .vocabulary import Vocabulary, sampling_defaults, vocabulary

QUANTISATIONS = {"keep": None, "bf16": "bf16", "f32": "f32", "q8": "q8_32", "q4": "q4_32"}
ARCHITECTURES = {arch_llama.NAME: arch_llama}
# Rows are decoded in slabs of about this many float32 bytes, so that memory stays near one packed tensor.
_SLAB_BYTES = 8 << 20
_HASH_CHUNK = 1 << 20
_STALE_SECONDS = 3600


@dataclass(frozen=True)
class Options:
    """What the caller chooses; None means: as the source has it."""

    quant: str = "keep"
    tokenizer: str | None = None
    name: str | None = None
    weights: str = "official"
    license: str | None = None


@dataclass(frozen=True)
class Step:
    """One tensor from source to target."""

    mapped: Mapped
    source: SourceTensor
    type: SourceType
    planned: PlannedTensor

    @property
    def nbytes(self) -> int:
        """Bytes in the target."""
        return tensor_bytes(self.planned.format, self.planned.rank, self.planned.rows, self.planned.cols)

    @property
    def changes_values(self) -> bool:
        """Whether the target's format is another than the one that holds the source's values exactly."""
        return self.planned.rank == 2 and self.planned.format not in (self.type.keep, "f32")


@dataclass
class Report:
    """What a conversion did. Errors are squared sums over the requantised tensors."""

    path: Path
    parameters: int = 0
    weight_bytes: int = 0
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def bits_per_weight(self) -> float:
        """Mean over all tensors, scales and padding included."""
        return 8 * self.weight_bytes / self.parameters

    def relative_rms(self, name: str | None = None) -> float:
        """Root of (squared error / squared weights) of one tensor, or of all requantised ones."""
        sums = [self.errors[name]] if name else list(self.errors.values())
        error, energy = (sum(pair[i] for pair in sums) for i in (0, 1))
        return float(np.sqrt(error / energy)) if energy else 0.0


def convert(source_path: Path, out: Path, options: Options | None = None) -> Report:
    """Convert the GGUF at `source_path` into the `.l3r` file `out`, replaced only by a finished one.

    Everything that can be refused is refused before the first tensor is read. Raises ModelFileError for the
    source, UsageError for the call, CeciliaError `disk_full` when the target's file system is too small.
    """
    options = options or Options()
    _check_paths(source_path, out)
    report = Report(out)
    with naming(source_path):
        with Progress("read header", source_path.stat().st_size):
            source = GgufSource(source_path)
        architecture = source.text("general.architecture")
        if architecture not in ARCHITECTURES:
            raise ModelFileError(
                "unsupported_architecture",
                f"the architecture {shown(architecture)}; supported: {' '.join(ARCHITECTURES)}",
            )
        arch = ARCHITECTURES[architecture]
        hyper = arch.hyper(source)
        mapped = list(arch.tensors(hyper))
        arch.check_tensors(source, mapped)
        steps = [_plan(tensor, source.tensors[tensor.source], options.quant, report) for tensor in mapped]
    words = vocabulary(source, options.tokenizer, hyper["vocab"])
    _check_room(out, sum(step.nbytes for step in steps))
    metadata = {
        "architecture": architecture,
        "hyper": hyper,
        "name": options.name or source.text("general.name") or source_path.stem,
        "weights": options.weights,
        "license": options.license or source.text("general.license") or "unknown",
        "provenance": {
            "source": source_path.name,
            "source_sha256": sha256_of(source_path, "hash source"),
            "converter": f"cecilia {__version__}",
            "quant": options.quant,
        },
        "text": words.text,
        "sampling": sampling_defaults(source),
    }
    _write(out, metadata, words, steps, report)
    return report


def sha256_of(path: Path, phase: str) -> str:
    """The digest of a file, with progress."""
    digest = hashlib.sha256()
    with path.open("rb") as file, Progress(phase, path.stat().st_size) as progress:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
            progress.advance(len(chunk))
    return digest.hexdigest()


def _check_paths(source: Path, out: Path) -> None:
    if not source.exists():
        raise ModelFileError("file_unreadable", f"{source}: no such file")
    if not source.is_file():
        raise ModelFileError("file_unreadable", f"{source}: not a file")
    if out.is_dir():
        raise UsageError("bad_output", f"{out} is a directory")
    if not out.parent.is_dir():
        raise UsageError("bad_output", f"the directory {out.parent} does not exist")
    if out.exists() and out.samefile(source):
        raise UsageError("bad_output", f"{out} is the source itself")


def _check_room(out: Path, needed: int) -> None:
    """Refuse early what could not be finished, after removing what killed conversions of this file left."""
    for stale in out.parent.glob(f".{glob.escape(out.name)}.*.partial"):
        if time.time() - stale.stat().st_mtime > _STALE_SECONDS:  # a younger one may be at work
            stale.unlink(missing_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise CeciliaError(
            "disk_full", f"{out.parent}: {needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free"
        )


def _plan(mapped: Mapped, source: SourceTensor, quant: str, report: Report) -> Step:
    kind = source_type(source.name, source.type_name)
    if len(mapped.shape) == 1:
        if kind.keep not in ("f32", "bf16"):
            raise ModelFileError(
                "unsupported_tensor_type",
                f"the vector {source.name!r} is {source.type_name}; it must be a float type",
            )
        (cols,) = mapped.shape
        return Step(mapped, source, kind, PlannedTensor(mapped.name, "f32", 1, 1, cols, mapped.layer))
    rows, cols = mapped.shape
    wanted = QUANTISATIONS[quant] or kind.keep
    if cols % FORMATS[wanted].block:
        report.notes.append(f"{mapped.name}: rows of {cols} are no multiple of 32, kept as {kind.keep}")
        wanted = kind.keep
    return Step(mapped, source, kind, PlannedTensor(mapped.name, wanted, 2, rows, cols, mapped.layer))


def _write(out: Path, metadata: dict[str, Any], words: Vocabulary, steps: list[Step], report: Report) -> None:
    total = sum(step.nbytes for step in steps)
    with (
        ModelWriter(
            out,
            metadata=metadata,
            tokenizer=words.tokenizer,
            chat_template=words.chat_template,
            tensors=[step.planned for step in steps],
        ) as writer,
        Progress("convert", total) as progress,
    ):
        for step in steps:
            writer.write(step.planned.name, _tensor(step, report))
            report.parameters += step.planned.rows * step.planned.cols
            report.weight_bytes += step.nbytes
            progress.advance(step.nbytes, f"{step.planned.name} {step.planned.format}")
        writer.finish()


def _tensor(step: Step, report: Report) -> np.ndarray:
    """The target's bytes of one tensor."""
    cols = step.planned.cols
    if step.planned.rank == 1:
        (vector,) = dequantise(_decoded(step, np.asarray(step.source.rows)))
        return vector
    packed = np.empty(step.nbytes, np.uint8)
    order = step.mapped.row_order()
    slab = max(_SLAB_BYTES // (4 * cols) // TILE, 1) * TILE  # whole tiles, so that packed slabs join
    at = 0
    for start in range(0, step.planned.rows, slab):
        raw = np.asarray(step.source.rows)[order[start : start + slab]]
        part = pack(_target(step, _decoded(step, raw), report))
        packed[at : at + len(part)] = part
        at += len(part)
    return packed


def _decoded(step: Step, raw: np.ndarray) -> Blocks:
    """Source rows as blocks; raises ModelFileError when a value is not finite."""
    blocks = step.type.decode(raw, step.planned.cols)
    if blocks.format == "bf16":
        finite = bool(((blocks.q & 0x7F80) != 0x7F80).all())
    else:
        numbers = [blocks.q] if blocks.format == "f32" else [blocks.d, blocks.m]
        finite = all(np.isfinite(part).all() for part in numbers if part is not None)
    if not finite:
        raise ModelFileError(
            "bad_weights", f"the tensor {step.source.name!r} holds values that are not finite"
        )
    return blocks


def _target(step: Step, exact: Blocks, report: Report) -> Blocks:
    """The blocks in the target's format; what that changes is added to the report."""
    if exact.format == step.planned.format:
        return exact
    weights = dequantise(exact)
    blocks = quantise(weights, step.planned.format)
    if step.changes_values:
        wide = weights.astype(np.float64)
        error, energy = report.errors.get(step.planned.name, (0.0, 0.0))
        error += float(np.square(dequantise(blocks) - wide).sum())
        report.errors[step.planned.name] = (error, energy + float(np.square(wide).sum()))
    return blocks
