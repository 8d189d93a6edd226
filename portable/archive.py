# SPDX-License-Identifier: Apache-2.0
"""A bundle as a .tar.xz and as one file that unpacks itself. The same folder always gives the same bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import tarfile
from pathlib import Path

from portable.launcher import render

_MAGIC_LINE = "@LINE@"


def tar_bytes(bundle: Path, epoch: int) -> bytes:
    """An uncompressed tar of the folder: sorted, owned by root, every time stamp `epoch` (Unix seconds)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in [bundle, *sorted(bundle.rglob("*"))]:
            member = archive.gettarinfo(path, path.relative_to(bundle.parent).as_posix())
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = epoch
            if member.isreg():
                with path.open("rb") as file:
                    archive.addfile(member, file)
            else:
                archive.addfile(member)
    return buffer.getvalue()


def write_tar_xz(tar: bytes, path: Path) -> str:
    """Write `path`; returns its sha256."""
    return _write(path, lzma.compress(tar, preset=9), mode=0o644)


def write_single(tar: bytes, path: Path, facts: dict[str, str]) -> str:
    """Write the self-extracting file; returns its sha256. gzip, because every board can unpack it."""
    payload = gzip.compress(tar, compresslevel=9, mtime=0)
    digest = hashlib.sha256(payload).hexdigest()
    script = render("single.sh", {**facts, "DIGEST": digest, "SHORT": digest[:12]})
    script = script.replace(_MAGIC_LINE, str(script.count("\n") + 1))
    return _write(path, script.encode() + payload, mode=0o755)


def _write(path: Path, data: bytes, *, mode: int) -> str:
    part = path.with_name(f".{path.name}.partial")
    part.write_bytes(data)
    part.chmod(mode)
    part.replace(path)
    return hashlib.sha256(data).hexdigest()
