# SPDX-License-Identifier: Apache-2.0
"""Write the tokenizer.json of a byte-level BPE vocabulary, in the form the `tokenizers` library reads."""

from __future__ import annotations

import json
from dataclasses import dataclass

from cecilia.errors import ModelFileError

from .gguf_source import shown

# The split of GPT-2; what follows are the patterns llama.cpp applies, one after the other, under each name.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
}


@dataclass(frozen=True)
class AddedToken:
    """A token recognised whole in template text; `special` ones are dropped from decoded text."""

    id: int
    content: str
    special: bool


def byte_alphabet() -> list[str]:
    """[256]: the printable character that stands for each byte in a byte-level vocabulary, as in GPT-2."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    characters = {byte: chr(byte) for byte in shown}
    characters.update({byte: chr(256 + index) for index, byte in enumerate(hidden)})
    return [characters[byte] for byte in range(256)]


def tokenizer_json(tokens: list[str], merges: list[str], added: list[AddedToken], pre: str) -> bytes:
    """The file's bytes; raises ModelFileError when vocabulary and merges do not fit together."""
    if pre not in PRE_TOKENIZERS:
        raise ModelFileError(
            "unsupported_tokenizer",
            f"the pre-tokenizer {shown(pre)}; supported: {' '.join(sorted(PRE_TOKENIZERS))}",
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise ModelFileError("damaged_tokenizer", f"the token {shown(twice)} appears twice")
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token) for token in added],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                *(_split(pattern) for pattern in PRE_TOKENIZERS[pre]),
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [_merge(index, merge, vocabulary) for index, merge in enumerate(merges)],
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def _added(token: AddedToken) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token.id, "content": token.content, **flags, "special": token.special}


def _split(pattern: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _merge(index: int, merge: str, vocabulary: dict[str, int]) -> list[str]:
    parts = merge.split(" ")
    if len(parts) != 2 or not all(part in vocabulary for part in (*parts, "".join(parts))):
        raise ModelFileError(
            "damaged_tokenizer", f"merge {index}, {shown(merge)}, does not join two tokens into a third"
        )
    return parts
