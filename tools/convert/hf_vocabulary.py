# SPDX-License-Identifier: Apache-2.0
"""The text side of a Hugging Face directory: tokenizer.json, chat template, markers, sampling defaults."""

from __future__ import annotations

import json
import math
from typing import Any

from cecilia.errors import ModelFileError
from cecilia.formats.l3r_layout import naming

from .checkpoint import Vocabulary, shown, text_metadata
from .hf_source import HuggingFaceSource
from .vocabulary import added_tokens, check_template, check_tokenizer, choose, end_tokens


def vocabulary(source: HuggingFaceSource, size: int, architecture: str, choice: str | None) -> Vocabulary:
    """The vocabulary for an embedding of `size` rows; `choice` as for `vocabulary.choose`."""

    def own() -> Vocabulary:
        text = source.text("tokenizer.json")
        if text is None:
            raise ModelFileError(
                "unsupported_tokenizer", f"{source.path}: no tokenizer.json (or give --tokenizer)"
            )
        document = text.encode("utf-8")
        with naming(source.path / "tokenizer.json"):
            check_tokenizer(document, size)
        return given(document)

    def given(document: bytes) -> Vocabulary:
        with naming(source.path):
            return Vocabulary(document, _template(source), _markers(source, document, size))

    return choose(choice, size, architecture, own, given)


def sampling_defaults(source: HuggingFaceSource) -> dict[str, Any]:
    """What a request that does not say gets: what generation_config.json recommends, greedy when it does not
    sample. A file that names a temperature, top_p or top_k but no `do_sample` recommends these."""
    config = source.json("generation_config.json") or {}
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    stated = {key: config[key] for key in neutral if config.get(key) is not None}
    if config.get("do_sample", bool(stated)) is not True:
        return {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
    found = neutral | stated
    for key, value in found.items():
        wrong = isinstance(value, bool) or not isinstance(value, int if key == "top_k" else int | float)
        if wrong or not 0 <= value < math.inf:
            raise ModelFileError("invalid_metadata", f"generation_config.json: {key} is {shown(value)}")
    return {
        "temperature": float(found["temperature"]),
        "top_p": float(found["top_p"]),
        "top_k": found["top_k"],
    }


def _template(source: HuggingFaceSource) -> str | None:
    """chat_template.jinja, else the template in tokenizer_config.json, of several the one called default."""
    template = source.text("chat_template.jinja")
    if template is None:
        template = (source.json("tokenizer_config.json") or {}).get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else template
    if template is not None and not isinstance(template, str):
        raise ModelFileError(
            "unsupported_template", f"tokenizer_config.json: chat_template {shown(template)}"
        )
    return check_template(template)


def _markers(source: HuggingFaceSource, document: bytes, size: int) -> dict[str, Any]:
    """bos, pad and every token that ends a generation."""
    settings = source.json("tokenizer_config.json") or {}
    generation = source.json("generation_config.json") or {}
    config = source.config
    added = added_tokens(document)
    ids = {token.content: token.id for token in added}

    def marker(name: str) -> list[int]:
        """The ids of one marker: the generation settings, the tokenizer's spelling, the model's settings."""
        spelt = _content(settings.get(f"{name}_token"))
        found = _ids(generation.get(f"{name}_token_id"), f"generation_config.json: {name}_token_id", size)
        found += [ids[spelt]] if spelt in ids else []
        return found or _ids(config.get(f"{name}_token_id"), f"config.json: {name}_token_id", size)

    eos_ids = list(dict.fromkeys([*marker("eos"), *end_tokens(added)]))
    if not eos_ids:
        raise ModelFileError("damaged_tokenizer", "no token ends a generation: eos_token_id is missing")
    bos, pad = marker("bos"), marker("pad")
    add_bos = _adds_bos(settings, document)
    if add_bos and not bos:
        raise ModelFileError("damaged_tokenizer", "a bos token is to be added, but there is none")
    return text_metadata(bos[0] if bos else None, add_bos, eos_ids, pad[0] if pad else None)


def _content(token: Any) -> str | None:
    """A token of tokenizer_config.json, spelt as text or as an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _ids(value: Any, what: str, size: int) -> list[int]:
    found = value if isinstance(value, list) else [] if value is None else [value]
    for token in found:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
            raise ModelFileError(
                "damaged_tokenizer", f"{what} is {shown(value)}, not in the vocabulary of {size}"
            )
    return list(found)


def _adds_bos(settings: dict[str, Any], document: bytes) -> bool:
    """Whether a text begins with bos: the setting, or a post-processor that puts an added token first."""
    stated = settings.get("add_bos_token")
    if isinstance(stated, bool):
        return stated
    processor = json.loads(document).get("post_processor") or {}
    steps = processor.get("processors", [processor])
    first = [
        step["single"][0] for step in steps if step.get("type") == "TemplateProcessing" and step["single"]
    ]
    return any("SpecialToken" in piece for piece in first)
