# SPDX-License-Identifier: Apache-2.0
"""Cecilia: a local inference engine for small boards."""

__version__ = "0.1.0"
