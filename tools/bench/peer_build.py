# SPDX-License-Identifier: Apache-2.0
"""The peers from the sources inside their Python packages' sdists, built for this machine, once."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cecilia.errors import CeciliaError, UsageError

CACHE = Path.home() / ".cache" / "cecilia" / "peers"


@dataclass(frozen=True)
class Insertion:
    """Text to be put before every `anchor` of a file."""

    file: str
    anchor: str
    text: str

    def apply(self, source: Path) -> None:
        """Put it there unless it is. Raises CeciliaError `peer_changed`."""
        path = source / self.file
        found = path.read_text(encoding="utf-8")
        if self.text in found:
            return
        if self.anchor not in found:
            raise CeciliaError("peer_changed", f"{path}: {self.anchor.strip()} is not where it was")
        path.write_text(found.replace(self.anchor, self.text + self.anchor), encoding="utf-8")


AMX_MENDS = (
    # gcc 12 declares that _tile_loadconfig reads 8 bytes of its 64 and drops the stores of the others: the
    # next tile instruction is illegal then. The barrier keeps the stores.
    Insertion(
        "ggml/src/ggml-cpu/amx/mmq.cpp",
        "    _tile_loadconfig(&tc);",
        '    __asm__ volatile("" : : "r"(&tc) : "memory");\n',
    ),
    # Stacked weights of latent attention are taken into AMX memory when loading, and refused there when their
    # permuted input comes: the peer aborts. Refused at once, they stay in the memory of its other kernels.
    Insertion(
        "ggml/src/ggml-cpu/amx/amx.cpp",
        "        if (!src0->buffer || src0->buffer->buft != ggml_backend_amx_buffer_type()) {",
        "        if (src0->ne[2] != 1) return false;\n",
    ),
)

# A file that the sdist of ik_llama.cpp left out; all it does is to write another one.
BUILD_INFO_FILE = "common/cmake/build-info-gen-cpp.cmake"
BUILD_INFO = r"""file(WRITE ${CMAKE_CURRENT_LIST_DIR}/../build-info.cpp
"int LLAMA_BUILD_NUMBER = 0;
char const *LLAMA_COMMIT = \"sdist\";
char const *LLAMA_COMPILER = \"cc\";
char const *LLAMA_BUILD_TARGET = \"linux\";
")
"""


@dataclass(frozen=True)
class Recipe:
    """An sdist, where in it the sources are, the cmake options and targets, and what must be mended first."""

    package: str
    version: str
    folder: str
    options: Mapping[str, str]
    targets: tuple[str, ...]
    mend: Callable[[Path], None]


def mend_amx(source: Path) -> None:
    """Make llama.cpp run where AMX is. Raises CeciliaError `peer_changed`."""
    for mend in AMX_MENDS:
        mend.apply(source)


def add_build_info(source: Path) -> None:
    """Write the file that is missing, unless a newer sdist has it."""
    path = source / BUILD_INFO_FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(BUILD_INFO, encoding="utf-8")


COMMON = {"CMAKE_BUILD_TYPE": "Release", "GGML_NATIVE": "ON", "LLAMA_BUILD_TESTS": "OFF", "LLAMA_CURL": "OFF"}

LLAMA_CPP = Recipe(
    "llama-cpp-python",
    "0.3.36",
    "vendor/llama.cpp",
    COMMON | {"LLAMA_BUILD_EXAMPLES": "OFF", "LLAMA_BUILD_UI": "OFF", "LLAMA_OPENSSL": "OFF"},
    ("llama-bench", "llama-quantize", "llama-server"),
    mend_amx,
)
IK_LLAMA_CPP = Recipe(
    "ik-llama-cpp-python",
    "0.1.5",
    "vendor/ik_llama.cpp",
    COMMON | {"LLAMA_BUILD_SERVER": "OFF", "GGML_IQK_FA_ALL_QUANTS": "OFF"},
    ("llama-bench",),
    add_build_info,
)


def program(recipe: Recipe, build: Path | None = None, name: str = "llama-bench") -> Path:
    """A program of a build folder; of our own, made if need be, when `build` is None.

    Raises UsageError `no_peer`, and CeciliaError `peer_changed` or `peer_build_failed`.
    """
    folder = build or CACHE / f"{recipe.package}-{recipe.version}" / "build"
    found = folder / "bin" / name
    if not found.is_file():
        if build is not None:
            raise UsageError("no_peer", f"{found} is not there")
        _build(recipe, folder)
    return found


def _build(recipe: Recipe, folder: Path) -> None:
    source = folder.parent / "source"
    if not (source / "CMakeLists.txt").is_file():
        _unpack(recipe, _download(recipe, folder.parent), source)
    recipe.mend(source)
    options = [f"-D{name}={value}" for name, value in recipe.options.items()]
    _run("cmake", "-G", "Ninja", "-S", str(source), "-B", str(folder), *options)
    _run("cmake", "--build", str(folder), "--target", *recipe.targets)


def _download(recipe: Recipe, folder: Path) -> Path:
    # pip asks the build backend for metadata even here, so it must be free to fetch that backend as a wheel.
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", recipe.package]
    _run(*pip, "-d", str(folder), f"{recipe.package}=={recipe.version}")
    return next(folder.glob("*.tar.gz"))


def _unpack(recipe: Recipe, archive: Path, target: Path) -> None:
    with tarfile.open(archive) as file:
        file.extractall(target.parent, filter="data")
    (target.parent / archive.name.removesuffix(".tar.gz") / recipe.folder).rename(target)


def _run(*command: str) -> None:
    print(" ".join(command), file=sys.stderr)
    try:
        subprocess.run(command, check=True, stdout=sys.stderr)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise CeciliaError("peer_build_failed", str(error)) from error
