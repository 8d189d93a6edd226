# SPDX-License-Identifier: Apache-2.0
"""Open a source by what it is: a directory is a Hugging Face checkpoint, a file a GGUF."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from cecilia.errors import ModelFileError
from cecilia.formats.l3r_layout import naming

from . import gguf_dense, gguf_ling3, gguf_vocabulary, hf_config, hf_dense, hf_ling3, hf_vocabulary
from .checkpoint import Checkpoint, shown
from .gguf_source import GgufSource
from .hf_source import HuggingFaceSource


def open_source(path: Path) -> Checkpoint:
    """The checkpoint at `path`, every tensor accounted for; raises ModelFileError naming the file."""
    with naming(path):
        return _huggingface(path) if path.is_dir() else _gguf(path)


def _gguf(path: Path) -> Checkpoint:
    source = GgufSource(path)
    name = source.text("general.architecture")
    if name == gguf_ling3.GGUF_NAME:
        arch, hyper = "ling3", gguf_ling3.hyper(source)
        tensors, notes = gguf_ling3.mapped(source, hyper), gguf_ling3.notes(source, hyper)
    elif name in gguf_dense.ARCHITECTURES:
        arch, hyper = name, gguf_dense.hyper(source, name)
        tensors, notes = gguf_dense.mapped(source, name, hyper), []
    else:
        known = " ".join((*gguf_dense.ARCHITECTURES, gguf_ling3.GGUF_NAME))
        raise ModelFileError(
            "unsupported_architecture", f"the architecture {shown(name)}; supported: {known}"
        )
    return Checkpoint(
        files=[path],
        architecture=arch,
        hyper=hyper,
        tensors=tensors,
        vocabulary=partial(gguf_vocabulary.vocabulary, source, hyper["vocab"], arch),
        name=source.text("general.name") or path.stem,
        license=source.text("general.license"),
        sampling=gguf_vocabulary.sampling_defaults(source),
        notes=notes,
    )


def _huggingface(path: Path) -> Checkpoint:
    source = HuggingFaceSource(path)
    arch = hf_config.architecture(source.config)
    family = hf_ling3 if arch == "ling3" else hf_dense
    hyper = family.hyper(source.config)
    return Checkpoint(
        files=source.files,
        architecture=arch,
        hyper=hyper,
        tensors=family.mapped(source, arch, hyper),
        vocabulary=partial(hf_vocabulary.vocabulary, source, hyper["vocab"], arch),
        name=path.resolve().name,
        sampling=hf_vocabulary.sampling_defaults(source),
        notes=hf_ling3.notes(source, hyper) if arch == "ling3" else [],
    )
