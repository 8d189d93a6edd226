# SPDX-License-Identifier: Apache-2.0
"""The source of the default model, for tests that read it without Cecilia's own code."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def gguf_path(root: Path) -> Path:
    """The GGUF that the default model is converted from; the test is skipped without it."""
    found = sorted((root / "models").glob("*.gguf")) + sorted((root / "models" / ".cache").glob("*.gguf"))
    if not found:
        pytest.skip("no GGUF under models/: python -m tools.fetch")
    return found[0]
