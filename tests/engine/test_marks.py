# SPDX-License-Identifier: Apache-2.0
"""Where prompts part, with a template that is a function here: positions counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from cecilia.engine.marks import marks
from cecilia.errors import RequestError

Messages = list[dict[str, Any]]


def encode(messages: Messages) -> list[int]:
    """A letter a token: `[role:content]` of each turn, and what opens the answer."""
    text = "".join(f"[{turn['role'][0]}:{turn['content']}]" for turn in messages)
    return [ord(letter) for letter in text + "[a:"]


def thinking(messages: Messages) -> list[int]:
    """The same, but the answer to come opens with a tag that past ones have not."""
    return [*encode(messages), ord("<")]


USER, SYSTEM = {"role": "user", "content": "hi"}, {"role": "system", "content": "be"}


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (encode, [USER], (9,)),  # [u:hi][a:
        (thinking, [USER], (9, 10)),  # and <, which the next turn will not have
        (encode, [SYSTEM, USER], (9, 15)),  # [s:be][u: of another chat, [s:be][u:hi][a:
        (thinking, [SYSTEM, USER], (9, 15, 16)),
    ],
)
def test_where_later_prompts_part(template: Any, messages: Messages, expected: tuple[int, ...]) -> None:
    assert marks(template, messages, template(messages)) == expected


def test_a_template_that_refuses_what_may_come_leaves_the_end() -> None:
    def strict(messages: Messages) -> list[int]:
        if len(messages) > 1:
            raise RequestError("template_error", "one turn only")
        return encode(messages)

    assert marks(strict, [USER], strict([USER])) == (9,)
