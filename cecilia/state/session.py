# SPDX-License-Identifier: Apache-2.0
"""The sequence that runs, and how a prompt finds what earlier ones left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from cecilia._kernels.buffer import Fixed
from cecilia._kernels.threads import begin_step
from cecilia.errors import MemoryLimitError
from cecilia.state.pages import PagePool, PageTable
from cecilia.state.prefix_cache import PrefixCache
from cecilia.state.sequence import Sequence
from cecilia.state.state import State

CHECKPOINT_SHARE = 4  # checkpoints of one sequence take at most this part of the budget
FEWEST_CHECKPOINTS, MOST_CHECKPOINTS = 4, 32

T = TypeVar("T")


class Forward(Protocol):
    """What a session needs of a model."""

    def forward(
        self, tokens: Tokens[int], state: State, first: int, *, last_only: bool
    ) -> NDArray[np.float32]: ...


class Session:
    """`tokens` are those whose state is held, at positions 0, 1, 2 ...; `cache` holds other sequences.

    An error leaves `tokens` as they were or, with `state_bytes` of a state that cannot be taken back, at the
    last checkpoint. Whatever way tokens were reached, the state is the same bytes.
    """

    def __init__(
        self, model: Forward, pool: PagePool, state_bytes: int = 0, cache: PrefixCache | None = None
    ) -> None:
        self.cache = cache or PrefixCache()
        self.model = model
        self.pool = pool
        self.fixed = Fixed(state_bytes)
        share = pool.limit_bytes // (CHECKPOINT_SHARE * state_bytes) if state_bytes else 0
        self.most_checkpoints = min(max(share, FEWEST_CHECKPOINTS), MOST_CHECKPOINTS)
        self.running = self._new()

    @property
    def tokens(self) -> list[int]:
        """The tokens of the running sequence."""
        return self.running.tokens

    @property
    def recurrent(self) -> bool:
        """Whether the model has a state that cannot be taken back."""
        return self.fixed.nbytes > 0

    def sequences(self) -> Iterator[Sequence]:
        """All that is held: the running sequence, then those at rest."""
        if self.tokens:
            yield self.running
        yield from self.cache

    def reusable(self, tokens: Tokens[int], *, salt: str = "", name: str | None = None) -> int:
        """How many of `tokens` need not be evaluated again. Never the last one: its logits are wanted.

        May be asked from any thread while another one runs the session.
        """
        wanted = tokens[:-1]
        _, count = self.cache.best(wanted, salt, name)
        return max(count, self._reusable_here(self.running, wanted, salt))

    def sync(self, tokens: Tokens[int], *, salt: str = "", name: str | None = None) -> int:
        """Run the sequence that shares most with `tokens`; return how many of them it holds.

        The rest is to be evaluated. What ran before is kept in the cache as long as there is room. `salt`:
        only sequences with the same one are looked at. `name`: the session that the sequence belongs to from
        now on; no other one continues a named sequence but by a branch of it.
        Raises MemoryLimitError `insufficient_memory`; then nothing has changed.
        """
        wanted = tokens[:-1]
        here = self._reusable_here(self.running, wanted, salt)
        found, count = self.cache.best(wanted, salt, name)
        if found is None or (here, self.running.name == name) >= (count, found.name == name):
            found, count = self.running, here
        goes_on = count == len(found) and found.name in (None, name)
        if found is self.running and not goes_on:
            self.checkpoint()  # a branch cannot take the state at hand along
            count = found.reusable(count)
        if count == 0:
            self._switch(self._new(salt), 0)
        elif not goes_on:
            self._switch(self._roomy(lambda: found.branch(count)), count)
        elif found is not self.running:
            self._switch(found, count)
        else:
            self.checkpoint()  # where an answer ended, a later edit may want to go on
        found.hits += count > 0
        self._rename(name)
        return count

    def evaluate(self, tokens: Tokens[int], *, last_only: bool = True) -> NDArray[np.float32]:
        """Append `tokens` [T]; logits f32 [T, V], or [1, V] with `last_only`, valid until the next call.

        Sequences at rest make room when there is none. Raises MemoryLimitError `insufficient_memory`.
        """
        running, first = self.running, len(self.running)
        self._roomy(lambda: running.prepare(len(tokens)))
        begin_step()
        try:
            state = State(running.pages.pages, self.fixed)
            logits = self.model.forward(tokens, state, first, last_only=last_only)
        except BaseException:
            self._recover()
            raise
        running.tokens.extend(tokens)
        return logits

    def checkpoint(self) -> None:
        """Make the present position one to come back to. Without room for it, it is not one."""
        try:
            self._roomy(lambda: self.running.keep(self.fixed, self.pool, self.most_checkpoints))
        except MemoryLimitError:
            return

    def spacing(self, window: int) -> int:
        """Tokens between the checkpoints of a long prefill, so that a whole window has enough of them."""
        return max(1, window // max(self.most_checkpoints - FEWEST_CHECKPOINTS, 1))

    def fork(
        self, source: Sequence, count: int, *, name: str | None = None, pinned: bool = False
    ) -> Sequence:
        """A sequence at rest of the first `count` tokens of `source`, a number its `reusable` gave.

        Raises MemoryLimitError `insufficient_memory`.
        """
        branch = self._roomy(lambda: source.branch(count))
        branch.name, branch.pinned = name, pinned
        self.cache.add(branch)
        return branch

    def build(self, make: Callable[[PagePool, int], Sequence]) -> Sequence:
        """`make(pool, state_bytes)`, with sequences at rest evicted until there is room for what it makes.

        Raises MemoryLimitError `insufficient_memory`.
        """
        return self._roomy(lambda: make(self.pool, self.fixed.nbytes))

    def drop(self) -> None:
        """Forget the running sequence: what it holds is not to be trusted."""
        self.running = self._new()
        self.fixed.clear()

    def rest(self) -> None:
        """Put the running sequence into the cache and run an empty one."""
        self._switch(self._new(), 0)

    def clear(self) -> None:
        """Forget everything and return the memory to the pool."""
        self.cache.clear()
        self.drop()

    def _new(self, salt: str = "") -> Sequence:
        return Sequence(PageTable(self.pool), recurrent=self.recurrent, salt=salt)

    def _reusable_here(self, running: Sequence, wanted: Tokens[int], salt: str) -> int:
        if running.salt != salt:
            return 0
        common = running.common(wanted)
        # Its state is at hand where it stands, checkpoint or not.
        return common if common == len(running) else running.reusable(common)

    def _switch(self, to: Sequence, count: int) -> None:
        """Let the running sequence rest and run `to`, all of whose `count` tokens can be continued from."""
        if self.running.tokens:
            self.checkpoint()
        before, self.running = self.running, to
        self.cache.remove(to)
        self.cache.add(before)
        if self.recurrent:
            if count:
                to.checkpoints[count].restore(self.fixed)
            else:
                self.fixed.clear()

    def _rename(self, name: str | None) -> None:
        """The session `name` is the running sequence; what it was before stays, without a name."""
        if name is not None and self.running.name != name:
            if (former := self.cache.named(name)) is not None:
                former.name = None
            self.running.name = name

    def _roomy(self, make: Callable[[], T]) -> T:
        """`make()`, with sequences at rest evicted until there is room."""
        while True:
            try:
                return make()
            except MemoryLimitError:
                if not self.cache.evict():
                    raise

    def _recover(self) -> None:
        """After a failed step: back to before it, or to the last checkpoint."""
        running = self.running
        if not self.recurrent:
            running.truncate(len(running))
            return
        count = running.reusable(len(running))
        running.truncate(count)
        if count:
            running.checkpoints[count].restore(self.fixed)
        else:
            self.fixed.clear()
