# SPDX-License-Identifier: Apache-2.0
"""Debian packages of any architecture, unpacked into a folder; the machine's own packages stay untouched.

apt runs with a private state, so it needs no root and knows nothing of what is installed, but it reads the
machine's sources and keyring: every index is signed, every package is of the hash the index gives.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cecilia.errors import CeciliaError
from portable.run import run
from portable.target import PYTHON, TARGETS, Target
from portable.unpacked import unpacked

# What is in a bundle. Of the last two only licences are taken: that of the GCC libraries, and the texts that
# others refer to.
PACKAGES = (
    f"python{PYTHON}-minimal",
    f"libpython{PYTHON}-minimal",
    f"libpython{PYTHON}-stdlib",
    "libc6",
    "libgcc-s1",
    "libstdc++6",
    "libgomp1",
    "zlib1g",
    "libexpat1",
    "libffi8",
    "libssl3",
    "gcc-12-base",
    "base-files",
)
HEADERS = f"libpython{PYTHON}-dev"

_CONFIGURATION = """\
APT::Architecture "{first}";
APT::Architectures {{ {all} }};
APT::Sandbox::User "root";
Acquire::Languages "none";
Dir::State "{folder}/state";
Dir::State::status "{folder}/state/status";
Dir::Cache "{folder}/cache";
"""
_URI = re.compile(r"'\S+' (?P<file>\S+) \d+ SHA256:(?P<sha256>[0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Package:
    """A binary package and the source it was built from."""

    name: str
    version: str
    architecture: str
    source: str
    source_version: str
    sha256: str


class Apt:
    """A private apt below `folder`, for every target's architecture."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._archives = self._folder / "archives"
        for part in (self._archives, self._folder / "state/lists/partial", self._folder / "cache"):
            part.mkdir(parents=True, exist_ok=True)
        (self._folder / "state/status").touch()
        names = [target.debian for target in TARGETS.values()]
        configuration = _CONFIGURATION.format(
            folder=self._folder, first=names[0], all=" ".join(f'"{name}";' for name in names)
        )
        (self._folder / "apt.conf").write_text(configuration, encoding="utf-8")

    def _get(self, *words: str, cwd: Path | None = None) -> str:
        environment = {"APT_CONFIG": str(self._folder / "apt.conf"), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        return run(["apt-get", "-qq", *words], cwd=cwd, env=environment)

    def update(self) -> None:
        """Read the indices of the machine's sources."""
        self._get("update")

    def download(self, names: Sequence[str], target: Target) -> list[Path]:
        """The current .debs of these packages, in this order; kept from earlier runs while they are current.

        CeciliaError `command_failed` for a package the machine's sources do not have.
        """
        wanted = [f"{name}:{target.debian}" for name in names]
        offers = {}
        # Where a file is already there apt names none, so it is asked in another folder.
        for line in self._get("download", "--print-uris", *wanted, cwd=self._folder).splitlines():
            match = _URI.match(line)
            if match is None:
                raise CeciliaError("command_failed", f"apt-get download --print-uris: {line}")
            offers[match["file"].partition("_")[0]] = match
        paths = [self._archives / offers[name]["file"] for name in names]
        hashes = [offers[name]["sha256"] for name in names]
        lacking = [
            name for name, path, sha in zip(wanted, paths, hashes, strict=True) if not _has_hash(path, sha)
        ]
        if lacking:
            self._get("download", *lacking, cwd=self._archives)
        for path, sha in zip(paths, hashes, strict=True):
            if not _has_hash(path, sha):
                raise CeciliaError("hash_mismatch", f"{path.name} is not what the index promises")
        return paths


def _has_hash(path: Path, sha256: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256


def describe(deb: Path) -> Package:
    """Name, version and source of a .deb."""
    text = run(["dpkg-deb", "--field", deb, "Package", "Version", "Architecture", "Source"])
    fields = dict(line.split(": ", 1) for line in text.splitlines())
    # `Source: gcc-12 (12.2.0-14)`; both parts are left out where they equal the package's own.
    source, _, version = fields.get("Source", fields["Package"]).partition(" ")
    return Package(
        name=fields["Package"],
        version=fields["Version"],
        architecture=fields["Architecture"],
        source=source,
        source_version=version.strip("()") or fields["Version"],
        sha256=hashlib.sha256(deb.read_bytes()).hexdigest(),
    )


def unpack(debs: Sequence[Path], folder: Path) -> Path:
    """Unpack packages into `folder`, done once; see `unpacked`."""
    return unpacked(debs, folder, lambda deb, into: run(["dpkg-deb", "--extract", deb, into]))
