# SPDX-License-Identifier: Apache-2.0
"""llama.cpp from the sources inside the llama-cpp-python sdist, built for this machine, once."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

from cecilia.errors import CeciliaError, UsageError

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
CACHE = Path.home() / ".cache" / "cecilia" / "peers"
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_CURL": "OFF",
}
# gcc 12 declares that _tile_loadconfig reads 8 bytes of its 64, drops the stores of the rest, and the first
# tile instruction is then illegal. The barrier keeps the stores; without it the peer crashes where AMX is.
AMX_FILE = "ggml/src/ggml-cpu/amx/mmq.cpp"
AMX_CALL = "    _tile_loadconfig(&tc);"
AMX_BARRIER = '    __asm__ volatile("" : : "r"(&tc) : "memory");\n'


def program(build: Path | None) -> Path:
    """The llama-bench of a build folder; of our own, made if need be, when `build` is None."""
    folder = build or CACHE / f"{PACKAGE}-{VERSION}" / "build"
    found = folder / "bin" / "llama-bench"
    if not found.is_file():
        if build is not None:
            raise UsageError("no_peer", f"{found} is not there")
        _build(folder)
    return found


def _build(folder: Path) -> None:
    source = folder.parent / "source"
    if not (source / "CMakeLists.txt").is_file():
        _unpack(_download(folder.parent), source)
    _keep_tile_stores(source / AMX_FILE)
    options = [f"-D{name}={value}" for name, value in OPTIONS.items()]
    _run("cmake", "-G", "Ninja", "-S", str(source), "-B", str(folder), *options)
    _run("cmake", "--build", str(folder), "--target", "llama-bench")


def _download(folder: Path) -> Path:
    wanted = f"{PACKAGE}=={VERSION}"
    # pip asks the build backend for metadata even here, so it must be free to fetch that backend as a wheel.
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE]
    _run(*pip, "-d", str(folder), wanted)
    return next(folder.glob("*.tar.gz"))


def _unpack(archive: Path, target: Path) -> None:
    with tarfile.open(archive) as file:
        file.extractall(target.parent, filter="data")
    (target.parent / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp").rename(target)


def _keep_tile_stores(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if AMX_BARRIER in text:
        return
    if AMX_CALL not in text:
        raise CeciliaError("peer_changed", f"{path}: no call of _tile_loadconfig where it was")
    path.write_text(text.replace(AMX_CALL, AMX_BARRIER + AMX_CALL), encoding="utf-8")


def _run(*command: str) -> None:
    print(" ".join(command), file=sys.stderr)
    try:
        subprocess.run(command, check=True, stdout=sys.stderr)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise CeciliaError("peer_build_failed", str(error)) from error
