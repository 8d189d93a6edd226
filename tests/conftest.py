# SPDX-License-Identifier: Apache-2.0
"""What every test may ask for: the tree, the default model, and the golden arrays beside the tree.

Compute runs on one thread unless a test says otherwise: two busy threads on a loaded two-core machine
can stall for milliseconds at each barrier.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("CECILIA_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the tree."""
    return ROOT


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The converted default model; the test is skipped when it has not been fetched."""
    path = ROOT / "models" / "smollm2-135m-instruct.l3r"
    if not path.is_file():
        pytest.skip(f"{path.relative_to(ROOT)} is not there: make {path.relative_to(ROOT)}")
    return path


@pytest.fixture(scope="session")
def fixtures_dir() -> Path:
    """Golden arrays of independent implementations, kept beside the tree; skipped without them."""
    path = ROOT.parent / "shared" / "fixtures"
    if not path.is_dir():
        pytest.skip("the golden arrays (shared/fixtures beside the tree) are not there")
    return path
