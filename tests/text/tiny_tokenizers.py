# SPDX-License-Identifier: Apache-2.0
"""Small tokenizer.json files made by the tokenizers library itself, with every kind of added token."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as NativeTokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>")
ORDINARY = ("<think>", "</think>", "<tool_response>")  # added, but not flagged special
WORDS = ("system", "user", "assistant", "\u0120the", "\u0120evil", "\u0120\u0120")


def byte_level(
    *, normalized: bool = False, ignore_merges: bool = False, dangerous: bool = True
) -> dict[str, Any]:
    """A byte-level BPE. `dangerous`: its vocabulary and merges spell out two of the added tokens as words.

    Ids: 0..2 the special ones (in the vocabulary as well, as in SmolLM2), 3..258 the bytes, then words, then
    the tokens that are only added.
    """
    vocab = {
        word: index for index, word in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    merges: list[tuple[str, str]] = []
    for word in [*WORDS, *(("<think>", "<s>") if dangerous else ())]:
        for end in range(2, len(word) + 1):
            if (pair := (word[: end - 1], word[end - 1])) not in merges:
                merges.append(pair)
                vocab.setdefault(word[:end], len(vocab))
    tokenizer = NativeTokenizer(models.BPE(vocab, merges, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not dangerous)
    tokenizer.decoder = decoders.ByteLevel()
    if normalized:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=normalized) for word in ORDINARY])
    return json.loads(tokenizer.to_str())


def byte_fallback() -> dict[str, Any]:
    """A SentencePiece-style BPE: U+2581 for spaces, `<0xXX>` for what the vocabulary lacks."""
    words = [
        "<s>",
        "</s>",
        *(f"<0x{value:02X}>" for value in range(256)),
        "\u2581",
        "a",
        "b",
        "ab",
        "\u2581ab",
        "<",
        ">",
        "s",
    ]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = NativeTokenizer(
        models.BPE(vocab, [("a", "b"), ("\u2581", "ab")], byte_fallback=True, unk_token="<s>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return json.loads(tokenizer.to_str())


def as_bytes(spec: dict[str, Any]) -> bytes:
    return json.dumps(spec).encode()
