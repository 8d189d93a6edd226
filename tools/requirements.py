# SPDX-License-Identifier: Apache-2.0
"""Print the requirements pyproject.toml names, one a line, in the form `pip install -r` reads.

    python tools/requirements.py run build convert > requirements.txt

`run` stands for the project's own dependencies, `build` for those of the build, any other word for the
extra of that name. The tree is run in place, so nothing but these has to be installed.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(groups: list[str]) -> list[str]:
    """Return the requirement lines of the named groups, each once; KeyError on an unknown name."""
    document = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    known = {
        "run": document["project"]["dependencies"],
        "build": document["build-system"]["requires"],
        **document["project"]["optional-dependencies"],
    }
    return list(dict.fromkeys(line for group in groups for line in known[group]))


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
