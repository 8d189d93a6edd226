# SPDX-License-Identifier: Apache-2.0
"""What goes into a bundle and what stays out; and that nothing of ours needs what stays out."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path, PurePosixPath

import pytest

from portable.collect import _NO_STDLIB, copy, files, keeps_own, keeps_stdlib, keeps_wheel
from portable.wheels import locked

# Every module of ours, and one conversion and one chat template, with the left-out modules made unimportable.
_PROGRAM = """\
import importlib, pathlib, pkgutil, sys, tempfile
for name in sys.argv[1].split():
    sys.modules[name] = None
for top in ("cecilia", "server", "tools.convert"):
    for found in pkgutil.walk_packages(importlib.import_module(top).__path__, top + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
import gguf, numpy, safetensors, tqdm, yaml
from tools import make_tiny
with tempfile.TemporaryDirectory() as folder:
    path = folder + "/tiny.l3r"
    assert make_tiny.main(["--architecture", "llama", "--out", path]) == 0
    from cecilia.engine.load import load
    load(path, threads=1).close()
"""


def canonical(name: str) -> str:
    """A distribution's name as PEP 503 normalises it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_nothing_of_ours_needs_what_is_left_out(root: Path) -> None:
    inside = {canonical(name) for name in locked("core")}
    # Whatever else is installed here, for the tests or as a dependency, is not in a bundle either.
    outside = {
        name
        for name, owners in packages_distributions().items()
        if name.isidentifier() and not inside & {canonical(owner) for owner in owners}
    }
    assert "pytest" in outside
    assert "numpy" not in outside
    blocked = " ".join(sorted(_NO_STDLIB | outside))
    done = subprocess.run(
        [sys.executable, "-S", "-c", _PROGRAM, blocked],
        cwd=root,
        env={"PYTHONPATH": ":".join([str(root), *sys.path[1:]]), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("asyncio/base_events.py", True),
        ("lib-dynload/_ssl.cpython-311-aarch64-linux-gnu.so", True),
        ("lib-dynload/_sqlite3.cpython-311-aarch64-linux-gnu.so", False),
        ("lib-dynload/_codecs_jp.cpython-311-x86_64-linux-gnu.so", False),
        ("_sysconfigdata__aarch64-linux-gnu.py", True),
        ("config-3.11-aarch64-linux-gnu/Makefile", False),
        ("unittest/case.py", False),
        ("ctypes/test/test_byteswap.py", False),
        ("lzma.py", False),
        ("EXTERNALLY-MANAGED", False),
        ("json/__pycache__/decoder.cpython-311.pyc", False),
        ("LICENSE.txt", True),
    ],
)
def test_standard_library(path: str, kept: bool) -> None:
    assert keeps_stdlib(PurePosixPath(path)) == kept


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("numpy/_core/_multiarray_umath.cpython-311-aarch64-linux-gnu.so", True),
        ("numpy/_core/_simd.cpython-311-aarch64-linux-gnu.so", False),
        ("numpy/_core/tests/test_array.py", False),
        ("numpy/_core/include/numpy/arrayobject.h", False),
        ("numpy/__init__.pyi", False),
        ("numpy.libs/libgfortran-daac5196.so.5.0.0", True),
        ("uvloop/loop.pyx", False),
        ("numpy-2.4.6.dist-info/METADATA", True),
        ("numpy-2.4.6.dist-info/RECORD", False),
        ("numpy-2.4.6.dist-info/licenses/LICENSE.txt", False),
        ("gguf/scripts/../../bin/gguf-dump", False),
    ],
)
def test_wheels(path: str, kept: bool) -> None:
    assert keeps_wheel(PurePosixPath(path)) == kept


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("engine/load.py", True),
        ("pages/chat.html", True),
        ("_kernels/linear.pyx", False),
        ("_kernels/c/table.h", False),
        ("_kernels/linear.cpython-311-x86_64-linux-gnu.so", False),
        ("engine/__pycache__/load.cpython-311.pyc", False),
        (".hidden/x.py", False),
    ],
)
def test_our_own(path: str, kept: bool) -> None:
    assert keeps_own(PurePosixPath(path)) == kept


def test_copying_follows_links_and_orders_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "b").mkdir(parents=True)
    (source / "b/one.py").write_text("1", encoding="utf-8")
    (source / "a.py").symlink_to("b/one.py")
    (source / "dangling.py").symlink_to("nowhere")
    copy(source, tmp_path / "copy", lambda _: True)
    assert [str(path) for path in files(tmp_path / "copy")] == ["a.py", "b/one.py"]
    assert not (tmp_path / "copy/a.py").is_symlink()
