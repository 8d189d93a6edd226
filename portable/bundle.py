# SPDX-License-Identifier: Apache-2.0
"""Puts a bundle together, from packages to archives. The same inputs give the same bytes."""

from __future__ import annotations

import hashlib
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cecilia
from cecilia.errors import CeciliaError, UsageError
from portable import archive, debian, extensions, licences, wheels
from portable.audit import LIBRARIES, audit, binaries
from portable.collect import ROOT, STDLIB, collect, copy_file, files
from portable.interpreter import Interpreter
from portable.launcher import facts_of, render
from portable.run import run
from portable.target import PYTHON, Target, native

SUMS = "SHA256SUMS"
LAUNCHER = "cecilia-server"
_PAGES = ("LICENSE", "NOTICES.md", "CHANGELOG.md", "SECURITY.md")
_DOCS = ("BUNDLE.md", "API.md", "BOARD.md", "FORMAT-L3R.md")
_MODELS = "Put one .l3r file here and cecilia-server finds it; of several, name one with --model.\n"

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Order:
    """What to build."""

    target: Target
    rknnlite: bool
    epoch: int  # Unix seconds: every time stamp inside
    output: Path
    work: Path  # downloads and compiled parts, kept between builds

    @property
    def name(self) -> str:
        """The bundle's folder, and the stem of its archives."""
        return f"cecilia-{cecilia.__version__}-{self.target.name}" + ("-rknnlite" if self.rknnlite else "")


@dataclass(frozen=True, slots=True)
class _Parts:
    """The ingredients, each unpacked in a folder of its own."""

    root: Path
    site: Path
    extensions: Path
    debs: list[debian.Package]
    wheels: list[wheels.Wheel]
    interpreter: Interpreter


@dataclass(frozen=True, slots=True)
class Built:
    """The results and their digests."""

    folder: Path
    folder_bytes: int
    tar_xz: Path
    tar_xz_sha256: str
    single: Path
    single_sha256: str


def build(order: Order, say: Say) -> Built:
    """Build everything; raises CeciliaError. Nothing half made is left in the output folder."""
    if order.rknnlite and order.target not in wheels.architectures("rknnlite"):
        raise UsageError("no_rknnlite", f"rknn-toolkit-lite2 has no wheel for {order.target.name}")
    parts = _gather(order, say)
    stage = order.work / "stage"
    shutil.rmtree(stage, ignore_errors=True)
    bundle = stage / order.name
    bundle.mkdir(parents=True)
    say("collect")
    collect(bundle, root=parts.root, wheels=parts.site, extensions=parts.extensions, target=order.target)
    _strip(bundle, order.target)
    _write_pages(bundle, order, parts)
    write_launcher(bundle, order.target)
    say("compile")
    _compile(bundle, parts.interpreter)
    set_modes(bundle)
    write_sums(bundle)
    complaints = audit(bundle, order.target).complaints
    if complaints:
        raise CeciliaError("audit_failed", "; ".join(complaints))
    say("pack")
    order.output.mkdir(parents=True, exist_ok=True)
    return _pack(order, bundle)


def _gather(order: Order, say: Say) -> _Parts:
    here, work = native(), order.work
    apt = debian.Apt(work / "apt")
    say("packages")
    apt.update()
    debs = {
        target: apt.download([*debian.PACKAGES, debian.HEADERS], target) for target in {here, order.target}
    }
    roots = {target: debian.unpack(paths, work / "roots") for target, paths in debs.items()}
    say("wheels")
    groups = ["core", "rknnlite"] if order.rknnlite else ["core"]
    chosen = [path for group in groups for path in wheels.download(group, order.target, work / "wheels")]
    tools = wheels.download("build", here, work / "wheels")
    interpreter = Interpreter(roots[here], here)
    say("extensions")
    compiled = extensions.build(
        order.target,
        roots[order.target],
        interpreter,
        wheels.unpack(tools, work / "tools"),
        work / "extensions",
    )
    return _Parts(
        root=roots[order.target],
        site=wheels.unpack(chosen, work / "site"),
        extensions=compiled,
        debs=[
            debian.describe(path) for path in debs[order.target] if not path.name.startswith(debian.HEADERS)
        ],
        wheels=[wheels.describe(path) for path in chosen],
        interpreter=interpreter,
    )


