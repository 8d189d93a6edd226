# SPDX-License-Identifier: Apache-2.0
"""Our extension modules, compiled for a target by setup.py under the native interpreter.

setuptools takes every name and flag from the target's `_sysconfigdata`, so the files come out as if they had
been built there; only compiler and linker are named by hand.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from cecilia.errors import CeciliaError
from portable.interpreter import Interpreter
from portable.run import run
from portable.target import PYTHON, Target

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".pyi", ".pyx", ".pxd", ".c", ".h"}


def sources(root: Path = ROOT) -> list[Path]:
    """What the extensions are made from, relative to `root`."""
    package = (path for path in (root / "cecilia").rglob("*") if path.suffix in SUFFIXES)
    found = [root / name for name in ("setup.py", "pyproject.toml", "README.md")]
    return sorted(path.relative_to(root) for path in (*found, *package))


def build(target: Target, root: Path, interpreter: Interpreter, tools: Path, folder: Path) -> Path:
    """Compile into `folder / TARGET-HASH` and return it; done once for the same sources and compiler.

    `root` holds the target's Python headers, `tools` the unpacked wheels of setuptools and Cython.
    """
    if shutil.which(target.tool("gcc")) is None:
        package = "gcc" if target.native else f"gcc-{target.triplet} libc6-dev-{target.debian}-cross"
        raise CeciliaError("compiler_missing", f"{target.tool('gcc')} is missing: apt install {package}")
    done = folder / f"{target.name}-{_key(target, root, tools)}"
    if done.is_dir():
        return done
    work = folder / f".{done.name}.partial"
    shutil.rmtree(work, ignore_errors=True)
    for path in sources():
        (work / "src" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, work / "src" / path)
    facts = f"_sysconfigdata__{target.triplet}"
    shutil.copy(root / f"usr/lib/python{PYTHON}/{facts}.py", work)
    include = root / "usr/include"
    environment = {
        "_PYTHON_HOST_PLATFORM": f"linux-{target.name}",
        "_PYTHON_SYSCONFIGDATA_NAME": facts,
        "PYTHONPATH": f"{work}:{tools}",
        "CC": target.tool("gcc"),
        "LDSHARED": f"{target.tool('gcc')} -shared",
        "CFLAGS": f"-g0 -isystem {include}/python{PYTHON} -isystem {include}",
    }
    words = ("build_ext", "--build-lib", work / "out", "--build-temp", work / "temp", "--parallel", "2")
    interpreter.run("setup.py", "--quiet", *words, cwd=work / "src", environment=environment)
    (work / "out").rename(done)
    shutil.rmtree(work)
    return done


def _key(target: Target, root: Path, tools: Path) -> str:
    """Names everything the outcome depends on: sources, headers, Cython and compiler."""
    digest = hashlib.sha256(f"{root.name} {tools.name} {run([target.tool('gcc'), '--version'])}".encode())
    for path in sources():
        digest.update(f"{path} {hashlib.sha256((ROOT / path).read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]
