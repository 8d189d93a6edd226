# SPDX-License-Identifier: Apache-2.0
"""The engine thread, and the way of a job's events from it to the event loop.

One OS thread does everything that touches the engine: load, prepare, generate, close. A job's events wait in
a bounded queue; the loop is woken at most once per step, and a full queue holds the engine, as do a pause and
a reader's missing acknowledgements. Calls of others are made when it idles, is held, or between two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from cecilia.engine.job import ChatRequest, Delta, Event, Finished, Prefill, Prompt
from cecilia.errors import CeciliaError, RequestError
from server import log
from server.ack import Flow, State

# Steps that may be computed ahead of a slow reader. Its output buffer is bounded besides.
QUEUE_STEPS = 64


T = TypeVar("T")


class Engine(Protocol):
    """What the server uses of an engine; calls are made on the engine thread unless they say otherwise."""

    @property
    def info(self) -> dict[str, object]:
        """id, architecture, weights, context, profile, threads, isa, digest, quantisation."""

    @property
    def context(self) -> int:
        """Tokens of the window."""

    @property
    def defaults(self) -> dict[str, float]:
        """Sampling defaults of the model: temperature, top_p, top_k."""

    def prepare(self, request: ChatRequest) -> Prompt:
        """Template and tokenise; raises RequestError."""

    def generate(
        self, prompt: Prompt, emit: Callable[[Event], None], cancelled: Callable[[], bool]
    ) -> Finished:
        """Run to the end, or until `cancelled()`."""

    @property
    def sessions(self) -> Any:
        """What is kept of earlier requests: see `cecilia.engine.sessions.Sessions`."""

    def tokens(self, request: ChatRequest) -> tuple[int, ...]:
        """The token ids of a request's prompt, from any thread; raises RequestError."""

    def encode(self, text: str) -> list[int]:
        """The token ids of plain text, from any thread; raises RequestError."""

    def decode(self, tokens: Sequence[int]) -> tuple[str, list[bytes]]:
        """The text of token ids and the bytes of each, from any thread; raises RequestError."""

    def settle(self, *, steps: int | None = None) -> bool:
        """Do that much of the work that was put off until nobody waits; whether none is left. May raise."""

    def close(self) -> None:
        """Give the model back."""


