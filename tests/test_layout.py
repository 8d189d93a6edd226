# SPDX-License-Identifier: Apache-2.0
"""Holds the tree to its rules, and the rules to bad examples, so that each is known to be able to fail."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests import layout_rules as rules

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("cecilia", "server", "tools", "portable")
CODE = {".py", ".pyi", ".pyx", ".pxd", ".c", ".h"}
PAGES = {".html", ".css", ".js"}
LIMITS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cecilia"]["layout"]


def sources(*folders: str, suffixes: set[str]) -> list[str]:
    """Return the source files under `folders`, relative to the root, without build output."""
    return sorted(
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes and not {"__pycache__", "dist"} & set(path.parts)
    )


def complaints(path: str, checks: tuple[rules.Check, ...]) -> list[str]:
    source = (ROOT / path).read_text(encoding="utf-8")
    return [f"{path} {complaint}" for check in checks for complaint in check(path, source)]


def test_the_tree_is_found() -> None:
    found = sources(*PRODUCT, suffixes=CODE)
    assert {"cecilia/errors.py", "cecilia/_kernels/isa.pyx", "cecilia/_kernels/c/table.h"} <= set(found)


@pytest.mark.parametrize("check", rules.PRODUCT_CHECKS, ids=lambda check: check.__name__)
def test_product_code(check: rules.Check) -> None:
    found = [line for path in sources(*PRODUCT, suffixes=CODE) for line in complaints(path, (check,))]
    assert found == []


@pytest.mark.parametrize("check", rules.COMMON_CHECKS, ids=lambda check: check.__name__)
def test_every_source_file(check: rules.Check) -> None:
    paths = ["setup.py", *sources(*PRODUCT, "tests", suffixes=CODE | PAGES)]
    assert [line for path in paths for line in complaints(path, (check,))] == []


def test_sizes() -> None:
    paths = ["setup.py", *sources(*PRODUCT, "tests", suffixes=CODE | PAGES)]
    found = [
        f"{path} {line}"
        for path in paths
        for line in rules.check_size(path, (ROOT / path).read_text(encoding="utf-8"), **LIMITS)
    ]
    assert found == []


BAD = [
    (rules.check_layers, "cecilia/formats/x.py", "from cecilia.engine.load import load\n"),
    (rules.check_layers, "cecilia/formats/x.py", "from cecilia import arch\n"),
    (rules.check_layers, "cecilia/formats/x.py", "from ..text import chat\n"),
    (rules.check_layers, "cecilia/formats/x.py", "import cecilia.engine as e\n"),
    (rules.check_layers, "cecilia/formats/x.py", "def f():\n    import cecilia.engine.load\n"),
    (rules.check_layers, "cecilia/formats/x.py", "importlib.import_module('cecilia.arch.base')\n"),
    (rules.check_layers, "cecilia/errors.py", "import cecilia._kernels.isa\n"),
    (rules.check_layers, "cecilia/_kernels/x.pyx", "from cecilia.formats.quant import FORMATS\n"),
    (rules.check_layers, "cecilia/_kernels/x.pyx", "cdef int a\nfrom cecilia.state.pages cimport Pages\n"),
    (rules.check_layers, "cecilia/_kernels/x.pxd", "cimport numpy, cecilia.state.pages\n"),
    (rules.check_layers, "cecilia/_kernels/x.pxd", "from ..state.pages cimport Pages\n"),
    (rules.check_layers, "cecilia/_kernels/x.pyx", "from .. import formats\n"),
    (rules.check_layers, "server/app.py", "import tools.fetch\n"),
    (rules.check_layers, "tools/fetch.py", "from portable import bundle\n"),
    (rules.check_known_layer, "cecilia/helpers.py", ""),
    (rules.check_known_layer, "cecilia/misc/x.pyx", ""),
    (rules.check_engine_imports, "cecilia/engine/x.py", "import asyncio\n"),
    (rules.check_engine_imports, "cecilia/state/x.pyx", "import orjson\n"),
    (rules.check_engine_imports, "cecilia/engine/x.py", "def f():\n    from server.http import app\n"),
    (rules.check_dlopen, "cecilia/engine/x.py", "import ctypes\nlib = ctypes.CDLL('x.so')\n"),
    (rules.check_dlopen, "cecilia/_kernels/c/x.c", "void *f(void) { return dlopen(0, 1); }\n"),
    (rules.check_environment, "cecilia/engine/x.py", "import os\nhome = os.environ['HOME']\n"),
    (rules.check_environment, "server/app.py", "from os import path, environ\n"),
    (rules.check_environment, "cecilia/_kernels/c/select.c", 'char *f(void) { return getenv("X"); }\n'),
    (rules.check_print, "cecilia/engine/x.py", "print(1)\n"),
    (rules.check_print, "cecilia/state/x.pyx", "def f():\n    print (1)\n"),
    (rules.check_model_names, "cecilia/engine/x.py", "if name == 'qwen3':\n    pass\n"),
    (rules.check_model_names, "server/app.py", 'path = "models/smollm2-135m.l3r"\n'),
    (rules.check_model_names, "server/app.py", 'names = """\nLing-3.0-tiny\n"""\n'),
    (rules.check_model_names, "cecilia/_kernels/c/x.c", 'char *f(void) { return "llama"; }\n'),
    (rules.check_intrinsics, "cecilia/_kernels/x.pyx", 'cdef extern from "immintrin.h":\n    pass\n'),
    (rules.check_intrinsics, "cecilia/state/x.c", "__m256 f(__m256 a) { return _mm256_add_ps(a, a); }\n"),
    (rules.check_licence, "cecilia/errors.py", '"""A module."""\n'),
    (rules.check_finished, "cecilia/errors.py", "# " + "TO" + "DO: later\n"),
    (rules.check_finished, "docs/DESIGN.md", "FIX" + "ME\n"),
]


@pytest.mark.parametrize(("check", "path", "source"), BAD)
def test_a_rule_can_fail(check: rules.Check, path: str, source: str) -> None:
    assert len(check(path, source)) == 1


GOOD = [
    ("cecilia/engine/load.py", "from cecilia.arch import base\nfrom cecilia.formats.l3r import open_model\n"),
    ("cecilia/text/x.py", "from cecilia import sampler\nimport h5py\n"),
    ("cecilia/state/x.pyx", "from cecilia._kernels.isa cimport table  # from cecilia.engine import load\n"),
    (
        "cecilia/engine/x.py",
        '"""Reads os.environ, prints with print(), serves Qwen."""\n# import asyncio, _mm_add\n',
    ),
    ("cecilia/engine/x.py", "def f():\n    '''Used by qwen.'''\n    return 'sampling scaling'\n"),
    ("cecilia/config.py", "import os\nvalue = os.environ.get('CECILIA_THREADS')\n"),
    ("cecilia/_kernels/c/avx2.c", "#include <immintrin.h>\n__m256 f(void) { return _mm256_setzero_ps(); }\n"),
    ("cecilia/backends/npu.py", "import ctypes\nlib = ctypes.CDLL('librknnrt.so')\n"),
    ("server/__main__.py", "print('ready')\n"),
    ("tools/fetch.py", "NAME = 'smollm2'\n"),
    ("tools/build_portable.py", "from portable import bundle\n"),
]


@pytest.mark.parametrize(("path", "source"), GOOD)
def test_what_is_allowed_passes(path: str, source: str) -> None:
    checks = [
        check for check in rules.PRODUCT_CHECKS if "backends" not in path or check is rules.check_dlopen
    ]
    assert [line for check in checks for line in check(path, source)] == []


PYTHON_FUNCTION = (
    "def f(\n    a,\n):\n    x = 1\n\n    return x\n\n\nclass C:\n    def g(self):\n        pass\n"
)
CYTHON_FUNCTION = (
    "cdef class C(B):\n    cdef int n\n\n    cpdef int g(self,\n                int a) except -1:\n"
    '        """Doc.\n\n    end."""\n        return a\n\n\ncdef void h() noexcept nogil:\n    pass\n'
)
C_FUNCTION = "struct s {\n    int a;\n};\n\nstatic int f(int a,\n             int b)\n{\n    return a;\n}\n"


@pytest.mark.parametrize(
    ("path", "source", "lengths"),
    [("x.py", PYTHON_FUNCTION, [6, 2]), ("x.pyx", CYTHON_FUNCTION, [6, 2]), ("x.c", C_FUNCTION, [5])],
)
def test_function_lengths(path: str, source: str, lengths: list[int]) -> None:
    assert [length for _, length in rules.functions(path, source)] == lengths
    limit = max(lengths)
    assert rules.check_size(path, source, max_file_lines=100, max_function_lines=limit) == []
    assert len(rules.check_size(path, source, max_file_lines=100, max_function_lines=limit - 1)) == 1
    assert len(rules.check_size(path, source, max_file_lines=5, max_function_lines=limit)) == 1
