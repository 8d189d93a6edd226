# SPDX-License-Identifier: Apache-2.0
"""From a checked source to a finished file: plan every tensor first, then stream them one by one."""

from __future__ import annotations

import glob
import hashlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from cecilia import __version__
from cecilia.errors import CeciliaError, ModelFileError, UsageError
from cecilia.formats.l3r_layout import naming
from cecilia.formats.l3r_write import ModelWriter, PlannedTensor
from cecilia.formats.quant import FORMATS, TILE, Blocks, dequantise, pack, quantise, tensor_bytes

from .byte_vocabulary import OWN_TEMPLATES
from .checkpoint import Mapped, Vocabulary
from .open_source import open_source
from .progress import Progress
from .quantisation import Quantisation, alignment, check_experts, fitting, quantisation
from .search import SEARCHED, search
from .tensor_types import SourceType, source_type

# Rows are read, converted and written in slabs of about this many float32 bytes, however large the tensor.
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
    type: SourceType
    planned: PlannedTensor

    @property
    def nbytes(self) -> int:
        """Bytes in the target."""
        return tensor_bytes(self.planned.format, self.planned.rank, self.planned.rows, self.planned.cols)

    @property
    def changes_values(self) -> bool:
        """Whether the target's format does not hold the source's values exactly."""
        exact = (self.type.keep, "f32") if self.type.exact else ("f32",)
        return self.planned.rank == 2 and self.planned.format not in exact


@dataclass
class Report:
    """What a conversion did. Errors are squared sums over the tensors whose values changed."""

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
        """Root of (squared error / squared weights) of one tensor, or of all that changed."""
        sums = [self.errors[name]] if name else list(self.errors.values())
        error, energy = (sum(pair[i] for pair in sums) for i in (0, 1))
        return float(np.sqrt(error / energy)) if energy else 0.0


def convert(source_path: Path, out: Path, options: Options | None = None) -> Report:
    """Convert the GGUF file or Hugging Face directory at `source_path` into the `.l3r` file `out`.

    An existing `out` is replaced only by a finished one. Everything that can be refused is refused before the
    first tensor is read. Raises ModelFileError for the source, UsageError for the call, CeciliaError
    `disk_full` when the target's file system is too small.
    """
    options = options or Options()
    _check_paths(source_path, out)
    with Progress("read header", 1):
        source = open_source(source_path)
    chosen = quantisation(options.quant, source.architecture, (tensor.name for tensor in source.tensors))
    report = Report(out, notes=list(source.notes))
    with naming(source_path):
        steps = [_plan(tensor, chosen, report) for tensor in source.tensors]
        check_experts(step.planned for step in steps)
    words = _with_template(source.vocabulary(options.tokenizer), source.architecture, report)
    _check_room(out, sum(step.nbytes for step in steps))
    metadata = {
        "architecture": source.architecture,
        "hyper": source.hyper,
        "name": options.name or source.name,
        "weights": options.weights,
        "license": options.license or source.license or "unknown",
        "provenance": {
            "source": source_path.resolve().name,
            "source_sha256": digest_of(source.files),
            "converter": f"cecilia {__version__}",
            "quant": options.quant,
        },
        "text": words.text,
        "sampling": source.sampling,
    }
    with naming(source_path):
        _write(out, metadata, words, steps, report)
    return report


def _with_template(words: Vocabulary, architecture: str, report: Report) -> Vocabulary:
    """The vocabulary with a template of ours if the source has none and there is one."""
    if words.tokenizer is None or words.chat_template is not None or architecture not in OWN_TEMPLATES:
        return words
    report.notes.append("the source has no chat template; Cecilia's own for this architecture is taken")
    return replace(words, chat_template=OWN_TEMPLATES[architecture])