def _strip(bundle: Path, target: Target) -> None:
    """Drop symbol tables, but not the loader's and not those of libraries a wheel's maker has rewritten."""
    for path in binaries(bundle):
        if path.name != target.loader and not path.parent.name.endswith(".libs"):
            run([target.tool("strip"), "--strip-unneeded", path])


def _write_pages(bundle: Path, order: Order, parts: _Parts) -> None:
    for name in _PAGES:
        copy_file(ROOT / name, bundle / name)
    for name in _DOCS:
        if (ROOT / "docs" / name).is_file():
            copy_file(ROOT / "docs" / name, bundle / "docs" / name)
    copy_file(ROOT / "portable/cecilia.service", bundle / "cecilia.service")
    (bundle / "models").mkdir()
    (bundle / "models/README.txt").write_text(_MODELS, encoding="utf-8")
    distribution = _distribution()
    found = licences.components(parts.debs, parts.wheels, bundle / "site", distribution)
    licences.write_texts(bundle / "licenses", parts.root, parts.site, parts.debs, found)
    licences.write_sbom(bundle / "sbom.cdx.json", found, cecilia.__version__, order.target, order.epoch)


def _distribution() -> str:
    """Whose packages they are, e.g. debian-12."""
    release = platform.freedesktop_os_release()
    return f"{release['ID']}-{release.get('VERSION_ID', 'unstable')}"


def write_launcher(bundle: Path, target: Target) -> None:
    """The one script, and every name it and the loader are called by."""
    facts = facts_of(bundle.name, cecilia.__version__, target)
    (bundle / LAUNCHER).write_text(render("launcher.sh", facts), encoding="utf-8")
    (bundle / "cecilia-convert").symlink_to(LAUNCHER)
    (bundle / "bin").mkdir()
    (bundle / "bin/python").symlink_to(f"../{LAUNCHER}")
    # The kernel names a process after the path it was started by: `top` shows cecilia-server, not the loader.
    (bundle / LIBRARIES / "run").mkdir()
    for name in (LAUNCHER, "cecilia-convert", "python"):
        (bundle / LIBRARIES / "run" / name).symlink_to(f"../{target.loader}")


def _compile(bundle: Path, interpreter: Interpreter) -> None:
    """Byte code beside our sources, and in the place of others', which nobody edits on a board.

    It is checked by hash where a source is there and not at all where none is; never by time.
    """
    common = ("-m", "compileall", "-q", "-s", bundle)
    theirs = [bundle / STDLIB, bundle / "site"]
    interpreter.run(*common, "-b", "--invalidation-mode", "unchecked-hash", *theirs)
    interpreter.run(*common, "--invalidation-mode", "checked-hash", bundle / "app")
    for folder in theirs:
        for path in folder.rglob("*.py"):
            if path.with_suffix(".pyc").is_file():
                path.unlink()


def set_modes(bundle: Path) -> None:
    """Modes that do not depend on whoever built it."""
    programs = {bundle / LAUNCHER, bundle / f"python/bin/python{PYTHON}"}
    for path in bundle.rglob("*"):
        if not path.is_symlink():
            loader = path.parent == bundle / LIBRARIES and path.name.startswith("ld-")
            path.chmod(0o755 if path.is_dir() or path in programs or loader else 0o644)
    bundle.chmod(0o755)


def write_sums(bundle: Path) -> None:
    """The digest of every regular file, in the form `sha256sum -c` reads."""
    lines = [
        f"{hashlib.sha256((bundle / path).read_bytes()).hexdigest()}  {path}\n"
        for path in files(bundle)
        if not (bundle / path).is_symlink()
    ]
    (bundle / SUMS).write_text("".join(lines), encoding="utf-8")
    (bundle / SUMS).chmod(0o644)


def _pack(order: Order, bundle: Path) -> Built:
    tar = archive.tar_bytes(bundle, order.epoch)
    facts = facts_of(order.name, cecilia.__version__, order.target)
    tar_xz, single = order.output / f"{order.name}.tar.xz", order.output / f"{order.name}.run"
    tar_xz_sha256 = archive.write_tar_xz(tar, tar_xz)
    single_sha256 = archive.write_single(tar, single, facts)
    size = sum((bundle / path).lstat().st_size for path in files(bundle))
    folder = order.output / order.name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.move(bundle, folder)
    return Built(folder, size, tar_xz, tar_xz_sha256, single, single_sha256)
