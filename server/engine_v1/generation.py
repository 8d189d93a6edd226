# SPDX-License-Identifier: Apache-2.0
"""generation/status, pause, resume, cancel and flow/ack. None of them waits for the engine."""

from __future__ import annotations

from server.ack import MAX_SEQ, MAX_WINDOW, AckError
from server.errors import ApiError, missing_parameter
from server.fields import Body, integer, string
from server.generations import Generations, flow_of
from server.openai.objects import Object

MAX_REASON = 64  # characters


def status(generations: Generations) -> Object:
    """GET generation/status."""
    return generations.status()


def pause(generations: Generations, body: Body) -> Object:
    """POST generation/pause: the engine stands still at its next step or prefill chunk."""
    active = generations.find(string(body, "generation_id"))
    changed = active.job.pause()
    return _changed(generations, changed)


def resume(generations: Generations, body: Body) -> Object:
    """POST generation/resume."""
    active = generations.find(string(body, "generation_id"))
    changed = active.job.resume()
    active.on_ack()
    return _changed(generations, changed)


def cancel(generations: Generations, body: Body) -> Object:
    """POST cancel; of a generation that has ended it changes nothing."""
    name = string(body, "generation_id")
    reason = string(body, "reason") or "cancelled"
    if len(reason) > MAX_REASON or not reason.isprintable():
        raise ApiError(
            400, "invalid_value", f"reason must be printable and at most {MAX_REASON} long", "reason"
        )
    if name is not None and (ended := generations.ended(name)) is not None:
        return ended | {"generation_id": name, "changed": False}
    active = generations.find(name)
    changed = active.job.cancel(reason)
    return _changed(generations, changed)


def ack(generations: Generations, body: Body) -> Object:
    """POST flow/ack: all events up to `seq` have arrived."""
    name, seq = string(body, "generation_id"), integer(body, "seq", 0, MAX_SEQ)
    window = integer(body, "window", 1, MAX_WINDOW)
    if name is None:
        raise missing_parameter("generation_id")
    if seq is None:
        raise missing_parameter("seq")
    if (ended := generations.ended(name)) is not None:
        return ended | {"generation_id": name, "advanced": False}
    active = generations.find(name)
    try:
        advanced = active.job.ack(seq, window)
    except AckError as error:
        raise ApiError(400, "ack_out_of_range", str(error), "seq") from None
    active.on_ack()
    return flow_of(active) | {"generation_id": name, "advanced": advanced}


def _changed(generations: Generations, changed: bool) -> Object:
    return generations.status() | {"changed": changed}