def digest_of(files: list[Path]) -> str:
    """The SHA-256 of one file; of several, that of what `sha256sum` prints of them, sorted by name."""
    if len(files) == 1:
        return sha256_of(files[0], "hash source")
    lines = [f"{sha256_of(path, f'hash {path.name}')}  {path.name}\n" for path in sorted(files)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


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
    if not source.is_file() and not source.is_dir():
        raise ModelFileError("file_unreadable", f"{source}: neither a file nor a directory")
    if out.is_dir():
        raise UsageError("bad_output", f"{out} is a directory")
    if not out.parent.is_dir():
        raise UsageError("bad_output", f"the directory {out.parent} does not exist")
    if out.exists() and any(out.samefile(path) for path in (source, *source.glob("*"))):
        raise UsageError("bad_output", f"{out} is the source itself or a part of it")


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


def _plan(mapped: Mapped, chosen: Quantisation, report: Report) -> Step:
    source, spec = mapped.source, mapped.spec
    kind = source_type(source.name, source.type_name)
    if spec.rank == 1:
        if kind.keep not in ("f32", "bf16"):
            raise ModelFileError(
                "unsupported_tensor_type",
                f"the vector {source.name!r} is {source.type_name}; it must be a float type",
            )
        return Step(mapped, kind, PlannedTensor(mapped.name, "f32", 1, 1, spec.cols, spec.layer))
    name = mapped.name
    wanted = chosen.wanted(name, kind.keep)
    if spec.cols % FORMATS[wanted].block:
        report.notes.append(f"{name}: rows of {spec.cols} are no multiple of 32, kept as {kind.keep}")
    fmt = fitting(spec, wanted, kind.keep)
    planned = PlannedTensor(name, fmt, 2, spec.rows, spec.cols, spec.layer, alignment(name))
    return Step(mapped, kind, planned)


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
            writer.write_parts(step.planned.name, _parts(step, report, progress))
            report.parameters += step.planned.rows * step.planned.cols
            report.weight_bytes += step.nbytes
        writer.finish()


def _parts(step: Step, report: Report, progress: Progress) -> Iterator[np.ndarray]:
    """The target's bytes of one tensor, slab by slab."""
    planned = step.planned
    slab = max(_SLAB_BYTES // (4 * planned.cols) // TILE, 1) * TILE  # whole tiles, so that packed slabs join
    for start in range(0, planned.rows, slab):
        raw = step.mapped.source.read(start, min(start + slab, planned.rows))
        part = _packed(step, raw, report)
        yield part
        progress.advance(part.nbytes, f"{planned.name} {planned.format}")


def _packed(step: Step, raw: np.ndarray, report: Report) -> np.ndarray:
    """Source rows as the target's bytes; what that changes is added to the report.

    Raises ModelFileError when a value is not finite.
    """
    planned = step.planned
    exact = _finite(step, step.type.decode(raw, planned.cols))
    if planned.rank == 1:
        (vector,) = dequantise(exact)
        return vector if step.mapped.values is None else _finite_vector(step, step.mapped.values(vector))
    if planned.format == exact.format:
        return pack(exact)
    weights = dequantise(exact)
    if planned.format == step.type.keep:
        blocks = _finite(step, step.type.fit(raw, planned.cols))
    elif planned.format in SEARCHED:
        blocks = search(weights, planned.format)
    else:
        blocks = quantise(weights, planned.format)
    if step.changes_values:
        _count_error(report, planned.name, weights, blocks)
    return pack(blocks)


def _finite(step: Step, blocks: Blocks) -> Blocks:
    """The blocks themselves; raises ModelFileError when a value is not finite."""
    if blocks.format == "bf16":
        finite = bool(((blocks.q & 0x7F80) != 0x7F80).all())
    else:
        numbers = [blocks.q] if blocks.format == "f32" else [blocks.d, blocks.m]
        finite = all(np.isfinite(part).all() for part in numbers if part is not None)
    if not finite:
        raise _not_finite(step)
    return blocks


def _finite_vector(step: Step, vector: np.ndarray) -> np.ndarray:
    if not np.isfinite(vector).all():
        raise _not_finite(step)
    return vector


def _not_finite(step: Step) -> ModelFileError:
    return ModelFileError(
        "bad_weights", f"the tensor {step.mapped.source.name!r} holds values that are not finite"
    )


def _count_error(report: Report, name: str, weights: np.ndarray, blocks: Blocks) -> None:
    wide = weights.astype(np.float64)
    error, energy = report.errors.get(name, (0.0, 0.0))
    error += float(np.square(dequantise(blocks) - wide).sum())
    report.errors[name] = (error, energy + float(np.square(wide).sum()))
