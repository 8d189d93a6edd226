# SPDX-License-Identifier: Apache-2.0
"""Write the tokenizer.json of a SentencePiece vocabulary with scores and byte tokens.

SentencePiece joins, again and again, the two neighbours whose joined piece has the highest score, the
leftmost first. Byte-pair encoding with one merge for every way to cut a piece in two, sorted by the piece's
score, does the same; what the vocabulary cannot spell falls back to byte tokens.
"""

from __future__ import annotations

import json

from cecilia.errors import ModelFileError

from .bpe import AddedToken, added_entry
from .checkpoint import shown

SPACE = "\u2581"


def sentencepiece(
    tokens: list[str], scores: list[float], normal: list[bool], added: list[AddedToken], *, space_prefix: bool
) -> bytes:
    """The file's bytes; `normal` tells which tokens are pieces of text. Raises ModelFileError."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise ModelFileError("damaged_tokenizer", f"the token {shown(twice)} appears twice")
    prepend = [{"type": "Prepend", "prepend": SPACE}] if space_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if space_prefix else []
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_entry(token) for token in added],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*prepend, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges(vocabulary, scores, normal),
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def merges(vocabulary: dict[str, int], scores: list[float], normal: list[bool]) -> list[list[str]]:
    """Every cut of every piece into two pieces, the highest score first, then the lowest id."""
    found = []
    for piece, index in vocabulary.items():
        if not normal[index]:
            continue
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[index], index, at, left, right))
    return [[left, right] for *_, left, right in sorted(found)]
