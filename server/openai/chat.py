# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions: from a validated call to JSON or to a stream."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from cecilia.engine.job import Delta, Finished, Prefill, Prompt
from cecilia.errors import CeciliaError
from server import log, sse
from server.ack import State
from server.clock import Clock, Timer
from server.errors import from_engine, internal_error
from server.fields import parse_json
from server.gate import Gate, Ticket
from server.generations import Active, Generations
from server.http.exchange import Exchange
from server.http.responses import json_response
from server.openai.objects import Completion
from server.openai.validate import ChatCall, parse_chat
from server.worker import Engine, Job, Worker

# Proxies cut silent streams, the strictest we know of at 50 s; the promise is one comment per 15 s.
COMMENT_SECONDS = 15.0
# Without an acknowledgement for so long, a generation that has no credit left is given up.
ACK_SECONDS = 60.0
# After a half-close a peer that is gone answers our first bytes with a reset, which the next bytes meet.
STREAM_PROBES = (0.0, 0.05, 0.25, 1.0)
# A whole answer is probed with interim answers, which hand-made clients may not expect: a quick one has none.
WHOLE_PROBES = (0.25, 0.5, 1.0, 2.0)
# Parsing more than this leaves the event loop, so that /health keeps answering.
INLINE_BODY = 64 * 1024


@dataclass(slots=True)
class ChatService:
    """What a chat request needs of the process. `model_id` may change once, when the model is loaded.

    `before` brings back the session a request names, `after` keeps it.
    """

    worker: Worker
    gate: Gate
    clock: Clock
    parsing: Executor
    model_id: str
    wall_clock: Callable[[], float] = time.time
    before: Callable[[str], Awaitable[None]] | None = None
    after: Callable[[str, Job], None] | None = None
    generations: Generations = field(init=False)

    def __post_init__(self) -> None:
        self.generations = Generations(self.clock.time)


async def chat_completions(service: ChatService, exchange: Exchange) -> None:
    """Serve one request. Every check is made before the first byte of a stream."""
    service.gate.require_open()
    engine = service.worker.loaded.result()
    call = await _parse(service, exchange.request.body, engine)
    session = call.engine.session_id
    ticket = service.gate.enter()
    try:
        if session is not None and service.before is not None:
            await service.before(session)
        job = service.worker.submit(call.engine, ticket.release, window=call.window)
    except BaseException:
        ticket.release()
        raise
    try:
        await _run(service, exchange, engine, call, job, ticket)
    finally:
        # Whatever ended this request ends its job; the slot is free once the engine has let go.
        job.cancel()
        if session is not None and service.after is not None:
            service.after(session, job)


async def _parse(service: ChatService, body: bytes, engine: Engine) -> ChatCall:
    if len(body) <= INLINE_BODY:
        return parse_chat(parse_json(body), defaults=engine.defaults)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(
        service.parsing, lambda: parse_chat(parse_json(body), defaults=engine.defaults)
    )


async def _run(
    service: ChatService, exchange: Exchange, engine: Engine, call: ChatCall, job: Job, ticket: Ticket
) -> None:
    completion = Completion(
        id=f"chatcmpl-{secrets.token_hex(12)}",
        created=int(service.wall_clock()),
        model=service.model_id,
        fingerprint=_fingerprint(engine),
        include_usage=call.include_usage,
        include_logprobs=call.engine.logprobs is not None,
    )
    exchange.extra_headers = (*exchange.extra_headers, ("X-Cecilia-Generation-Id", completion.id))
    active = service.generations.begin(completion.id, job)
    try:
        await _answer(service, exchange, completion, call, active, ticket)
    finally:
        service.generations.end(active)


async def _answer(
    service: ChatService,
    exchange: Exchange,
    completion: Completion,
    call: ChatCall,
    active: Active,
    ticket: Ticket,
) -> None:
    job = active.job
    with _probing(exchange, service.clock, exchange.probe, () if call.stream else WHOLE_PROBES):
        try:
            prompt = await job.prepared()
        except CeciliaError as error:
            raise from_engine(error) from error
        ticket.prompt_left = len(prompt.tokens) - prompt.cached_tokens
        ticket.limit = prompt.max_tokens
        active.prompt_tokens, active.cached_tokens = len(prompt.tokens), prompt.cached_tokens
        if call.engine.continues:  # what it was asked with then is what holds
            asked = prompt.request
            completion = replace(completion, include_logprobs=asked.logprobs is not None)
            call = replace(call, seed=asked.sampling.seed)
        follow = _Follower(ticket, service.generations, active)
        if call.stream:
            finished = await _Stream(service, exchange, completion, active, follow).run(call, prompt)
        else:
            finished = await _whole(exchange, completion, job, follow, call)
    if finished is not None:
        service.gate.observe(finished)
        _log(completion, finished)


@contextmanager
def _probing(
    exchange: Exchange, clock: Clock, write: Callable[[], None], delays: tuple[float, ...]
) -> Iterator[None]:
    """`write` at `delays` after the peer has ended its sending: one that is gone resets the connection."""
    timers: list[Timer] = []

    def probe() -> None:
        for delay in delays:
            if delay > 0.0:
                timers.append(clock.call_later(delay, write))
            else:
                write()

    exchange.on_half_close = probe
    if exchange.half_closed:
        probe()
    try:
        yield
    finally:
        exchange.on_half_close = None
        for timer in timers:
            timer.cancel()


async def _whole(
    exchange: Exchange, completion: Completion, job: Job, follow: _Follower, call: ChatCall
) -> Finished:
    deltas: list[Delta] = []
    try:
        while not isinstance(events := await job.events(), Finished):
            for event in events:
                follow(event)
                if isinstance(event, Delta):
                    deltas.append(event)
    except CeciliaError as error:
        raise from_engine(error) from error
    answer = completion.whole(deltas, events, extra=_extra(call, job, events))
    exchange.send(json_response(answer))
    return events


