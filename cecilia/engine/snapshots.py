# SPDX-License-Identifier: Apache-2.0
"""Sessions on disk: what of a session goes into a snapshot, and what a snapshot gives back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from cecilia._kernels import isa
from cecilia.engine.job import ChatRequest, Prompt, TokenLogprob
from cecilia.engine.runner import Runner
from cecilia.errors import RequestError
from cecilia.sampler import SamplingParams

KERNELS = "1"
"""Version of the arithmetic. To be raised whenever a kernel's results change by a byte."""


def snapshot_key(runner: Runner, profile: str, template: str) -> dict[str, str]:
    """What a state depends on besides its tokens: one byte of difference, and it means something else."""
    return {
        "model": runner.file.digest,
        "profile": profile,
        "rope": runner.rope,
        "isa": isa.name(),
        "kernels": KERNELS,
        "template": hashlib.sha256(template.encode("utf-8", "surrogatepass")).hexdigest(),
    }


def note_of(prompt: Prompt) -> tuple[dict[str, Any], dict[str, bytes]]:
    """An interrupted generation as JSON values and blobs."""
    request = prompt.request
    note = {
        "sampling": asdict(request.sampling),
        "stop": list(request.stop),
        "logprobs": request.logprobs,
        "cache_salt": request.cache_salt,
        "prompt_tokens": len(prompt.tokens),
        "max_tokens": prompt.max_tokens,
        "opens_in_think": prompt.opens_in_think,
        "marks": list(prompt.marks),
        # All tokens, for the sequence may hold fewer: a long prompt interrupted, a token not evaluated yet.
        "tokens": [*prompt.tokens, *prompt.generated],
        "waiting": [_entry_note(entry) for entry in prompt.waiting],
    }
    blobs = {} if prompt.logits is None else {"logits": prompt.logits.astype("<f4").tobytes()}
    return note, blobs


def prompt_of(note: Mapping[str, Any], logits: bytes | None, name: str, *, vocab: int, window: int) -> Prompt:
    """The generation that `note_of` noted, as one of session `name`, within `window` tokens.

    Raises RequestError `snapshot_damaged` for a note that is none of a model with `vocab` tokens, and
    `snapshot_mismatch` for one that fills the window.
    """
    try:
        prompt = _prompt_of(note, logits, name)
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError("snapshot_damaged", f"the snapshot's generation is damaged: {error!r}") from error
    tokens = (*prompt.tokens, *prompt.generated)
    if not prompt.tokens or not all(type(token) is int and 0 <= token < vocab for token in tokens):
        raise RequestError("snapshot_damaged", f"the snapshot's generation is of no model of {vocab} tokens")
    if len(tokens) >= window:
        raise RequestError(
            "snapshot_mismatch", f"the snapshot's generation is at {len(tokens)} tokens, the window {window}"
        )
    return replace(prompt, max_tokens=min(prompt.max_tokens, window - len(prompt.tokens)))


def _prompt_of(note: Mapping[str, Any], logits: bytes | None, name: str) -> Prompt:
    sampling = note["sampling"] | {"logit_bias": tuple(map(tuple, note["sampling"]["logit_bias"]))}
    request = ChatRequest(
        [],
        SamplingParams(**sampling),
        note["max_tokens"],
        stop=tuple(note["stop"]),
        logprobs=note["logprobs"],
        cache_salt=note["cache_salt"],
        session_id=name,
    )
    tokens, count = tuple(note["tokens"]), note["prompt_tokens"]
    return Prompt(
        tokens[:count],
        request,
        note["max_tokens"],
        count,
        opens_in_think=note["opens_in_think"],
        marks=tuple(note["marks"]),
        generated=tokens[count:],
        waiting=tuple(_entry_of(entry) for entry in note["waiting"]),
        logits=None if logits is None else np.frombuffer(logits, "<f4").astype(np.float32),
    )


def _entry_note(entry: TokenLogprob) -> dict[str, Any]:
    return {
        "token": entry.token,
        "bytes": entry.bytes.hex(),
        "logprob": entry.logprob,
        "top": [_entry_note(each) for each in entry.top],
    }


def _entry_of(note: Mapping[str, Any]) -> TokenLogprob:
    entry = TokenLogprob(note["token"], bytes.fromhex(note["bytes"]), note["logprob"])
    return replace(entry, top=tuple(_entry_of(each) for each in note["top"]))
