# SPDX-License-Identifier: Apache-2.0
"""The Jinja environment chat templates run in: sandboxed, bounded in time and size, aware of masked text.

It offers what transformers' `apply_chat_template` offers to templates (trimmed blocks, loop controls, the
`generation` tag, `raise_exception`, `strftime_now`, `tojson`), and of Jinja's filters those that are known to
keep covered characters covered. A template that needs another filter does not load.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cecilia.text.masked import STRING_METHODS, Mask, MaskedStr

_FILTERS = (
    *("capitalize", "indent", "join", "lower", "replace", "string", "trim", "upper"),
    *(
        "batch",
        "count",
        "dictsort",
        "first",
        "items",
        "last",
        "length",
        "list",
        "map",
        "max",
        "min",
        "reject",
    ),
    *("rejectattr", "reverse", "select", "selectattr", "sort", "sum", "unique"),
    *("abs", "d", "default", "round"),
)
_MAX_INT_BITS = 256


class TemplateLimitError(TemplateError):
    """A template ran too long or grew too large."""


class _GenerationTag(Extension):
    """`{% generation %}` marks what an assistant wrote for those who train; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Generator(CodeGenerator):
    """Sends `a ~ b` and `a in b` through the environment, as `a + b` already goes."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        self.write("environment.join_printed((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        if [operand.op for operand in node.ops] not in (["in"], ["notin"]):
            super().visit_Compare(node, frame)
            return
        self.write("(not " if node.ops[0].op == "notin" else "(")
        self.write("environment.contains(")
        self.visit(node.expr, frame)
        self.write(", ")
        self.visit(node.ops[0].expr, frame)
        self.write("))")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """One environment per template. `mask` and `check` belong to the rendering under way; renderings of one
    environment must not overlap.

    `check` is called at every function call and operator, and raises when the rendering's time is over.
    `max_size` bounds every intermediate string, in characters.
    """

    code_generator_class = _Generator
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, *, max_size: int) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        self.mask = Mask()
        self.check: Callable[[], None] = _no_check
        self.max_size = max_size
        self.filters = {name: self._lifting(self.filters[name]) for name in _FILTERS}
        self.filters["tojson"] = self._tojson
        self.filters["safe"] = _same  # nothing is escaped here
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in STRING_METHODS
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.check()
        return __self._bounded(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.check()
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                    self._refuse_size(len(sequence) * times)
        if operator == "**" and isinstance(right, int) and right > _MAX_INT_BITS:
            raise TemplateLimitError("the template computes too large a number")
        return self._bounded(super().call_binop(context, operator, left, right))

    def concat(self, parts: Iterable[str]) -> str:
        """How Jinja joins the output of macros and of `{% set %}` blocks."""
        return str(self._bounded("".join(parts)))

    def join_printed(self, values: Iterable[Any]) -> str:
        """`a ~ b`: what each value prints, joined."""
        return self.concat(map(str, values))

    def contains(self, item: Any, container: Any) -> bool:
        """`item in container`; a plain string would look for the covers of a masked one."""
        if isinstance(item, MaskedStr) and isinstance(container, str):
            return item in MaskedStr(container, self.mask)
        return item in container

    def _bounded(self, value: Any) -> Any:
        if isinstance(value, str):
            self._refuse_size(len(value))
            return self.mask.lift(value)
        if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
            raise TemplateLimitError("the template computes too large a number")
        return value

    def _refuse_size(self, size: int) -> None:
        if size > self.max_size:
            raise TemplateLimitError(f"the template makes a text of more than {self.max_size} characters")

    def _lifting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # keeps Jinja's marks of what the filter is to be passed
        def lifted(*args: Any, **kwargs: Any) -> Any:
            return self._bounded(function(*args, **kwargs))

        return lifted

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> Any:
        """JSON without HTML escapes. `ensure_ascii` is applied to user text only."""
        return self._bounded(
            json.dumps(
                self._escaped(value, ensure_ascii=ensure_ascii),
                ensure_ascii=False,
                indent=indent,
                separators=separators,
                sort_keys=sort_keys,
            )
        )

    def _escaped(self, value: Any, *, ensure_ascii: bool) -> Any:
        """Escape masked strings now, since the JSON library sees only covers, which it leaves alone."""
        if isinstance(value, MaskedStr):
            return self.mask.cover(json.dumps(value._text, ensure_ascii=ensure_ascii)[1:-1])
        if isinstance(value, dict):
            return {
                self._escaped(key, ensure_ascii=ensure_ascii): self._escaped(item, ensure_ascii=ensure_ascii)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._escaped(item, ensure_ascii=ensure_ascii) for item in value]
        return value


def _no_check() -> None:
    """Before the first rendering nothing is bounded in time: Jinja only folds constants then."""


def _same(value: Any) -> Any:
    return value


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
