# SPDX-License-Identifier: Apache-2.0
"""A loaded model with one session: token ids in, logits out. Knows nothing of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from cecilia.arch.base import Model
from cecilia.errors import UsageError
from cecilia.formats.l3r import ModelFile
from cecilia.formats.residency import HugePages
from cecilia.state.pages import PagePool
from cecilia.state.session import Session


class Runner:
    """Owns the file, the model over it and the session. All calls on one thread.

    `vocab`: V. `context`: the most tokens a session may hold. `threads`: what the kernels use.
    `rope`: how RoPE is stretched, see Architecture.rope_mode.
    `weights_in`: where they are, mmap or hugepage; `huge` moves those that are not there yet.
    """

    def __init__(
        self,
        file: ModelFile,
        model: Model,
        pool: PagePool,
        *,
        vocab: int,
        context: int,
        threads: int,
        state_bytes: int,
        rope: str,
        huge: HugePages | None = None,
    ) -> None:
        self.file = file
        self.vocab = vocab
        self.context = context
        self.threads = threads
        self.rope = rope
        self.weights_in = "mmap" if huge is None else "hugepage"
        self._huge = huge
        self.pool = pool
        self.chunk = model.chunk
        self.session = Session(model, pool, state_bytes)

    def settle(self, *, steps: int | None = None) -> bool:
        """Move weights that are to be in huge pages: all, or `steps` slices. Returns whether all are there.

        Raises MemoryLimitError `insufficient_memory`: the rest then stays in the file for good.
        """
        if self._huge is not None:
            taken = 0
            while self._huge.left and taken != steps:
                self._huge.advance()
                taken += 1
        return self._huge is None or self._huge.left == 0

    def reset(self) -> None:
        """Forget the session."""
        self.session.clear()

    def feed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append `tokens` (at least one), in chunks; logits f32 [V] after the last of them.

        Raises UsageError `no_tokens`, `token_out_of_range` or `context_exceeded`, and MemoryLimitError.
        """
        for part in chunks(self._checked(tokens), self.chunk):
            logits = self.session.evaluate(part)
        return np.array(logits[-1])

    def evaluate(
        self, tokens: Sequence[int], all_logits: bool = True, chunk: int | None = None
    ) -> NDArray[np.float32]:
        """Logits f32 [T, V] of `tokens` [T] from an empty context, `chunk` at a time; or [1, V], the last."""
        size = self.chunk if chunk is None else chunk
        if not 1 <= size <= self.chunk:
            raise UsageError("invalid_chunk", f"chunks of {size} tokens; this model takes 1 to {self.chunk}")
        self.reset()
        parts = [
            self.session.evaluate(part, last_only=not all_logits).copy()
            for part in chunks(self._checked(tokens), size)
        ]
        return np.concatenate(parts) if all_logits else parts[-1]

    def greedy(self, tokens: Sequence[int], n: int) -> list[int]:
        """The `n` tokens after `tokens` from an empty context, each the likeliest; no end token stops it."""
        self.reset()
        out: list[int] = []
        pending = list(tokens)
        while len(out) < n:
            out.append(int(self.feed(pending).argmax()))
            pending = out[-1:]
        return out

    def close(self) -> None:
        """Release the memory and the file; the runner is of no use afterwards."""
        self.session.clear()
        del self.session, self.pool
        self._huge = None
        self.file.close()

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        ids = [int(token) for token in tokens]
        total = len(self.session.tokens) + len(ids)
        if not ids:
            raise UsageError("no_tokens", "there is no token to evaluate")
        if total > self.context:
            raise UsageError("context_exceeded", f"{total} tokens in a context of {self.context}")
        if min(ids) < 0 or max(ids) >= self.vocab:
            raise UsageError("token_out_of_range", f"ids {min(ids)} to {max(ids)}, vocabulary {self.vocab}")
        return ids


def chunks(tokens: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """`tokens` in order, at most `size` at a time."""
    return (tokens[i : i + size] for i in range(0, len(tokens), size))
