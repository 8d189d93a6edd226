# SPDX-License-Identifier: Apache-2.0
"""One timeline of evaluated tokens with what the model keeps of them."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from itertools import count, takewhile

from cecilia._kernels.buffer import Fixed
from cecilia.state.pages import Checkpoint, PagePool, PageTable

_BLOCK = 1024  # tokens compared at once
_numbers = count(1)


class Sequence:
    """Tokens at positions 0, 1, 2 ..., their pages, and checkpoints of the fixed state by position.

    Pages serve any prefix; a fixed state cannot be taken back, so a sequence of a model that has one can be
    continued from its checkpoints alone. `salt`: only requests with the same one may use it. `name`: of the
    session it belongs to. `parent`: the id of the sequence it was branched off. `hits`: how often it was
    continued. `last_used`: what the clock of the cache said then.
    """

    def __init__(self, pages: PageTable, *, recurrent: bool, salt: str = "", parent: str | None = None):
        self.id = f"seq-{next(_numbers)}"
        self.parent = parent
        self.salt = salt
        self.name: str | None = None
        self.pinned = False
        self.hits = 0
        self.last_used = 0.0
        self.tokens: list[int] = []
        self.pages = pages
        self.checkpoints: dict[int, Checkpoint] = {}
        self._recurrent = recurrent

    def __len__(self) -> int:
        return len(self.tokens)

    def common(self, tokens: Tokens[int]) -> int:
        """How many tokens at the start of both are the same; from any thread while others append."""
        held, end = self.tokens, min(len(self.tokens), len(tokens))
        first = 0
        while first + _BLOCK <= end and held[first : first + _BLOCK] == list(tokens[first : first + _BLOCK]):
            first += _BLOCK
        pairs = zip(held[first:end], tokens[first:end], strict=False)  # it may get shorter, too
        return min(end, first + sum(1 for _ in takewhile(_equal, pairs)))

    def reusable(self, common: int) -> int:
        """How many tokens serve a sequence that shares the first `common`: all layers have a state there."""
        count = self.pages.reusable(common, len(self))
        if self._recurrent:
            return max((position for position in list(self.checkpoints) if position <= count), default=0)
        return count

    def positions(self) -> list[int] | None:
        """Where it can be continued, in rising order; None: anywhere."""
        return sorted({0, *self.checkpoints}) if self._recurrent else None

    def branch(self, count: int) -> Sequence:
        """A new sequence of the first `count` tokens, a number that `reusable` gave; the pages are shared.

        Raises MemoryLimitError `insufficient_memory`.
        """
        pages = self.pages.share(count)
        other = Sequence(pages, recurrent=self._recurrent, salt=self.salt, parent=self.id)
        other.tokens = self.tokens[:count]
        other.checkpoints = {at: state for at, state in self.checkpoints.items() if at <= count}
        return other

    def truncate(self, count: int) -> None:
        """Forget all from token `count` on, which `reusable` gave."""
        del self.tokens[count:]
        self.pages.truncate(count)
        self.checkpoints = {at: state for at, state in self.checkpoints.items() if at <= count}

    def prepare(self, count: int) -> None:
        """Make pages for `count` more tokens that are this sequence's alone.

        Raises MemoryLimitError `insufficient_memory`, and then has no page more than before.
        """
        self.pages.own(len(self))
        self.pages.reserve(len(self) + count)

    def keep(self, fixed: Fixed, pool: PagePool, most: int) -> None:
        """Note the fixed state after all tokens, so that they can be continued from here.

        At most `most` checkpoints stay: the one closest behind another goes, but neither the first, which is
        likely the system prompt's, nor the last three, the turn at work. Raises MemoryLimitError.
        """
        if not self._recurrent or not self.tokens or len(self) in self.checkpoints:
            return
        self.checkpoints[len(self)] = Checkpoint(pool, fixed)
        at = sorted(self.checkpoints)
        while len(at) > max(most, 4):
            closest = min(range(1, len(at) - 3), key=lambda i: at[i] - at[i - 1])
            del self.checkpoints[at.pop(closest)]

    def covers(self, other: Sequence) -> bool:
        """Whether all that `other` could be continued from can be had here too."""
        return (
            self.salt == other.salt
            and self.common(other.tokens) == len(other)
            and other.checkpoints.keys() <= self.checkpoints.keys()
        )

    def private_bytes(self) -> int:
        """Bytes of pages that no other sequence owns."""
        return (len(self.pages) - self.pages.shared) * self.pages.pool.page_bytes


def _equal(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]
