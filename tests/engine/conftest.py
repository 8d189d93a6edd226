# SPDX-License-Identifier: Apache-2.0
"""A tiny chat model, loaded once, and a way to make damaged copies of its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cecilia.engine.generate import Engine
from cecilia.engine.load import load
from cecilia.formats.l3r import open_model
from cecilia.formats.l3r_write import ModelWriter, PlannedTensor
from tools.make_tiny import make_tiny

Edit = Callable[[dict[str, Any], dict[str, tuple[PlannedTensor, bytes]]], None]


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vocabulary is exactly the tokenizer's: every id has a meaning."""
    return make_tiny(tmp_path_factory.mktemp("engine") / "tiny.l3r", vocab=259, context=256)


@pytest.fixture(scope="session")
def loaded(tiny_path: Path) -> Iterator[Engine]:
    engine = load(tiny_path, threads=1)
    yield engine
    engine.close()


@pytest.fixture
def engine(loaded: Engine) -> Engine:
    """The tiny engine with an empty session."""
    runner_of(loaded).reset()
    return loaded


def runner_of(engine: Engine) -> Any:
    """The runner inside, to look at the session."""
    return engine._runner


def rewrite(source: Path, target: Path, edit: Edit, *, tokenizer: bool = True, template: bool = True) -> Path:
    """Write a copy of `source` after `edit(metadata, tensors)`; digests are those of the edited copy."""
    with open_model(source) as file:
        metadata = dict(file.metadata)
        tensors = {
            name: (PlannedTensor(name, t.format, t.rank, t.rows, t.cols, t.layer), bytes(file.data(name)))
            for name, t in file.tensors.items()
        }
        edit(metadata, tensors)
        plan = [planned for planned, _ in tensors.values()]
        writer = ModelWriter(
            target,
            metadata=metadata,
            tokenizer=file.tokenizer if tokenizer else None,
            chat_template=file.chat_template if template else None,
            tensors=plan,
        )
        with writer:
            for planned, data in tensors.values():
                writer.write(planned.name, data)
            writer.finish()
    return target
