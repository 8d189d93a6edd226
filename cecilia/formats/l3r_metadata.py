# SPDX-License-Identifier: Apache-2.0
"""The metadata of a model file: a JSON object whose keys and types are checked before anything uses them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from cecilia.errors import ModelFileError

WEIGHTS = ("official", "trained-here", "random")


def _bad(what: str) -> ModelFileError:
    return ModelFileError("bad_metadata", f"metadata: {what}")


def _is_id(value: object) -> bool:
    """A token id: a JSON integer, not a boolean, in 0..2^31-1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _check_text(text: Mapping[str, Any]) -> None:
    for key in ("bos_id", "pad_id"):
        if key not in text or not (text[key] is None or _is_id(text[key])):
            raise _bad(f"text.{key} must be a token id or null")
    if not isinstance(text.get("add_bos"), bool):
        raise _bad("text.add_bos must be true or false")
    eos = text.get("eos_ids")
    if not isinstance(eos, list) or not all(_is_id(i) for i in eos):
        raise _bad("text.eos_ids must be a list of token ids")
    if text["add_bos"] and text["bos_id"] is None:
        raise _bad("text.add_bos is true but text.bos_id is null")


def _check_sampling(sampling: Mapping[str, Any]) -> None:
    if "temperature" in sampling and not _is_number(sampling["temperature"], 0, 100):
        raise _bad("sampling.temperature must be a number in 0..100")
    if "top_p" in sampling and not _is_number(sampling["top_p"], 0, 1):
        raise _bad("sampling.top_p must be a number in 0..1")
    if "top_k" in sampling and not _is_id(sampling["top_k"]):
        raise _bad("sampling.top_k must be an integer in 0..2147483647")


def check_metadata(metadata: object) -> dict[str, Any]:
    """Return `metadata` if it has every required key with the right type, else ModelFileError `bad_metadata`.

    Keys this version does not know are kept. What `hyper` must hold is the architecture's business.
    """
    if not isinstance(metadata, dict):
        raise _bad(f"must be a JSON object, found {type(metadata).__name__}")
    for key, kind in (
        ("architecture", str),
        ("name", str),
        ("weights", str),
        ("license", str),
        ("hyper", dict),
        ("provenance", dict),
        ("text", dict),
        ("sampling", dict),
    ):
        if not isinstance(metadata.get(key), kind):
            found = type(metadata[key]).__name__ if key in metadata else "nothing"
            raise _bad(f"{key} must be a {'string' if kind is str else 'JSON object'}, found {found}")
    if metadata["weights"] not in WEIGHTS:
        raise _bad(f"weights must be one of {', '.join(WEIGHTS)}")
    _check_text(metadata["text"])
    _check_sampling(metadata["sampling"])
    return metadata


def encode_metadata(metadata: Mapping[str, Any]) -> bytes:
    """Checked metadata as UTF-8 JSON, the same bytes whatever the order of the keys."""
    checked = check_metadata(dict(metadata))
    try:
        text = json.dumps(checked, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _bad(f"cannot be written as JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def decode_metadata(raw: bytes) -> dict[str, Any]:
    """The inverse of `encode_metadata` for untrusted bytes."""
    try:
        value = json.loads(raw.decode(), parse_constant=_refuse_constant)
    except RecursionError:
        raise _bad("JSON is nested too deeply") from None
    except ValueError as error:  # includes UnicodeDecodeError and JSONDecodeError
        raise _bad(f"not JSON: {error}") from None
    return check_metadata(value)
