# SPDX-License-Identifier: Apache-2.0
"""The rules of the tree, each a pure function from (path, source text) to a list of complaints.

Imports and function lengths are read with `ast` from .py files; .pyx, .pxd and C sources, which no Python
linter sees, are read with regular expressions. Paths are relative to the root, with forward slashes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

LAYERS = {
    "errors": 0,
    "config": 0,
    "_kernels": 1,
    "formats": 2,
    "layers": 3,
    "state": 3,
    "text": 3,
    "sampler": 3,
    "arch": 4,
    "engine": 5,
}
LEAVES = {"server", "tools", "portable"}
TOP = 6
NOT_IN_ENGINE = {"asyncio", "h11", "orjson", "uvloop", "server"}
READS_ENVIRONMENT = {"cecilia/config.py", "server/config.py", "cecilia/_kernels/isa.pyx"}
MODEL_NAMES = {
    "smollm",
    "llama",
    "ling",
    "qwen",
    "laya",
    "yolo",
    "gemma",
    "kimi",
    "bailing",
    "mistral",
    "modernbert",
}
# server/config.py names the file of the default model; nothing there depends on which model it is.
MAY_NAME_MODELS = ("cecilia/arch/", "tools/", "models/", "server/config.py")
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME)\b")

_CYTHON_TOKEN = re.compile(
    r"(?P<doc>(?<=\n)[ \t]*[rRuU]?(?:\"\"\"[\s\S]*?\"\"\"|'''[\s\S]*?'''))"
    r"|(?P<text>\"\"\"[\s\S]*?\"\"\"|'''[\s\S]*?'''|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')"
    r"|(?P<comment>#[^\n]*)"
)
_C_TOKEN = re.compile(
    r"(?P<doc>/\*[\s\S]*?\*/)|(?P<text>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')|(?P<comment>//[^\n]*)"
)
_CYTHON_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+c?import[ \t]+(\([^)]*\)|[^\n]*)|c?import[ \t]+([^\n]*))", re.M
)
_CYTHON_FUNCTION = re.compile(r"^([ \t]*)(?:async[ \t]+def|def|cdef|cpdef)\b(?!.*\bclass\b)[^=\n]*\(", re.M)
TIMES_INSTRUCTIONS = ("tools/bench/layout.c", "tools/bench/peaks.c")
_INTRINSIC = re.compile(
    r"\b(?:immintrin|x86intrin|arm_neon|arm_acle)\.h\b|\b_mm(?:256|512)?_\w+|\b__m(?:128|256|512)"
)
_ENVIRONMENT = re.compile(
    r"\bos\s*\.\s*(?:environb?|getenv|putenv)\b|\bgetenv\s*\(|\bfrom\s+os\s+import[^\n]*environ"
)


class Split(NamedTuple):
    """A source taken apart: `code` without comments and literals, and the `literals` without docstrings."""

    code: str
    literals: list[str]


def split(path: str, source: str) -> Split:
    """Take comments and literals out of a Python, Cython or C source; line numbers stay what they were."""
    token = _C_TOKEN if path.endswith((".c", ".h")) else _CYTHON_TOKEN
    literals = []

    def blank(match: re.Match[str]) -> str:
        if match.lastgroup == "text":
            literals.append(match.group())
        text = match.group()
        indent = text[: len(text) - len(text.lstrip())]
        return indent + '""' + "\n" * text.strip().count("\n")

    code = token.sub(blank, "\n" + source)
    return Split(code.removeprefix("\n"), literals)


def _absolute(path: str, level: int, module: str) -> str:
    """Resolve a relative import of `level` dots in `path` to a dotted name."""
    package = PurePosixPath(path).parent.parts
    return ".".join((*package[: len(package) - level + 1], *filter(None, [module])))


def _from_import(path: str, level: int, module: str, names: list[str]) -> Iterator[str]:
    target = _absolute(path, level, module) if level else module
    # `from cecilia import arch` names a layer only in its second half.
    yield from (f"{target}.{name}" for name in names) if target == "cecilia" else (target,)


def _python_imports(path: str, source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _from_import(path, node.level, node.module or "", [alias.name for alias in node.names])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def _cython_imports(path: str, source: str) -> Iterator[str]:
    for module, names, plain in _CYTHON_IMPORT.findall(split(path, source).code):
        if plain:
            yield from (name.split()[0] for name in plain.split(",") if name.strip())
        else:
            bare = module.lstrip(".")
            wanted = [name.split()[0] for name in names.strip("() \t").split(",") if name.strip()]
            yield from _from_import(path, len(module) - len(bare), bare, wanted)


def imports(path: str, source: str) -> list[str]:
    """Return the dotted name of everything a Python or Cython file imports or cimports; C imports nothing."""
    if path.endswith((".c", ".h")):
        return []
    read = _cython_imports if path.endswith((".pyx", ".pxd")) else _python_imports
    return list(read(path, source))


def _layer(dotted: str) -> int | None:
    """Return the layer of a module of ours by its dotted name, None for a foreign one."""
    root, _, rest = dotted.partition(".")
    if root in LEAVES:
        return TOP
    return LAYERS.get(rest.partition(".")[0], 0) if root == "cecilia" else None


def _dotted(path: str) -> str:
    return ".".join(PurePosixPath(path).with_suffix("").parts)


def check_layers(path: str, source: str) -> list[str]:
    """Nothing imports from a layer above its own, and no leaf imports another."""
    own, root = _layer(_dotted(path)), path.partition("/")[0]
    if own is None:
        return []
    complaints = []
    for target in imports(path, source):
        layer, target_root = _layer(target), target.partition(".")[0]
        other_leaf = layer == TOP and target_root != root
        if other_leaf and (path, target_root) == ("tools/build_portable.py", "portable"):
            continue
        if layer is not None and (layer > own or other_leaf):
            complaints.append(f"layer {own} imports {target} of layer {layer}")
    return complaints


def check_known_layer(path: str, _source: str) -> list[str]:
    """Every module directly under cecilia/ has a layer."""
    parts = PurePosixPath(path).with_suffix("").parts
    if parts[0] != "cecilia" or parts[1] == "__init__" or parts[1] in LAYERS:
        return []
    return [f"cecilia/{parts[1]} has no layer: give it one in the table"]


def check_engine_imports(path: str, source: str) -> list[str]:
    """The engine knows nothing of event loops, HTTP or wire formats."""
    if not path.startswith("cecilia/"):
        return []
    return [f"imports {name}" for name in imports(path, source) if name.partition(".")[0] in NOT_IN_ENGINE]


def check_dlopen(path: str, source: str) -> list[str]:
    """Shared libraries are opened by hand in cecilia/backends/ alone."""
    found = re.search(r"\b(?:dlopen|CDLL|cdll|LoadLibrary)\b", split(path, source).code)
    return [f"uses {found.group()}"] if found and not path.startswith("cecilia/backends/") else []


def check_environment(path: str, source: str) -> list[str]:
    """The environment is read where configuration is made, and nowhere else."""
    found = _ENVIRONMENT.search(split(path, source).code)
    return [f"reads the environment: {found.group()}"] if found and path not in READS_ENVIRONMENT else []


def check_print(path: str, source: str) -> list[str]:
    """Only programs print."""
    if path.startswith(("tools/", "portable/")) or path.endswith(("/__main__.py", ".c", ".h")):
        return []
    return ["prints"] if re.search(r"(?<![\w.])print\s*\(", split(path, source).code) else []


def check_model_names(path: str, source: str) -> list[str]:
    """A model's name is a literal only where models are described or fetched."""
    if path.startswith(MAY_NAME_MODELS):
        return []
    found = {
        name
        for literal in split(path, source).literals
        for name in MODEL_NAMES & set(re.findall("[a-z]+", literal.lower()))
    }
    return [f"names the model {name}" for name in sorted(found)]


