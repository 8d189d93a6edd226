# SPDX-License-Identifier: Apache-2.0
"""Turn a published checkpoint into one self-contained `.l3r` file."""
