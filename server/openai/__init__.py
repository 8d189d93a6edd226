# SPDX-License-Identifier: Apache-2.0
"""The OpenAI-compatible API: validation of requests, shapes of answers."""
