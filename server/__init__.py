# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: one process, one port, one engine thread."""