class _Stream:
    """One streamed answer: chunks as they come, comments when nothing comes.

    With acknowledgements, chunks of text are numbered, and what was held back until the end rides on the last
    chunk, which is not.
    """

    def __init__(
        self,
        service: ChatService,
        exchange: Exchange,
        completion: Completion,
        active: Active,
        follow: _Follower,
    ) -> None:
        self._clock = service.clock
        self._exchange = exchange
        self._completion = completion
        self._job = active.job
        self._active = active
        self._follow = follow
        self._numbered = active.job.flow.window is not None
        self._seq = 0
        self._flush: Delta | None = None
        self._last_write = 0.0
        self._progress = "waiting"
        self._comment_timer: Timer | None = None
        self._ack_timer: Timer | None = None

    async def run(self, call: ChatCall, prompt: Prompt) -> Finished | None:
        """Stream to the end; None when an error ended it (it has been sent)."""
        self._exchange.start_stream(sse.HEADERS, sse.data(self._completion.role_chunk()))
        self._last_write = self._clock.time()
        self._progress = f"prefill 0/{len(prompt.tokens)}"
        self._arm_comment()
        if self._numbered:
            self._active.on_ack = self._arm_ack
            self._arm_ack()
        try:
            with _probing(self._exchange, self._clock, self._comment, STREAM_PROBES):
                finished = await self._deltas()
            extra = _extra(call, self._job, finished)
            chunks = self._completion.last_chunks(finished, extra=extra, flush=self._flush)
            tail = [sse.data(chunk) for chunk in chunks]
            self._exchange.finish(b"".join([*tail, sse.DONE]))
            return finished
        except CeciliaError as error:
            self._exchange.finish(sse.data(from_engine(error).as_dict()))
        except Exception:  # noqa: BLE001 - the status line is long gone: the client learns of it in the stream
            log.exception("request_failed", request=self._exchange.request_id)
            self._exchange.finish(sse.data(internal_error(self._exchange.request_id).as_dict()))
        finally:
            for timer in (self._comment_timer, self._ack_timer):
                if timer is not None:
                    timer.cancel()
        return None

    async def _deltas(self) -> Finished:
        while not isinstance(events := await self._job.events(), Finished):
            chunks = []
            for event in events:
                self._follow(event)
                if isinstance(event, Prefill):
                    self._progress = f"prefill {event.done}/{event.total}"
                    continue
                self._progress = f"generated {event.tokens}"
                if self._numbered and event.last:
                    self._flush = event
                    continue
                chunks.append(sse.data(self._chunk(event)))
            if chunks:
                self._send(b"".join(chunks))
                if self._numbered:
                    self._arm_ack()
                await self._exchange.drained()
        return events

    def _chunk(self, event: Delta) -> dict[str, object]:
        chunk = self._completion.delta_chunk(event)
        if not self._numbered:
            return chunk
        self._seq += 1
        return chunk | {"cecilia": {"seq": self._seq}}

    def _arm_ack(self) -> None:
        """The time for an acknowledgement runs from the last chunk, acknowledgement or resumption."""
        if self._ack_timer is not None:
            self._ack_timer.cancel()
        self._ack_timer = self._clock.call_later(ACK_SECONDS, self._on_silence)

    def _on_silence(self) -> None:
        if self._job.flow.state is State.STALLED:
            self._job.cancel("flow_timeout")
        else:
            self._arm_ack()

    def _send(self, data: bytes) -> None:
        self._last_write = self._clock.time()
        self._exchange.write(data)

    def _arm_comment(self) -> None:
        """Comments are due by the last byte sent, so a stream that talks has none."""
        delay = self._last_write + COMMENT_SECONDS - self._clock.time()
        self._comment_timer = self._clock.call_later(max(delay, 0.0), self._comment_if_silent)

    def _comment_if_silent(self) -> None:
        if self._clock.time() - self._last_write >= COMMENT_SECONDS:
            self._comment()
        self._arm_comment()

    def _comment(self) -> None:
        state = self._job.flow.state
        held = f"{state.value}, " if state in (State.PAUSED, State.STALLED) else ""
        self._send(sse.comment(held + self._progress))


@dataclass(frozen=True, slots=True)
class _Follower:
    """Keeps everybody's picture of the work that is done and left."""

    ticket: Ticket
    generations: Generations
    active: Active

    def __call__(self, event: Prefill | Delta) -> None:
        if isinstance(event, Prefill):
            self.ticket.prompt_left = event.total - event.done
            self.generations.follow(self.active, prefilled=event.done)
        else:
            self.ticket.prompt_left = 0
            self.ticket.produced = event.tokens
            self.generations.follow(self.active, produced=event.tokens)


def _fingerprint(engine: Engine) -> str:
    """Model, arithmetic and instruction set: whatever may change an answer changes this."""
    info = engine.info
    return f"fp_{str(info['digest'])[:12]}_{info['profile']}_{info['isa']}"


def _extra(call: ChatCall, job: Job, finished: Finished) -> dict[str, object]:
    cancelled = job.flow.cancelled if finished.cause == "cancelled" else None
    return {"cause": cancelled or finished.cause, "seed": call.seed}


def _log(completion: Completion, finished: Finished) -> None:
    counts, spent = finished.usage, finished.timings
    log.info(
        "generation",
        id=completion.id,
        prompt=counts.prompt_tokens,
        cached=counts.cached_tokens,
        completion=counts.completion_tokens,
        prompt_ms=spent.prompt_ms,
        predicted_ms=spent.predicted_ms,
        cause=finished.cause,
    )
