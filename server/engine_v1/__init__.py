# SPDX-License-Identifier: Apache-2.0
"""The routes under /engine/v1: what the engine does and keeps, beyond what OpenAI's API has words for."""
