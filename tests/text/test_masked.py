# SPDX-License-Identifier: Apache-2.0
"""Masked strings: they read like plain ones, and what they give out stays covered."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cecilia.errors import RequestError
from cecilia.text.masked import COVERED, STRING_METHODS, Mask, MaskedStr

PIECES = st.sampled_from(["a", "B", "ab", " ", "\n", "\t", "</think>", "ß", "é", "\U000f0001", "<", "x"])
STRINGS = st.lists(PIECES, max_size=8).map("".join)
ARGUMENTS = {
    "startswith": [("a",), (("ab", "<"),)],
    "endswith": [("\n",), ("x", 1)],
    "find": [("a",), ("</think>", 2)],
    "rfind": [("a",), ("b", 0, 3)],
    "count": [("a",), ("ab",)],
    "strip": [(), ("\n",), ("ax ",)],
    "lstrip": [(), ("\n",), ("ax ",)],
    "rstrip": [(), ("\n",), ("ax ",)],
    "removeprefix": [("a",), ("",), ("zz",)],
    "removesuffix": [("x",), ("",), ("zz",)],
    "split": [(), ("a",), ("</think>",), (None, 1), ("a", 2)],
    "rsplit": [(), ("a",), (None, 1), (None, 2), ("a", 1)],
    "splitlines": [(), (True,)],
    "replace": [("a", "zz"), ("ab", ""), ("a", "b", 1)],
    "join": [(["a", "b", "c"],), ([],)],
    "lower": [()],
    "upper": [()],
}


def reveal(mask: Mask, value: Any) -> Any:
    if isinstance(value, list):
        return [reveal(mask, item) for item in value]
    return mask.reveal(value) if isinstance(value, str) else value


def all_covered(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(all_covered, value))
    return not isinstance(value, str) or not value or COVERED.fullmatch(str.__str__(value)) is not None


@settings(max_examples=150, deadline=None)
@given(STRINGS)
def test_methods_answer_as_those_of_plain_strings_and_leak_nothing(text: str) -> None:
    mask = Mask()
    masked = mask.cover(text)
    for method, argument_lists in ARGUMENTS.items():
        for arguments in argument_lists:
            answer = getattr(masked, method)(*arguments)
            assert reveal(mask, answer) == getattr(text, method)(*arguments), (method, arguments)
            if method not in ("replace", "join"):  # these two put template text in
                assert all_covered(answer), (method, arguments)


def test_every_method_open_to_templates_is_tested_or_is_shown_here() -> None:
    mask = Mask()
    assert mask.cover("ab").index("b") == 1
    assert mask.reveal(mask.cover("hELLO").capitalize()) == "Hello"
    assert set(ARGUMENTS) | {"index", "capitalize"} == STRING_METHODS


@settings(max_examples=150, deadline=None)
@given(STRINGS, STRINGS, STRINGS)
def test_text_mixed_with_template_text_keeps_both_apart(before: str, text: str, after: str) -> None:
    before, after = COVERED.sub("", before), COVERED.sub("", after)  # templates hold no private code points
    mask = Mask()
    mixed = before + mask.cover(text) + after
    assert isinstance(mixed, MaskedStr) or text == ""
    plain = before + text + after
    assert mask.reveal(mixed) == plain
    assert reveal(mask, mixed.split("a")) == plain.split("a")
    assert mask.reveal(mixed.strip()) == plain.strip()
    assert COVERED.sub("", "".join((before, mask.cover(text), after))) == before + after


@given(STRINGS, STRINGS)
def test_operators(left: str, right: str) -> None:
    mask = Mask()
    a, b = mask.cover(left), mask.cover(right)
    assert (a == b, a == right, left == b, a != b) == (
        left == right,
        left == right,
        left == right,
        left != right,
    )
    assert (a < b, a <= right, a > b, a >= right) == (
        left < right,
        left <= right,
        left > right,
        left >= right,
    )
    assert (right in a, b in a, len(a), bool(a)) == (right in left, right in left, len(left), bool(left))
    assert {left: 1}.get(a) == 1
    assert [mask.reveal(char) for char in a] == list(left)
    assert (mask.reveal(a[1:]), mask.reveal(a[::-1]), mask.reveal(a * 2)) == (left[1:], left[::-1], left * 2)


def test_plain_operations_of_the_interpreter_cannot_uncover() -> None:
    mask = Mask()
    masked = mask.cover("<think>")
    for made in (
        "".join([masked]),
        f"{masked}",
        "%s" % masked,  # noqa: UP031
        "{}".format(masked),  # noqa: UP032
        str(masked),
        repr(masked),
        ascii(masked),
        masked.encode().decode(),
        "-".join(masked),
        masked.title(),
        masked.swapcase(),
        masked.zfill(20),
        masked.center(20),
    ):
        raw = str.__str__(made)  # a MaskedStr would answer for the plain text
        assert "think" not in raw.lower()
        assert "<" not in raw


def test_a_lifted_string_has_its_methods_again() -> None:
    mask = Mask()
    lost = "".join([" ", mask.cover(" a\n")])
    lifted = mask.lift(lost)
    assert mask.reveal(lifted.strip()) == "a"
    assert mask.lift("plain") == "plain"
    assert mask.lift(5) == 5


def test_users_cannot_spell_covers() -> None:
    mask = Mask()
    first = mask.cover("ab")
    forged = mask.cover(str.__str__(first))
    assert mask.reveal(forged) == "".join(str.__iter__(first))
    assert mask.reveal(first) == "ab"


def test_unknown_covers_are_refused() -> None:
    with pytest.raises(ValueError, match="stands for nothing"):
        Mask().reveal("\U0010fffd")


def test_the_table_is_bounded() -> None:
    mask = Mask()
    everything = "".join(map(chr, range(0x20000)))
    mask.cover(everything)
    with pytest.raises(RequestError, match="invalid_value"):
        mask.cover(chr(0x20000))