class Job:
    """One request on its way through the engine.

    The loop's side: `prepared`, `events`, and what changes its flow: `cancel`, `pause`, `resume`, `ack`.
    """

    def __init__(
        self,
        request: ChatRequest,
        loop: asyncio.AbstractEventLoop,
        on_done: Callable[[], None],
        *,
        window: int | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self.request = request
        self.flow = Flow(window)
        self._between = between
        self._nudged = False
        self._loop = loop
        self._on_done = on_done
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._pending: deque[Event] = deque()
        self._wake_due = False
        self._ended = False
        self._prompt: Prompt | None = None
        self._finished: Finished | None = None
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._let_go = asyncio.Event()
        self._done = False

    # -- on the loop --------------------------------------------------------------------------------------

    async def prepared(self) -> Prompt:
        """The prompt, once the engine has accepted it; raises what `prepare` raised."""
        while True:
            self._news.clear()
            with self._lock:
                prompt, error = self._prompt, self._error
            if prompt is not None:
                return prompt
            if error is not None:
                raise error
            await self._news.wait()

    async def events(self) -> list[Event] | Finished:
        """The events since the last call, at least one; after the last of them the result.

        Raises what `generate` raised.
        """
        while True:
            self._news.clear()
            with self._lock:
                events = list(self._pending)
                self._pending.clear()
                self._room.notify()
                ended = self._ended
            if events:
                if ended:
                    self._news.set()
                return events
            if ended:
                if self._error is not None:
                    raise self._error
                assert self._finished is not None
                return self._finished
            await self._news.wait()

    async def let_go(self) -> None:
        """Wait until the engine is done with it."""
        await self._let_go.wait()

    @property
    def queued(self) -> int:
        """Events that wait to be taken."""
        return len(self._pending)

    def cancel(self, reason: str = "cancelled") -> bool:
        """Make the engine end this job at its next step or prefill chunk; whether that is news."""
        with self._lock:
            changed = self.flow.cancel(reason)
            self._room.notify()
            return changed

    def pause(self) -> bool:
        """Make the engine stand still at its next step or prefill chunk; whether that is news."""
        with self._lock:
            return self.flow.pause()

    def resume(self) -> bool:
        """Let it go on; whether that is news."""
        with self._lock:
            changed = self.flow.resume()
            self._room.notify()
            return changed

    def ack(self, seq: int, window: int | None) -> bool:
        """The reader has what was sent up to `seq`; see `Flow.ack`."""
        with self._lock:
            advanced = self.flow.ack(seq, window)
            self._room.notify()
            return advanced

    def nudge(self) -> None:
        """Make a held engine look for calls of others."""
        with self._lock:
            self._nudged = True
            self._room.notify()

    def _on_news(self) -> None:
        with self._lock:
            self._wake_due = False
            ended = self._ended
        self._news.set()
        if ended and not self._done:
            self._done = True
            self._let_go.set()
            self._on_done()

    # -- on the engine thread -----------------------------------------------------------------------------

    def run(self, engine: Engine) -> None:
        """Prepare and generate; never raises."""
        try:
            if self.flow.cancelled is None:
                prompt = engine.prepare(self.request)
                with self._lock:
                    self._prompt = prompt
                    self._announce()
                self._end(engine.generate(prompt, self._emit, self._wait_for_leave), None)
            else:
                self._end(None, RequestError("cancelled", "cancelled before it began"))
        except Exception as error:  # noqa: BLE001 - handed to the request; the engine thread outlives it
            self._end(None, error)

    def _wait_for_leave(self) -> bool:
        """Stand still until the next step may be made; whether to end instead."""
        with self._lock:
            self._hold(lambda: not self.flow.may_step)
            return self.flow.cancelled is not None

    def _hold(self, held: Callable[[], bool]) -> None:
        """Make the calls of others, and wait while `held()`. The lock is held, but not during calls."""
        while True:
            self._nudged = False
            self._lock.release()
            try:
                self._between()
            finally:
                self._lock.acquire()
            if not held():
                return
            if not self._nudged:
                self._room.wait()

    def _emit(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, Prefill) and self._pending and isinstance(self._pending[-1], Prefill):
                self._pending[-1] = event  # progress: only the newest matters
            else:
                if len(self._pending) >= QUEUE_STEPS:
                    self._hold(lambda: len(self._pending) >= QUEUE_STEPS and self.flow.cancelled is None)
                if self.flow.cancelled is not None and not _is_flush(event):
                    return
                if isinstance(event, Delta) and not event.last:
                    self.flow.count()
                self._pending.append(event)
            self._announce()

    def _end(self, finished: Finished | None, error: Exception | None) -> None:
        with self._lock:
            self._finished, self._error, self._ended = finished, error, True
            self.flow.finish()
            self._announce()

    def _announce(self) -> None:
        """Wake the loop, unless a wake-up is on its way already. The lock is held."""
        if not self._wake_due:
            self._wake_due = True
            _tell(self._loop, self._on_news)


def _is_flush(event: Event) -> bool:
    return isinstance(event, Delta) and event.last


class _Call:
    """A call of somebody else's: a function and the future of its result."""

    def __init__(self, function: Callable[[Engine], Any], loop: asyncio.AbstractEventLoop) -> None:
        self._function = function
        self._loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()

    def run(self, engine: Engine) -> None:
        try:
            result = self._function(engine)
        except Exception as error:  # noqa: BLE001 - handed to the caller
            _tell(self._loop, partial(_resolve, self.future, None, error))
        else:
            _tell(self._loop, partial(_resolve, self.future, result, None))

    def refuse(self) -> None:
        error = RequestError("shutting_down", "the server is shutting down")
        _tell(self._loop, partial(_resolve, self.future, None, error))


class Worker:
    """Owns the engine thread. `loaded` is set once the engine is there; its exception tells why it is not."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._inbox: queue.SimpleQueue[Job | _Call | None] = queue.SimpleQueue()
        self._calls: deque[_Call] = deque()
        self._thread: threading.Thread | None = None
        self._job: Job | None = None
        self._engine: Engine | None = None
        self._closed = False
        self.loaded: asyncio.Future[Engine] = loop.create_future()

    def start(self, load: Callable[[], Engine]) -> None:
        """Start the thread; `load` runs on it."""
        # A daemon: a load that hangs in the kernel must not keep a process alive that was told to end.
        self._thread = threading.Thread(target=self._main, args=(load,), name="cecilia-engine", daemon=True)
        self._thread.start()

    def submit(self, request: ChatRequest, on_done: Callable[[], None], *, window: int | None = None) -> Job:
        """Queue a job. `on_done` is called on the loop exactly once, when the engine has let go of it."""
        job = Job(request, self._loop, on_done, window=window, between=self._make_calls)
        self._job = job
        self._inbox.put(job)
        return job

    def call(self, function: Callable[[Engine], T]) -> asyncio.Future[T]:
        """`function(engine)` on the engine thread: when it idles, is held, or between two steps of a job.

        The result, or what it raised; RequestError `shutting_down` when the engine is gone.
        """
        call = _Call(function, self._loop)
        self._calls.append(call)
        self._inbox.put(call)
        if self._job is not None:
            self._job.nudge()
        if self._closed:  # since the look above
            self._refuse_calls()
        return call.future

    def stop(self, timeout: float) -> bool:
        """Cancel what runs, close the engine, end the thread; False when it did not end in time."""
        self.loaded.cancel()  # nobody waits for a load that ends from here on
        if self._thread is None:
            return True
        if self._job is not None:
            self._job.cancel()
        self._inbox.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _main(self, load: Callable[[], Engine]) -> None:
        try:
            engine = load()
        except Exception as error:  # noqa: BLE001 - handed to the loop, which ends the process with its code
            _tell(self._loop, partial(_resolve, self.loaded, None, error))
            return
        _tell(self._loop, partial(_resolve, self.loaded, engine, None))
        self._engine = engine
        self._serve(engine)
        self._closed = True
        self._refuse_calls()
        self._engine = None
        engine.close()

    def _serve(self, engine: Engine) -> None:
        settled = False
        while True:
            while not settled and self._inbox.empty():
                settled = self._settle(engine)
            if (job := self._inbox.get()) is None:
                return
            if isinstance(job, _Call):
                self._make_calls()
            else:
                job.run(engine)

    def _refuse_calls(self) -> None:
        with contextlib.suppress(IndexError):  # two threads may empty it
            while True:
                self._calls.popleft().refuse()

    def _make_calls(self) -> None:
        """Make the calls that are due, on the engine thread."""
        engine = self._engine
        while engine is not None and self._calls:
            self._calls.popleft().run(engine)

    def _settle(self, engine: Engine) -> bool:
        """One idle step, short enough not to be felt by the next request."""
        try:
            return engine.settle(steps=1)
        except CeciliaError as error:
            _tell(
                self._loop, partial(log.warning, "weights_not_moved", code=error.code, reason=error.message)
            )
            return True


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Call `callback` on the loop; a loop that has ended without waiting for this thread need not know."""
    with contextlib.suppress(RuntimeError):  # "Event loop is closed"
        loop.call_soon_threadsafe(callback)


def _resolve(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


__all__ = ["Delta", "Engine", "Event", "Finished", "Job", "Prefill", "Prompt", "State", "Worker"]
