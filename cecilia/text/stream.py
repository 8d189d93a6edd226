# SPDX-License-Identifier: Apache-2.0
"""From the bytes of generated tokens to what a client may see: UTF-8 gate, think splitter, stop matcher.

The three are one unit because each withholds text for its own reason and all of it must come out at `flush`.
What is emitted in total depends only on the bytes pushed, never on how they were cut into pushes.

Rules:
- Invalid UTF-8 becomes U+FFFD exactly as `bytes.decode("utf-8", "replace")` would do it; an incomplete
  character is held until it is complete, and is U+FFFD if it never is.
- A think block is recognised only as the first thing said (white space may come before it, and goes with it);
  later tags are ordinary text. Newlines next to its tags, inside and after, belong to the tags.
- When the prompt already opened the block (`opens_in_think`), the text starts inside it; an opening tag that
  the model repeats is dropped.
- Stops are looked for in the answer, not in the reasoning. The stop that is complete first ends the text, the
  longest one if several are complete at that character; text before it is emitted, the stop and all after it
  never.
- Ends are stops of the model's own, the spelling of its end token for one. They end the reasoning too, and
  are looked for before anything else.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Piece:
    """What one push released: text of the answer, text of the reasoning, whether a stop string ended it."""

    content: str = ""
    reasoning: str = ""
    stopped: bool = False


class TextStream:
    """The text of one generation.

    `stops`: strings that end the answer (empty ones are dropped). `ends`: strings that end everything.
    `think`: the opening and closing tag, or None when the model has no think block. `opens_in_think`: the
    prompt ends inside the block.
    """

    def __init__(
        self,
        *,
        stops: Iterable[str] = (),
        ends: Iterable[str] = (),
        think: tuple[str, str] | None = None,
        opens_in_think: bool = False,
    ) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._end = _StopMatcher(tuple(ends))
        self._think = None if think is None else _ThinkSplitter(*think, opened=opens_in_think)
        self._stop = _StopMatcher(tuple(stop for stop in stops if stop))

    def push(self, data: bytes) -> Piece:
        """Take the bytes of one or more tokens; return the text that is certain by now."""
        return self._advance(self._decoder.decode(data), final=False)

    def flush(self) -> Piece:
        """Return all text still held, once, when the generation is over."""
        return self._advance(self._decoder.decode(b"", final=True), final=True)

    def _advance(self, text: str, *, final: bool) -> Piece:
        if self._end.stopped or self._stop.stopped:
            return Piece(stopped=True)
        text = self._end.push(text, final=final)
        final = final or self._end.stopped
        reasoning = ""
        if self._think is not None:
            reasoning, text = self._think.push(text, final=final)
        content = self._stop.push(text, final=final)
        return Piece(content, reasoning, self._end.stopped or self._stop.stopped)


class _Part(Enum):
    START = "nothing but white space or a beginning tag was seen"
    THINK = "inside the block"
    GAP = "after the closing tag, before the answer"
    ANSWER = "in the answer"


class _ThinkSplitter:
    """Divides text into reasoning and answer."""

    def __init__(self, open_tag: str, close_tag: str, *, opened: bool) -> None:
        self._open, self._close, self._opened = open_tag, close_tag, opened
        self._part = _Part.START
        self._held = ""
        self._at_line_start = True  # no reasoning yet: newlines still belong to the opening tag

    def push(self, text: str, *, final: bool) -> tuple[str, str]:
        """Return (reasoning, answer) made certain by `text`; with `final`, everything held."""
        self._held += text
        if self._part is _Part.START:
            self._start(final=final)
        reasoning = self._reasoning(final=final) if self._part is _Part.THINK else ""
        if self._part is _Part.GAP:
            self._held = self._held.lstrip("\n")
            if self._held:
                self._part = _Part.ANSWER
        answer = ""
        if self._part is _Part.ANSWER:
            answer, self._held = self._held, ""
        return reasoning, answer

    def _start(self, *, final: bool) -> None:
        """Leave START when the first non-space text is the opening tag, or can no longer become it."""
        seen = self._held.lstrip()
        if seen.startswith(self._open):
            self._held = seen[len(self._open) :]
            self._part = _Part.THINK
        elif final or not self._open.startswith(seen):
            self._part = _Part.THINK if self._opened else _Part.ANSWER

    def _reasoning(self, *, final: bool) -> str:
        """Take reasoning off the held text, up to the closing tag or to what may become it."""
        if self._at_line_start:
            self._held = self._held.lstrip("\n")
            self._at_line_start = not self._held
        end = self._held.find(self._close)
        if end >= 0:
            taken = self._held[:end].rstrip("\n")
            self._held = self._held[end + len(self._close) :]
            self._part = _Part.GAP
            return taken
        if final:
            taken, self._held = self._held, ""
            return taken
        sure = len(self._held) - _overlap(self._held, (self._close,))
        sure = len(self._held[:sure].rstrip("\n"))
        taken, self._held = self._held[:sure], self._held[sure:]
        return taken


class _StopMatcher:
    """Passes text on until one of the stops is complete; withholds the longest suffix that may become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, text: str, *, final: bool) -> str:
        """Return the text that no stop can claim any more; sets `stopped`."""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            keep = min(found)[1]
        else:
            keep = len(self._held) - (0 if final else _overlap(self._held, self._stops))
        passed, self._held = self._held[:keep], "" if self.stopped else self._held[keep:]
        return passed


def _overlap(text: str, words: tuple[str, ...]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of one of `words`."""
    longest = min(len(text), max((len(word) for word in words), default=1) - 1)
    for size in range(longest, 0, -1):
        if any(len(word) > size and word.startswith(text[-size:]) for word in words):
            return size
    return 0
