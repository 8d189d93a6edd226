# SPDX-License-Identifier: Apache-2.0
"""Log lines on stderr: a name and `key=value` facts. Never prompts, never answers."""

from __future__ import annotations

import json
import logging
import sys

_LOGGER = logging.getLogger("cecilia.server")


def configure() -> None:
    """Send records of this process to stderr, one line each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(logging.INFO)
    _LOGGER.propagate = False


def line(name: str, **facts: object) -> str:
    """`name key=value ...`; a value with blanks, quotes or control characters is quoted as JSON does it."""
    return " ".join([name, *(f"{key}={_value(value)}" for key, value in facts.items())])


def info(name: str, **facts: object) -> None:
    """Something happened as it should."""
    _LOGGER.info(line(name, **facts))


def warning(name: str, **facts: object) -> None:
    """Something the owner of the machine should know."""
    _LOGGER.warning(line(name, **facts))


def exception(name: str, **facts: object) -> None:
    """A fault of ours, with the traceback of the exception in work."""
    _LOGGER.exception(line(name, **facts))


def _value(value: object) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    plain = text.isascii() and text.isprintable() and text and not set(text) & set(' "=\\')
    return text if plain else json.dumps(text)
