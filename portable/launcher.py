# SPDX-License-Identifier: Apache-2.0
"""The shell scripts of a bundle, filled in."""

from __future__ import annotations

from pathlib import Path

from cecilia.config import openmp_defaults
from portable.target import PYTHON, Target

FOLDER = Path(__file__).resolve().parent


def render(script: str, facts: dict[str, str]) -> str:
    """The text of `script`, a file beside this one, with `@NAME@` and its like replaced by `facts`."""
    text = (FOLDER / script).read_text(encoding="utf-8")
    for name, value in facts.items():
        text = text.replace(f"@{name}@", value)
    return text


def facts_of(name: str, version: str, target: Target) -> dict[str, str]:
    """What both scripts are told of a bundle."""
    settings = openmp_defaults(target.name).items()
    return {
        "NAME": name,
        "VERSION": version,
        "ARCH": target.name,
        "PYTHON": PYTHON,
        "OPENMP": "\n".join(f'export {name}="${{{name}-{value}}}"' for name, value in settings),
    }
