# SPDX-License-Identifier: Apache-2.0
"""Archives unpacked together, once."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path


def unpacked(archives: Sequence[Path], folder: Path, extract: Callable[[Path, Path], object]) -> Path:
    """`extract` every archive into `folder / HASH`, named by what is in it; returns that folder.

    An unpacking that was interrupted leaves nothing that the next one takes for whole.
    """
    key = hashlib.sha256("\n".join(archive.name for archive in archives).encode()).hexdigest()[:16]
    whole = folder / key
    if whole.is_dir():
        return whole
    part = folder / f".{key}.partial"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for archive in archives:
        extract(archive, part)
    part.rename(whole)
    return whole
