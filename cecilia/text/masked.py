# SPDX-License-Identifier: Apache-2.0
"""Strings that remember, through anything a template does to them, which characters a user supplied.

Each distinct character of user-supplied strings is replaced, one for one, by a code point of the private
planes 15 and 16 (the cover). Template text holds none of these, so in the rendered output a covered character
is a user's and any other is the template's, whatever route it took. User text is covered as a whole, private
code points included, so it cannot spell a cover. `MaskedStr` makes covered text behave like the text it
stands for: comparisons, searches, strip and split see the plain characters and return covered pieces. What a
template does past these methods, in C code of the interpreter, sees covers only: it may read oddly, but
cannot turn user text into template text.

The one rule to keep when changing this file: nothing may return plain user characters as a `str`; answers of
other types (bool, int) are free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, SupportsIndex

from cecilia.errors import RequestError

_FIRST, _LAST = 0xF0000, 0x10FFFF
COVERED = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]+")


class Mask:
    """The table of covers of one rendering."""

    def __init__(self) -> None:
        self._covers: dict[int, int] = {}
        self._plain: dict[int, int] = {}

    def cover(self, text: str) -> MaskedStr:
        """Cover a user's text; RequestError `invalid_value` past 131,072 different characters."""
        for char in dict.fromkeys(text):
            if ord(char) not in self._covers:
                code = _FIRST + len(self._covers)
                if code > _LAST:
                    raise RequestError(
                        "invalid_value", "messages hold too many different characters", param="messages"
                    )
                self._covers[ord(char)] = code
                self._plain[code] = ord(char)
        return MaskedStr(text.translate(self._covers), self)

    def cover_all(self, value: Any) -> Any:
        """A copy of a JSON-like value with every string in it covered, keys included."""
        if isinstance(value, str):
            return self.cover(value)
        if isinstance(value, dict):
            return {self.cover_all(key): self.cover_all(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.cover_all(item) for item in value]
        return value

    def reveal(self, text: str) -> str:
        """The plain text; ValueError for a cover this table never gave out."""
        for char in set(str.__iter__(text)):
            if ord(char) >= _FIRST and ord(char) not in self._plain:
                raise ValueError("the text holds a private code point that stands for nothing")
        return str.translate(text, self._plain)

    def lift(self, value: Any) -> Any:
        """Give back its methods to covered text that lost them in passing through a plain operation."""
        if isinstance(value, str) and not isinstance(value, MaskedStr) and COVERED.search(value):
            return MaskedStr(value, self)
        return value


class MaskedStr(str):
    """Text with covered characters, alone or among plain ones. Positions are those of the plain text."""

    _mask: Mask
    _cached: str | None

    def __new__(cls, covered: str, mask: Mask) -> MaskedStr:
        self = super().__new__(cls, covered)
        self._mask = mask
        self._cached = None
        return self

    @property
    def _text(self) -> str:
        """The plain text. Private: the sandbox lets no template reach it."""
        if self._cached is None:
            self._cached = self._mask.reveal(self)
        return self._cached

    def _cut(self, start: int, end: int) -> MaskedStr:
        return MaskedStr(str.__getitem__(self, slice(start, end)), self._mask)

    def _locate(self, pieces: list[str]) -> list[str]:
        """The covered text of pieces that follow one another in the plain text, separators between them."""
        found: list[str] = []
        at = 0
        for piece in pieces:
            at = self._text.index(piece, at)
            found.append(self._cut(at, at + len(piece)))
            at += len(piece)
        return found

    # str(x) must not make a plain str of it: Jinja calls it on all it prints.
    def __str__(self) -> str:
        return self

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return bool(self._text == _plain(other))

    def __ne__(self, other: object) -> bool:
        return bool(self._text != _plain(other))

    def __lt__(self, other: str) -> bool:
        return bool(self._text < _plain(other))

    def __le__(self, other: str) -> bool:
        return bool(self._text <= _plain(other))

    def __gt__(self, other: str) -> bool:
        return bool(self._text > _plain(other))

    def __ge__(self, other: str) -> bool:
        return bool(self._text >= _plain(other))

    def __contains__(self, needle: object) -> bool:
        return isinstance(needle, str) and _plain(needle) in self._text

    def __getitem__(self, key: SupportsIndex | slice) -> MaskedStr:
        return MaskedStr(super().__getitem__(key), self._mask)

    def __iter__(self) -> Iterator[str]:
        return (MaskedStr(char, self._mask) for char in super().__iter__())

    def __add__(self, other: str) -> MaskedStr:
        if not isinstance(other, str):
            return NotImplemented
        return MaskedStr("".join((self, other)), self._mask)

    def __radd__(self, other: str) -> MaskedStr:
        if not isinstance(other, str):
            return NotImplemented
        return MaskedStr("".join((other, self)), self._mask)

    def __mul__(self, times: SupportsIndex) -> MaskedStr:
        return MaskedStr(super().__mul__(times), self._mask)

    __rmul__ = __mul__

    def startswith(self, prefix: Any, *span: Any) -> bool:
        return self._text.startswith(_plain(prefix), *span)

    def endswith(self, suffix: Any, *span: Any) -> bool:
        return self._text.endswith(_plain(suffix), *span)

    def find(self, needle: str, *span: Any) -> int:
        return self._text.find(_plain(needle), *span)

    def rfind(self, needle: str, *span: Any) -> int:
        return self._text.rfind(_plain(needle), *span)

    def index(self, needle: str, *span: Any) -> int:
        return self._text.index(_plain(needle), *span)

    def count(self, needle: str, *span: Any) -> int:
        return self._text.count(_plain(needle), *span)

    def strip(self, chars: str | None = None) -> MaskedStr:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> MaskedStr:
        return self._cut(len(self) - len(self._text.lstrip(_plain(chars))), len(self))

    def rstrip(self, chars: str | None = None) -> MaskedStr:
        return self._cut(0, len(self._text.rstrip(_plain(chars))))

    def removeprefix(self, prefix: str) -> MaskedStr:
        return self._cut(len(prefix) if prefix and self.startswith(prefix) else 0, len(self))

    def removesuffix(self, suffix: str) -> MaskedStr:
        return self._cut(0, len(self) - (len(suffix) if suffix and self.endswith(suffix) else 0))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._locate_split(sep, self._text.split(_plain(sep), maxsplit))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._locate_split(sep, self._text.rsplit(_plain(sep), maxsplit))

    def _locate_split(self, sep: str | None, pieces: list[str]) -> list[str]:
        if sep is None:
            return self._locate(pieces)
        found: list[str] = []
        at = 0
        for piece in pieces:
            found.append(self._cut(at, at + len(piece)))
            at += len(piece) + len(sep)
        return found

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._locate(self._text.splitlines(keepends))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> MaskedStr:
        if not old:
            raise ValueError("replacing an empty string is not supported")
        return MaskedStr(str.join(new, self.split(old, count)), self._mask)

    def join(self, parts: Iterable[str]) -> MaskedStr:
        return MaskedStr(super().join(parts), self._mask)

    def lower(self) -> MaskedStr:
        return self._map_case("lower", self)

    def upper(self) -> MaskedStr:
        return self._map_case("upper", self)

    def capitalize(self) -> MaskedStr:
        return self._map_case("title", self[:1]) + self._map_case("lower", self[1:])

    def _map_case(self, method: str, text: str) -> MaskedStr:
        """Change case character by character; a user's character stays a user's."""
        mapped: list[str] = []
        for char in str.__iter__(text):
            if _FIRST <= ord(char) <= _LAST:
                mapped.append(self._mask.cover(getattr(self._mask.reveal(char), method)()))
            else:
                mapped.append(getattr(char, method)())
        return MaskedStr("".join(mapped), self._mask)


# What a template may call on a string: each either is overridden above or answers nothing but True, False or
# a number.
STRING_METHODS = frozenset(
    {
        *(
            "startswith",
            "endswith",
            "find",
            "rfind",
            "index",
            "count",
            "strip",
            "lstrip",
            "rstrip",
            "split",
            "rsplit",
        ),
        *("splitlines", "removeprefix", "removesuffix", "replace", "join", "lower", "upper", "capitalize"),
    }
)


def _plain(value: Any) -> Any:
    """The plain text behind a MaskedStr, in a tuple too; anything else as it is."""
    if isinstance(value, MaskedStr):
        return value._text
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value
