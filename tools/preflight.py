# SPDX-License-Identifier: Apache-2.0
"""Say in one line which system packages a build still needs, before anything is downloaded or compiled.

Run with the system's own Python, before .venv exists; exit code 2 when something is missing. The syntax stays
readable to interpreters that are too old for the rest, so that they too get the answer and no traceback.
"""

import importlib.util
import os.path
import shutil
import sys
import sysconfig

MINIMUM = (3, 11)


def missing_packages() -> list:
    """Return the Debian names of the packages that are needed and not there, in the order to install them."""
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    needs = [
        ("python3-venv", importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")),
        ("python3-dev", os.path.isfile(header)),
        ("gcc", shutil.which("gcc") or shutil.which("cc")),
    ]
    return [package for package, found in needs if not found]


def main() -> int:
    """Check the interpreter first, then the packages; return the exit code."""
    if sys.version_info < MINIMUM:
        wanted, found = (".".join(map(str, version[:2])) for version in (MINIMUM, sys.version_info))
        print(f"python {wanted} or newer is needed, found {found}: set PYTHON=...", file=sys.stderr)
        return 2
    missing = " ".join(missing_packages())
    if missing:
        print(f"missing: {missing} (on Debian: sudo apt install {missing})", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
