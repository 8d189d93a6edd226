# SPDX-License-Identifier: Apache-2.0
"""Bundles that were built (`make bundle`) beside the tree they come from; skipped where there is none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from portable.target import TARGETS, Target
from tests.portable.fake_bundle import start
from tests.tools import tiny_gguf
from tools.convert import __main__ as convert


def built(root: Path, target: Target) -> Path:
    """The bundle of this state of the tree."""
    found = sorted((root / "portable/dist").glob(f"cecilia-*-{target.name}"))
    if not found:
        pytest.skip(f"no bundle for {target.name} was built")
    for path in (found[-1] / "app").rglob("*.py"):
        own = root / path.relative_to(found[-1] / "app")
        if not own.is_file() or own.read_bytes() != path.read_bytes():
            pytest.skip(f"{found[-1].name} is of another state of the tree")
    return found[-1]


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_it_converts_to_the_bytes_the_tree_converts_to(root: Path, tmp_path: Path, target: Target) -> None:
    bundle = built(root, target)
    emulator = "" if target.native else shutil.which(f"qemu-{target.name}")
    if emulator is None:
        pytest.skip(f"nothing here runs programs of {target.name}")
    source = tmp_path / "tiny.gguf"
    tiny_gguf.write(source, GGMLQuantizationType.Q4_0)
    flags = [str(source), "--quant", "q4", "--out"]
    assert convert.main([*flags, str(tmp_path / "tree.l3r")]) == 0
    runner = f"{emulator} -cpu cortex-a76" if emulator else ""
    done = start(bundle / "cecilia-convert", *flags, str(tmp_path / "bundle.l3r"), CECILIA_RUNNER=runner)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "bundle.l3r").read_bytes() == (tmp_path / "tree.l3r").read_bytes()