def check_intrinsics(path: str, source: str) -> list[str]:
    """Vector intrinsics stand in cecilia/_kernels/c/, and in the two C programs that time instructions."""
    parts = split(path, source)
    found = _INTRINSIC.search("\n".join((parts.code, *parts.literals)))
    allowed = path.startswith("cecilia/_kernels/c/") or path in TIMES_INSTRUCTIONS
    return [f"uses {found.group()}"] if found and not allowed else []


def check_licence(_path: str, source: str) -> list[str]:
    """One of the first three lines names the licence."""
    head = "\n".join(source.splitlines()[:3])
    return [] if "SPDX-License-Identifier: Apache-2.0" in head else ["lacks the SPDX line"]


def check_finished(_path: str, source: str) -> list[str]:
    """No marks of unfinished work."""
    return [f"contains {found.group()}" for found in UNFINISHED.finditer(source)]


def _python_functions(source: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def _cython_functions(path: str, source: str) -> Iterator[tuple[str, int]]:
    code = split(path, source).code
    for start in _CYTHON_FUNCTION.finditer(code):
        indent = len(start.group(1))
        lines = code[start.start() :].split("\n")
        length = 1
        for number, line in enumerate(lines[1:], 2):
            text = line.strip()
            if text and len(line) - len(line.lstrip()) <= indent and not text.startswith(")"):
                break
            length = number if text else length
        yield start.group().strip(" ("), length


def _c_functions(path: str, source: str) -> Iterator[tuple[str, int]]:
    start, header = 0, ""
    for number, line in enumerate(split(path, source).code.split("\n"), 1):
        if line[:1].isalpha() or line[:1] == "_":
            start, header = number, line
        elif line[:1] == "}" and "(" in header:
            yield header.strip(" {"), number - start + 1
            header = ""


def functions(path: str, source: str) -> list[tuple[str, int]]:
    """Return (name or signature, lines) of every function in a Python, Cython or C source."""
    if path.endswith((".py", ".pyi")):
        return list(_python_functions(source))
    if path.endswith((".pyx", ".pxd")):
        return list(_cython_functions(path, source))
    return list(_c_functions(path, source)) if path.endswith((".c", ".h")) else []


def check_size(path: str, source: str, *, max_file_lines: int, max_function_lines: int) -> list[str]:
    """Files and functions stay within the limits of pyproject.toml."""
    lines = len(source.splitlines())
    complaints = [f"has {lines} lines, at most {max_file_lines}"] if lines > max_file_lines else []
    return complaints + [
        f"{name} has {length} lines, at most {max_function_lines}"
        for name, length in functions(path, source)
        if length > max_function_lines
    ]


Check = Callable[[str, str], list[str]]
# For product code alone; tests name models, hold bad examples, and so on.
PRODUCT_CHECKS: tuple[Check, ...] = (
    check_layers,
    check_known_layer,
    check_engine_imports,
    check_dlopen,
    check_environment,
    check_print,
    check_model_names,
    check_intrinsics,
)
COMMON_CHECKS: tuple[Check, ...] = (check_licence, check_finished)
