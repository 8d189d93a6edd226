# SPDX-License-Identifier: Apache-2.0
"""Kernel tests choose instruction sets and threads as they like; the next test finds them as they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cecilia._kernels import isa, threads


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    """The instruction set and the number of threads, put back."""
    before = isa.name(), threads.threads()
    yield
    isa.use(before[0])
    threads.set_threads(before[1])
