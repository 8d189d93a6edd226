# SPDX-License-Identifier: Apache-2.0
"""The text side of a GGUF file: its vocabulary as a tokenizer.json, its template, markers and defaults."""

from __future__ import annotations

from typing import Any

from cecilia.errors import ModelFileError
from cecilia.formats.l3r_layout import naming

from .bpe import AddedToken, byte_level
from .checkpoint import Vocabulary, shown, text_metadata
from .gguf_source import GgufSource
from .spm import sentencepiece
from .vocabulary import added_tokens, check_template, check_tokenizer, choose, end_tokens

# llama.cpp's token types
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_MODELS = ("gpt2", "llama")


def vocabulary(source: GgufSource, size: int, architecture: str, choice: str | None) -> Vocabulary:
    """The vocabulary for an embedding of `size` rows; `choice` as for `vocabulary.choose`."""

    def own() -> Vocabulary:
        with naming(source.path):
            document, added = _tokenizer(source, size)
            check_tokenizer(document, size)
            return Vocabulary(document, _template(source), _markers(source, added, size))

    def given(document: bytes) -> Vocabulary:
        with naming(source.path):
            return Vocabulary(document, _template(source), _markers(source, added_tokens(document), size))

    return choose(choice, size, architecture, own, given)


def sampling_defaults(source: GgufSource) -> dict[str, Any]:
    """What a request that does not say gets: the file's own recommendation, else greedy."""
    return {
        "temperature": source.number("general.sampling.temp", 0.0),
        "top_p": source.number("general.sampling.top_p", 1.0),
        "top_k": source.integer("general.sampling.top_k", 0),
    }


def _tokenizer(source: GgufSource, size: int) -> tuple[bytes, list[AddedToken]]:
    """The tokenizer.json and the added tokens it lists."""
    model = source.text("tokenizer.ggml.model")
    if model not in _MODELS:
        raise ModelFileError(
            "unsupported_tokenizer",
            f"the tokenizer model {shown(model)}; supported: {' '.join(_MODELS)} (or give --tokenizer)",
        )
    pre = source.text("tokenizer.ggml.pre")
    if pre is None and model == "gpt2":
        raise ModelFileError(
            "unsupported_tokenizer", "the file has no tokenizer.ggml.pre (or give --tokenizer)"
        )
    tokens = source.array("tokenizer.ggml.tokens", str)
    types = source.array("tokenizer.ggml.token_type", int)
    if not len(tokens) == len(types) == size:
        raise ModelFileError(
            "damaged_tokenizer",
            f"{len(tokens)} tokens and {len(types)} token types for an embedding of {size} rows",
        )
    added = [
        AddedToken(index, token, kind != _USER_DEFINED)
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    if model == "gpt2":
        merges = source.array("tokenizer.ggml.merges", str)
        return byte_level(tokens, merges, added, pre or ""), added
    scores = source.array("tokenizer.ggml.scores", float)
    if len(scores) != size:
        raise ModelFileError("damaged_tokenizer", f"{len(scores)} scores for {size} tokens")
    prefix = source.boolean("tokenizer.ggml.add_space_prefix", True)
    normal = [kind == _NORMAL for kind in types]
    return sentencepiece(tokens, scores, normal, added, space_prefix=prefix), added


def _template(source: GgufSource) -> str | None:
    return check_template(source.text("tokenizer.chat_template"))


def _markers(source: GgufSource, added: list[AddedToken], size: int) -> dict[str, Any]:
    """bos, pad and every token that ends a generation: eos, eot, eom, and the known end markers."""
    ends = [_token_id(source, key, size) for key in ("eos", "eot", "eom")]
    ends += end_tokens(added)
    bos = _token_id(source, "bos", size)
    add_bos = source.boolean("tokenizer.ggml.add_bos_token", _adds_bos(source))
    if add_bos and bos is None:
        raise ModelFileError(
            "damaged_tokenizer", "tokenizer.ggml.add_bos_token is true, but there is no bos token"
        )
    eos_ids = list(dict.fromkeys(token for token in ends if token is not None))
    if not eos_ids:
        raise ModelFileError(
            "damaged_tokenizer", "no token ends a generation: tokenizer.ggml.eos_token_id is missing"
        )
    return text_metadata(bos, add_bos, eos_ids, _token_id(source, "padding", size))


def _token_id(source: GgufSource, name: str, size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if source.value(key) is None:
        return None
    token = source.integer(key)
    if token >= size:
        raise ModelFileError("damaged_tokenizer", f"{key} is {token}, beyond the vocabulary of {size}")
    return token


def _adds_bos(source: GgufSource) -> bool:
    """What a file that does not say means."""
    model, pre = source.text("tokenizer.ggml.model"), source.text("tokenizer.ggml.pre")
    return model == "llama" or pre == "llama-bpe"
