# SPDX-License-Identifier: Apache-2.0
"""Sequences at rest: which of them serves a prompt, and which goes when room is wanted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens

from cecilia.state.sequence import Sequence

MAX_SEQUENCES = 64
"""Kept at most: a lookup compares tokens with every one of them."""


class PrefixCache:
    """Holds the sequences nobody is running.

    Eviction is GreedyDual-Size-Frequency (Cherkasova, HPL-98-69R1): a sequence is worth
    age + (hits + 1) * work / size, with the tokens a prefill would repeat as work, the bytes its eviction
    frees as size, and as age the worth of the last one evicted when it was last used. Age, size and hits
    count at once, and nothing stays for ever because it was popular long ago. Pinned ones stay.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: list[Sequence] = []
        self._born: dict[str, float] = {}  # age by id
        self._age = 0.0
        self.evictions = 0

    def __iter__(self) -> Iterator[Sequence]:
        """A copy is walked: status routes look on from other threads."""
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def best(self, tokens: Tokens[int], salt: str, name: str | None) -> tuple[Sequence | None, int]:
        """The sequence that saves most of `tokens`, and how many; of equal ones that of session `name` (for
        None: of no session), then the one used last."""
        found: Sequence | None = None
        most = (0, False, 0.0)
        for entry in self:
            if entry.salt != salt:
                continue
            count = entry.reusable(entry.common(tokens))
            rank = (count, entry.name == name, entry.last_used)
            if count and rank > most:
                found, most = entry, rank
        return found, most[0]

    def named(self, name: str) -> Sequence | None:
        """The sequence of session `name`."""
        return next((entry for entry in self if entry.name == name), None)

    def touch(self, entry: Sequence) -> None:
        """Note that `entry` was used now."""
        entry.last_used = self._clock()
        self._born[entry.id] = self._age

    def add(self, entry: Sequence) -> None:
        """Put a sequence to rest, unless another covers it; it covers others in turn, which go."""
        special = entry.name is not None or entry.pinned
        if not len(entry) or (not special and any(other.covers(entry) for other in self)):
            return
        for other in self:
            if other.name is None and not other.pinned and entry.covers(other):
                self.remove(other)
        self.touch(entry)
        self._entries.append(entry)
        while len(self) > MAX_SEQUENCES and self.evict():
            pass

    def remove(self, entry: Sequence) -> None:
        """Let go of `entry`, if it is here; its pages return unless others own them."""
        if entry in self._entries:
            self._entries.remove(entry)
            del self._born[entry.id]

    def evict(self) -> bool:
        """Let the sequence go that is worth least; False when none may go."""
        candidates = [entry for entry in self if not entry.pinned]
        if not candidates:
            return False
        least = min(candidates, key=self._worth)
        self._age = self._worth(least)
        self.remove(least)
        self.evictions += 1
        return True

    def clear(self) -> None:
        """Let all go, pinned ones too."""
        self._entries.clear()
        self._born.clear()

    def _worth(self, entry: Sequence) -> float:
        size = entry.private_bytes() + sum(state.nbytes for state in entry.checkpoints.values())
        return self._born[entry.id] + (entry.hits + 1) * len(entry) / max(size, 1)
