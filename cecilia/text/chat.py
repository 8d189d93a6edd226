# SPDX-License-Identifier: Apache-2.0
"""Chat messages to prompt tokens, by the template in the model file.

Provenance decides what is a control token: the template's own characters are read with control tokens
recognised, those of messages and other request values never are (see masked.py for how the two are told
apart). Between two control tokens, plain text of the template and of users is tokenised as one run, so
harmless messages get exactly the tokens they would get from encoding the rendered text as a whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from jinja2 import TemplateError

from cecilia.errors import ModelFileError, RequestError
from cecilia.text.masked import COVERED, Mask
from cecilia.text.sandbox import ChatEnvironment, TemplateLimitError
from cecilia.text.tokenizer import Tokenizer

MAX_SOURCE_BYTES = 64 * 1024
MAX_OUTPUT_CHARS = 16 * 1024 * 1024
MAX_SECONDS = 5.0
ROLES = ("system", "developer", "user", "assistant", "tool")

# What a template can do wrong while it runs, besides Jinja's own errors: its expressions are Python's.
_RUN_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of rendered text that is wholly the template's or wholly of the request."""

    text: str
    is_user_text: bool


class ChatTemplate:
    """A Jinja chat template.

    `special_tokens` are trusted names for the template, such as {"bos_token": "<s>"}. `clock` (seconds,
    monotonic) and `now` are for tests. Raises ModelFileError `bad_template` for a source that is too long,
    does not parse, or uses private code points.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        if len(source.encode("utf-8", "surrogatepass")) > MAX_SOURCE_BYTES:
            raise ModelFileError("bad_template", f"the chat template is longer than {MAX_SOURCE_BYTES} bytes")
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        if any(COVERED.search(text) for text in (source, *self._special_tokens.values())):
            raise ModelFileError("bad_template", "the chat template holds code points of the private planes")
        self._clock = clock
        self._now = now
        self._environment = ChatEnvironment(max_size=MAX_OUTPUT_CHARS)
        self._rendering = threading.Lock()  # the environment holds the mask of the render at work
        self._environment.globals["strftime_now"] = self._strftime_now
        try:
            self._template = self._environment.from_string(source)
        except (TemplateError, SyntaxError, ValueError, RecursionError) as error:
            raise ModelFileError("bad_template", f"the chat template does not load: {_line(error)}") from None

    def render(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[Segment]:
        """Render messages (see `normalise`) into segments; `kwargs` are request values the template may read.

        Any thread may ask.

        Raises RequestError `template_error` when the template refuses, fails, or exceeds its time or size.
        """
        mask = Mask()
        reserved = {"messages", "add_generation_prompt", *self._special_tokens, *self._environment.globals}
        if clash := reserved & kwargs.keys():
            raise RequestError(
                "invalid_value", f"{min(clash)!r} cannot be set", param=f"chat_template_kwargs.{min(clash)}"
            )
        context = {
            **self._special_tokens,
            **{name: mask.cover_all(value) for name, value in kwargs.items()},
            "messages": [_masked_message(message, mask) for message in normalise(messages)],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with self._rendering:
                rendered = self._run(context, mask)
            return list(_segments(rendered, mask))
        except _RUN_ERRORS as error:
            raise RequestError("template_error", _readable(error, mask), param="messages") from None

    def _run(self, context: dict[str, Any], mask: Mask) -> str:
        """The rendered text, user characters covered."""
        deadline = self._clock() + MAX_SECONDS

        def check() -> None:
            if self._clock() > deadline:
                raise TemplateLimitError(f"the chat template runs for more than {MAX_SECONDS:g} s")

        self._environment.mask, self._environment.check = mask, check
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(context):
            size += len(piece)
            if size > MAX_OUTPUT_CHARS:
                raise TemplateLimitError(f"the chat template writes more than {MAX_OUTPUT_CHARS} characters")
            check()
            pieces.append(piece)
        return "".join(pieces)

    def _strftime_now(self, pattern: str) -> str:
        """The date, at midnight UTC: a prompt that changed by the second could not be reused."""
        return self._now().replace(hour=0, minute=0, second=0, microsecond=0).strftime(str(pattern))


def normalise(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them.

    `developer` is `system`; system messages before the first other one are joined into one by blank lines; a
    later system message stays where it is. Absent content is "". Raises RequestError for a message that is
    not an object with a known role, naming its index.
    """
    joined: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(
                "invalid_value",
                f"messages[{index}].role is {role!r}, not one of {', '.join(ROLES)}",
                param=f"messages[{index}].role",
            )
        content = message.get("content")
        turn = {
            **message,
            "role": "system" if role == "developer" else role,
            "content": "" if content is None else content,
        }
        if turn["role"] == "system" and [earlier["role"] for earlier in joined] == ["system"]:
            joined[0] = {**joined[0], "content": f"{joined[0]['content']}\n\n{turn['content']}"}
        else:
            joined.append(turn)
    return joined


def encode_segments(tokenizer: Tokenizer, segments: Iterable[Segment]) -> list[int]:
    """Token ids of rendered segments; BOS first if the model wants it and the template did not write it."""
    ids: list[int] = []
    plain: list[str] = []
    for segment in segments:
        parts = [segment.text] if segment.is_user_text else tokenizer.split_control(segment.text)
        for part in parts:
            if isinstance(part, str):
                plain.append(part)
            else:
                ids += tokenizer.encode_text("".join(plain))
                plain.clear()
                ids.append(part)
    ids += tokenizer.encode_text("".join(plain))
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


def _masked_message(message: dict[str, Any], mask: Mask) -> dict[str, Any]:
    """Cover all of a message but its role, which is one of ours, and the names of its top-level fields."""
    return {name: value if name == "role" else mask.cover_all(value) for name, value in message.items()}


def _segments(rendered: str, mask: Mask) -> Iterator[Segment]:
    done = 0
    for run in COVERED.finditer(rendered):
        if run.start() > done:
            yield Segment(rendered[done : run.start()], is_user_text=False)
        yield Segment(mask.reveal(run.group()), is_user_text=True)
        done = run.end()
    if done < len(rendered):
        yield Segment(rendered[done:], is_user_text=False)


def _line(error: BaseException) -> str:
    """The error's text on one line of bounded length."""
    return " ".join(str(error).split())[:500] or type(error).__name__


def _readable(error: BaseException, mask: Mask) -> str:
    """The error's text; a message that quotes the request holds covers, which are undone for the reader."""
    try:
        return mask.reveal(_line(error))
    except ValueError:
        return type(error).__name__
