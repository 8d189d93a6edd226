# SPDX-License-Identifier: Apache-2.0
"""Which files go into a bundle, and where they lie there.

    cecilia-server          the launcher; cecilia-convert and bin/python are links to it
    app/                    our own packages
    site/                   the wheels
    python/                 interpreter and standard library
    lib/                    shared libraries and the loader that finds them

Distributions are taken whole but for what a running server never opens (tests, headers, stubs): which module
an extension module imports cannot be read from outside, so nothing is left out because it looks unused.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

from cecilia.errors import CeciliaError
from portable import elf
from portable.audit import LIBRARIES, beside, binaries
from portable.target import PYTHON, Target

ROOT = Path(__file__).resolve().parent.parent
STDLIB = f"python/lib/python{PYTHON}"

# glibc's own parts that programs open by name: mixed with the board's they would crash.
GLIBC_PARTS = ("libdl.so.2", "libm.so.6", "libpthread.so.0", "libresolv.so.2", "librt.so.1", "libutil.so.1")

_NO_STDLIB = frozenset(
    name
    for line in (ROOT / "portable/stdlib_left_out.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
    for name in line.split()
)
_NO_WHEEL_SUFFIX = (".pyi", ".pxd", ".pyx", ".c", ".h", ".a", ".pc", ".lib", ".md", ".rst", ".typed")
_NO_WHEEL_FOLDER = frozenset(
    {"tests", "testing", "__pycache__", "include", "f2py", "distutils", "_pyinstaller", "bin"}
)
# numpy's modules for its own tests
_NO_WHEEL_STEM = frozenset(
    {
        "_simd",
        "_multiarray_tests",
        "_operand_flag_tests",
        "_rational_tests",
        "_struct_ufunc_tests",
        "_umath_tests",
        "conftest",
    }
)
_NO_OWN_SUFFIX = frozenset({".pyx", ".pxd", ".pyi", ".c", ".h", ".so", ".pyc"})
_OWN = ("cecilia", "server", "tools/__init__.py", "tools/convert")

Keep = Callable[[PurePosixPath], bool]


def keeps_stdlib(path: PurePosixPath) -> bool:
    """Whether a file of the standard library, named from its root, goes in."""
    first = path.parts[1] if path.parts[0] == "lib-dynload" and len(path.parts) > 1 else path.parts[0]
    name = first.partition(".")[0] or first
    skipped = (
        name in _NO_STDLIB or first in _NO_STDLIB or name.startswith(("config-", "_sysconfigdata__linux"))
    )
    return not skipped and not {"test", "tests", "__pycache__"} & set(path.parts)


def keeps_wheel(path: PurePosixPath) -> bool:
    """Whether a file of a wheel, named from site-packages, goes in; its licences go elsewhere."""
    if path.parts[0].endswith((".dist-info", ".data")):
        return path.name == "METADATA" and len(path.parts) == 2
    if _NO_WHEEL_FOLDER & set(path.parts[:-1]) or path.name.endswith(_NO_WHEEL_SUFFIX):
        return False
    return path.name.partition(".")[0] not in _NO_WHEEL_STEM


def keeps_own(path: PurePosixPath) -> bool:
    """Whether a file of our packages goes in: sources of compiled modules stay out."""
    hidden = any(part.startswith(".") or part == "__pycache__" for part in path.parts)
    return not hidden and path.suffix not in _NO_OWN_SUFFIX


def files(folder: Path) -> Iterator[PurePosixPath]:
    """Every regular file or link below, relative to the folder, in an order that is always the same."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    yield from sorted(PurePosixPath(path.relative_to(folder)) for path in found)


def copy(source: Path, destination: Path, keep: Keep) -> None:
    """Copy what `keep` keeps. Links are followed: a card formatted for another system holds none."""
    for path in files(source):
        if keep(path) and (source / path).is_file():
            copy_file(source / path, destination / path)


def copy_file(source: Path, destination: Path) -> None:
    """Copy the content alone; modes are set once, at the end."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, destination)


def collect(bundle: Path, *, root: Path, wheels: Path, extensions: Path, target: Target) -> None:
    """Fill an empty folder with everything that runs."""
    copy_file(root / f"usr/bin/python{PYTHON}", bundle / f"python/bin/python{PYTHON}")
    copy(root / f"usr/lib/python{PYTHON}", bundle / STDLIB, keeps_stdlib)
    copy(wheels, bundle / "site", keeps_wheel)
    for name in _OWN:
        if (ROOT / name).is_file():
            copy_file(ROOT / name, bundle / "app" / name)
        else:
            copy(ROOT / name, bundle / "app" / name, keeps_own)
    copy(extensions, bundle / "app", lambda path: path.suffix == ".so")
    add_libraries(bundle, root, target)


def add_libraries(bundle: Path, root: Path, target: Target) -> None:
    """Copy into lib/ the loader, glibc's parts and whatever any binary needs, and what those need.

    CeciliaError `library_missing` names a library that no package has.
    """
    folders = [root / folder / target.triplet for folder in ("lib", "usr/lib")]
    queue = [target.loader, *GLIBC_PARTS, *_needs(bundle, binaries(bundle))]
    while queue:
        name = queue.pop()
        destination = bundle / LIBRARIES / name
        if destination.exists():
            continue
        source = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if source is None:
            raise CeciliaError(
                "library_missing", f"no package has {name}, which a binary of the bundle needs"
            )
        copy_file(source, destination)
        queue += _needs(bundle, [destination])


def _needs(bundle: Path, paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        parsed = elf.read(path)
        yield from (name for name in parsed.needed if not beside(path, parsed, name, bundle))
