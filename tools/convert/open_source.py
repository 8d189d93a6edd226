# SPDX-License-Identifier: Apache-2.0
"""Open a source by what it is: a directory is a Hugging Face checkpoint, a file a GGUF."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from cecilia.arch import architecture
from cecilia.errors import ModelFileError
from cecilia.formats.l3r_layout import naming

from . import gguf_dense, gguf_vocabulary, hf_config, hf_vocabulary
from .checkpoint import Checkpoint, Mapped, check_shape
from .gguf_source import GgufSource
from .hf_source import HuggingFaceSource

_HEAD = "lm_head.weight"
# Buffers that old checkpoints store though they follow from the configuration.
_DERIVED = ".rotary_emb.inv_freq"


def open_source(path: Path) -> Checkpoint:
    """The checkpoint at `path`, every tensor accounted for; raises ModelFileError naming the file."""
    with naming(path):
        return _huggingface(path) if path.is_dir() else _gguf(path)


def _gguf(path: Path) -> Checkpoint:
    source = GgufSource(path)
    arch = gguf_dense.checked_architecture(source)
    hyper = gguf_dense.hyper(source, arch)
    return Checkpoint(
        files=[path],
        architecture=arch,
        hyper=hyper,
        tensors=gguf_dense.mapped(source, arch, hyper),
        vocabulary=partial(gguf_vocabulary.vocabulary, source, hyper["vocab"]),
        name=source.text("general.name") or path.stem,
        license=source.text("general.license"),
        sampling=gguf_vocabulary.sampling_defaults(source),
    )


def _huggingface(path: Path) -> Checkpoint:
    source = HuggingFaceSource(path)
    arch = hf_config.architecture(source.config)
    hyper = hf_config.hyper(source.config)
    return Checkpoint(
        files=source.files,
        architecture=arch,
        hyper=hyper,
        tensors=_huggingface_tensors(source, arch, hyper),
        vocabulary=partial(hf_vocabulary.vocabulary, source, hyper["vocab"]),
        name=path.resolve().name,
        sampling=hf_vocabulary.sampling_defaults(source),
    )


def _huggingface_tensors(source: HuggingFaceSource, arch: str, hyper: dict[str, Any]) -> list[Mapped]:
    """Every tensor of the target; raises ModelFileError unless the source holds exactly these."""
    module = architecture(arch)
    wanted = module.tensors(module.spec_from(hyper))
    ignored = {name for name in source.tensors if name.endswith(_DERIVED)}
    if hyper["tied"]:
        ignored.add(_HEAD)  # some checkpoints store the embedding a second time under this name
    extra = sorted(source.tensors.keys() - wanted.keys() - ignored)
    if extra:
        raise ModelFileError(
            "unsupported_model",
            f"the tensor {extra[0]!r} (one of {len(extra)} too many) has no place in the architecture {arch}",
        )
    found = []
    for name, spec in wanted.items():
        if name not in source.tensors:
            raise ModelFileError("missing_tensor", f"no safetensors file has the tensor {name}")
        tensor = source.tensors[name]
        check_shape(name, tensor.shape, spec)
        found.append(Mapped(name, spec, tensor))
    return found
