# SPDX-License-Identifier: Apache-2.0
"""Write the tokenizer.json of a byte-level BPE vocabulary, in the form the `tokenizers` library reads."""

from __future__ import annotations

import json
from dataclasses import dataclass

from cecilia.errors import ModelFileError

from .checkpoint import shown

# The split of GPT-2; what follows are the patterns llama.cpp applies, one after the other, under each name.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s+(?!\S)|\s+"
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "bailingmoe2": (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS}|\s*[\r\n]|{_SPACES}",),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "llama-bpe": (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|{_SPACES}",),
    "qwen2": (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS}|\s*[\r\n]+|{_SPACES}",),
    "smollm": (r"\p{N}", _GPT2),
}
# A piece that is a token as it stands is taken whole, whatever the merges say.
_IGNORE_MERGES = {"llama-bpe"}


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


def byte_level(tokens: list[str], merges: list[str], added: list[AddedToken], pre: str) -> bytes:
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
        "added_tokens": [added_entry(token) for token in added],
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
            "ignore_merges": pre in _IGNORE_MERGES,
            "vocab": vocabulary,
            "merges": [_merge(index, merge, vocabulary) for index, merge in enumerate(merges)],
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def added_entry(token: AddedToken) -> dict[str, object]:
    """The token as tokenizer.json lists it."""
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
