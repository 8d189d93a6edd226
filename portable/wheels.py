# SPDX-License-Identifier: Apache-2.0
"""Wheels of any architecture, pinned by version and hash in `locks/*.txt`, which pip reads.

`huggingface_hub`, on which `tokenizers` depends, and `requests`, on which `gguf` depends, are imported by
neither where Cecilia uses them; with what they bring they stay out, so pip resolves no dependencies here.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

from portable.run import run
from portable.target import CPYTHON, PYTHON, TARGETS, Target
from portable.unpacked import unpacked

ROOT = Path(__file__).resolve().parent.parent
LOCKS = Path(__file__).resolve().parent / "locks"
LEFT_OUT = ("huggingface_hub", "requests")
_BROUGHT = ("markupsafe", "pyyaml")  # by jinja2 and gguf
_RKNNLITE = ("rknn-toolkit-lite2", "psutil", "ruamel.yaml")


@dataclass(frozen=True, slots=True)
class Wheel:
    """One distribution and its unpacked wheel's file."""

    name: str
    version: str
    licence: str
    sha256: str
    path: Path


def wanted(group: str) -> list[str]:
    """The requirements a lock is made from."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    run_time = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["convert"]
    groups = {
        "core": [*run_time, *_BROUGHT],
        "rknnlite": [*_RKNNLITE],
        "build": [line for line in project["build-system"]["requires"] if not line.startswith("numpy")],
    }
    return groups[group]


def architectures(group: str) -> list[Target]:
    """Where the wheels of a group exist."""
    return [TARGETS["aarch64"]] if group == "rknnlite" else list(TARGETS.values())


def _pip(command: str, target: Target, *words: str | Path) -> str:
    tags = [f"--platform={tag}" for tag in target.wheel_platforms]
    tags += [f"--abi={abi}" for abi in (CPYTHON, "abi3", "none")]
    tags += ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp", "--no-deps"]
    quiet = ["--disable-pip-version-check", "--no-input", "--quiet"]
    return run([sys.executable, "-m", "pip", command, *quiet, *tags, *words])


def write_lock(group: str) -> Path:
    """Resolve the group's newest wheels for every architecture it is made for and pin them."""
    pinned: dict[str, set[str]] = {}
    for target in architectures(group):
        with tempfile.TemporaryDirectory() as folder:  # pip asks for a --target even to say what it would do
            words = ("--dry-run", "--ignore-installed", "--report=-", f"--target={folder}")
            report = _pip("install", target, *words, *wanted(group))
        for item in json.loads(report)["install"]:
            requirement = f"{item['metadata']['name']}=={item['metadata']['version']}"
            pinned.setdefault(requirement, set()).add(
                item["download_info"]["archive_info"]["hashes"]["sha256"]
            )
    lines = [f"# Written by tools/build_portable.py --lock; the wheels of the bundle's {group} part."]
    for requirement, hashes in sorted(pinned.items(), key=lambda entry: entry[0].lower()):
        lines.append(
            " \\\n    ".join([requirement, *(f"--hash=sha256:{digest}" for digest in sorted(hashes))])
        )
    path = LOCKS / f"{group}.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def locked(group: str) -> dict[str, str]:
    """Name -> version, as pinned."""
    text = (LOCKS / f"{group}.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.M))


def download(group: str, target: Target, folder: Path) -> list[Path]:
    """The locked wheels of a group, sorted by name; fetched once for each state of the lock."""
    lock = LOCKS / f"{group}.txt"
    key = hashlib.sha256(lock.read_bytes()).hexdigest()[:16]
    done = folder / f"{group}-{target.name}-{key}"
    if not done.is_dir():
        part = done.with_name(f".{done.name}.partial")
        shutil.rmtree(part, ignore_errors=True)
        _pip("download", target, "--require-hashes", "--dest", part, "--requirement", lock)
        part.rename(done)
    return sorted(done.glob("*.whl"))


def describe(path: Path) -> Wheel:
    """What the metadata inside a wheel says."""
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        fields = HeaderParser().parsestr(archive.read(name).decode("utf-8"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel(fields["Name"], fields["Version"], _licence(fields), digest, path)


def _licence(fields: Message) -> str:
    """The SPDX expression if there is one, else the licence's name in whichever older field has it."""
    marks = [value for value in fields.get_all("Classifier", ()) if value.startswith("License :: ")]
    short = fields.get("License", "")
    return (
        fields.get("License-Expression")
        or (short if "\n" not in short else "")
        or " and ".join(value.rsplit(" :: ", 1)[-1] for value in marks)
        or "not stated"
    )


def unpack(paths: Sequence[Path], folder: Path) -> Path:
    """Unpack wheels into `folder`, done once; see `unpacked`."""

    def extract(path: Path, into: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(into)

    return unpacked(paths, folder, extract)
