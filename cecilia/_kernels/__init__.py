# SPDX-License-Identifier: Apache-2.0
"""Compute kernels: Cython that owns shapes and threads, over C that owns the arithmetic.

Importing this package fixes how the OpenMP runtime waits, which it reads once when it is loaded.
"""

from cecilia.config import set_openmp_environment

set_openmp_environment()
