# SPDX-License-Identifier: Apache-2.0
"""Model files made from another: the same model, its matrices in other formats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from cecilia.formats.l3r import ModelFile, open_model
from cecilia.formats.l3r_layout import PlannedTensor
from cecilia.formats.l3r_write import ModelWriter
from cecilia.formats.quant import dequantise, pack, quantise, unpack


def round_to_nearest(source: Path, like: Path, out: Path) -> Path:
    """The weights of the file `source` in the formats of the file `like`, by plain rounding."""
    with open_model(source) as values, open_model(like) as model:
        return _write(values, model, plan_of(model), out)


def dequantised(source: Path, out: Path) -> Path:
    """The file `source` with the values its matrices stand for in f32: the same weights, float arithmetic."""
    with open_model(source) as model:
        plan = [replace(tensor, format="f32") for tensor in plan_of(model)]
        return _write(model, model, plan, out)


def plan_of(model: ModelFile) -> list[PlannedTensor]:
    """The tensors of a file, to be written again."""
    return [PlannedTensor(e.name, e.format, e.rank, e.rows, e.cols, e.layer) for e in model.tensors.values()]


def _write(values: ModelFile, head: ModelFile, plan: Iterable[PlannedTensor], out: Path) -> Path:
    """The tensors of `values` as planned, everything else from `head`."""
    with ModelWriter(
        out,
        metadata=head.metadata,
        tokenizer=head.tokenizer,
        chat_template=head.chat_template,
        tensors=list(plan),
    ) as writer:
        for planned in plan:
            writer.write(planned.name, _in_format(values, planned))
        writer.finish()
    return out


def _in_format(values: ModelFile, planned: PlannedTensor) -> np.ndarray:
    raw = np.asarray(values.data(planned.name))
    if planned.rank == 1:
        vector: np.ndarray = raw.view(np.float32)
        return vector
    blocks = unpack(raw, values.tensors[planned.name].format, planned.rows, planned.cols)
    return pack(quantise(dequantise(blocks), planned.format))
