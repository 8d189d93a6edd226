# SPDX-License-Identifier: Apache-2.0
"""Tests of architectures choose instruction sets and threads, too."""

from tests.kernels.conftest import restore

__all__ = ["restore"]
