# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and token ids to bytes, with a wall between what users write and control tokens.

Two tokenizers are made of one tokenizer.json. The control tokenizer recognises the added tokens (special or
not) and reads template text only. The text tokenizer does not know them: its list of added tokens is empty,
and their spellings are taken out of the vocabulary and out of the merges, so that no sequence of merges, and
no rule that looks a whole word up, can arrive at one. Everything else, ids included, is the same in both.
"""

from __future__ import annotations

import json
import string
from array import array
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer as NativeTokenizer
from tokenizers import models

from cecilia.errors import ModelFileError, RequestError

_NORMALIZER_SHRINKS = 3  # NFC composes three bytes into one at the most
_SPACE_MARK = "\u2581"  # SentencePiece spells a space so
_REMEMBERED = 512  # texts
_REMEMBERED_CHARS = 16 << 10  # at most, each


class Tokenizer:
    """A byte-level or byte-fallback BPE read from the bytes of a tokenizer.json.

    `bos_id` is the id put before a prompt when `add_bos` is set; `eos_ids` end a generation. `spelt`: added
    tokens that decode to their spelling although they may be flagged special, such as think tags.
    A character whose bytes the vocabulary lacks (some control characters, in real ones) becomes U+FFFD.
    Raises ModelFileError `bad_tokenizer` for bytes the library cannot read, `unsupported_tokenizer` for
    another kind of model or decoder, or a vocabulary that cannot spell ASCII letters and U+FFFD.
    """

    def __init__(
        self,
        json_bytes: bytes,
        *,
        bos_id: int | None,
        add_bos: bool,
        eos_ids: Iterable[int],
        spelt: Iterable[str] = (),
    ) -> None:
        spec = _parse(json_bytes)
        self._control = _build(json_bytes)  # the library checks all the rest before we look closer
        spec.setdefault("added_tokens", [])
        self._spell_bytes, self._missing = _byte_speller(spec)
        self._added: dict[int, dict[str, Any]] = {entry["id"]: entry for entry in spec["added_tokens"]}
        self._words: dict[int, str] = {index: word for word, index in spec["model"]["vocab"].items()}
        self._text = _without_added(self._control, spec)
        self._cache: dict[int, bytes] = {}
        self._remembered = lru_cache(_REMEMBERED)(self._encode_text)
        spellings = [*self._words.values(), *(entry["content"] for entry in self._added.values())]
        self._longest = max((len(word.encode()) for word in spellings), default=1)
        self.vocab_size: int = 1 + max(max(self._words, default=-1), max(self._added, default=-1))
        self._spelt = frozenset(spelt)
        self.bos_id = bos_id
        self.add_bos = add_bos
        self.eos_ids: frozenset[int] = frozenset(eos_ids)
        for index in [*self.eos_ids, *([] if bos_id is None else [bos_id])]:
            if not 0 <= index < self.vocab_size:
                raise ModelFileError(
                    "bad_tokenizer", f"token id {index} is outside the vocabulary of {self.vocab_size}"
                )
        if add_bos and bos_id is None:
            raise ModelFileError("bad_tokenizer", "add_bos is set but there is no bos_id")

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text; never the id of an added token, whatever the text says.

        Turns of a chat come again with every request, so those of usual length are remembered.
        """
        return list(self._remembered(text) if len(text) <= _REMEMBERED_CHARS else self._encode_text(text))

    def _encode_text(self, text: str) -> array[int]:
        return array("i", _encode(self._text, self._spellable(text)).ids)

    def encode_control(self, text: str) -> list[int]:
        """Ids of template text, added tokens recognised. No BOS is put before it."""
        ids: list[int] = _encode(self._control, self._spellable(text)).ids
        return ids

    def split_control(self, text: str) -> list[int | str]:
        """Template text as a sequence of added-token ids and of the plain text between them."""
        text = self._spellable(text)
        encoding = _encode(self._control, text)
        parts: list[int | str] = []
        done = 0
        for index, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if index in self._added:
                if start > done:
                    parts.append(text[done:start])
                parts.append(index)
                done = end
        if done < len(text):
            parts.append(text[done:])
        return parts

    def least_tokens(self, nbytes: int) -> int:
        """The fewest tokens that `nbytes` of UTF-8 can come to; cheap, where encoding megabytes is not."""
        return -(-nbytes // (self._longest * (_NORMALIZER_SHRINKS if self._text.normalizer else 1)))

    def token_bytes(self, index: int) -> bytes:
        """Raw bytes of a token: b"" for special added tokens and unknown ids; other added tokens are spelt.

        A token may hold part of a character, so only the joined bytes of a sequence are UTF-8.
        """
        known = self._cache.get(index)
        if known is None:
            known = self._cache[index] = self._spell(index)
        return known

    def decode(self, ids: Iterable[int]) -> str:
        """Text of a whole sequence; invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def special_tokens(self) -> dict[str, str]:
        """Spellings of BOS and of the lowest EOS under the names templates use: `bos_token`, `eos_token`."""
        named = {"bos_token": self.bos_id, "eos_token": min(self.eos_ids, default=None)}
        return {
            name: self._added[index]["content"] if index in self._added else self._words.get(index, "")
            for name, index in named.items()
            if index is not None
        }

    def _spellable(self, text: str) -> str:
        """The text with U+FFFD for what the vocabulary cannot spell; the library would drop it unseen.

        Raises RequestError `invalid_value` for lone surrogates.
        """
        try:
            encoded = text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                "invalid_value", f"text holds a lone surrogate at character {error.start}", param="messages"
            ) from None
        if len(encoded.translate(None, self._missing)) == len(encoded):
            return text
        return "".join("\ufffd" if set(char.encode()) & set(self._missing) else char for char in text)

    def _spell(self, index: int) -> bytes:
        added = self._added.get(index)
        if added is not None:
            silent = added["special"] and added["content"] not in self._spelt
            return b"" if silent else str(added["content"]).encode()
        word = self._words.get(index)
        return b"" if word is None else self._spell_bytes(word)


def _parse(json_bytes: bytes) -> dict[str, Any]:
    try:
        spec = json.loads(json_bytes)
    except (ValueError, RecursionError) as error:
        raise ModelFileError("bad_tokenizer", f"tokenizer.json is not JSON: {error}") from None
    model = spec.get("model") if isinstance(spec, dict) else None
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else None
        raise ModelFileError(
            "unsupported_tokenizer", f"tokenizer model {kind!r} is not supported, only 'BPE'"
        )
    if not isinstance(model.get("vocab"), dict) or not isinstance(model.get("merges"), list):
        raise ModelFileError("bad_tokenizer", "tokenizer.json has no vocab or no merges")
    return dict(spec)


def _build(json_bytes: bytes) -> NativeTokenizer:
    try:
        tokenizer = NativeTokenizer.from_buffer(json_bytes)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for every fault of the JSON
        raise ModelFileError("bad_tokenizer", f"tokenizer.json cannot be read: {error}") from None
    # Padding and truncation rules of the file would change what is encoded behind the caller's back; its
    # post-processor, which adds BOS, is switched off call by call.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _encode(tokenizer: NativeTokenizer, text: str) -> Any:
    """The encoding of `text`. The call for a batch is the one that lets other threads run meanwhile."""
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def _without_added(control: NativeTokenizer, spec: dict[str, Any]) -> NativeTokenizer:
    """The same tokenizer, unable to produce an added token: see the head of this file."""
    model: dict[str, Any] = spec["model"]
    spellings = {entry["content"] for entry in spec["added_tokens"]}
    ids = {entry["id"] for entry in spec["added_tokens"]}
    vocab = {
        word: index for word, index in model["vocab"].items() if index not in ids and word not in spellings
    }
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    merges = [
        (left, right) for left, right in pairs if left in vocab and right in vocab and left + right in vocab
    ]
    # What the alphabet cannot spell is replaced before encoding, so nothing is ever unknown.
    left_out = {"type", "vocab", "merges", "unk_token"}
    options = {key: value for key, value in model.items() if key not in left_out and value is not None}
    text = NativeTokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    if control.normalizer is not None:
        text.normalizer = control.normalizer
    if control.pre_tokenizer is not None:
        text.pre_tokenizer = control.pre_tokenizer
    return text


def _byte_speller(spec: dict[str, Any]) -> tuple[Callable[[str], bytes], bytes]:
    """The function from a vocabulary word to its raw bytes, by decoder kind, and the bytes it lacks."""
    kinds = _decoder_kinds(spec.get("decoder"))
    vocab = spec["model"]["vocab"]
    if "ByteLevel" in kinds:
        alphabet, speller = {value: word for word, value in _BYTE_OF.items()}, _spell_byte_level
    elif "ByteFallback" in kinds and spec["model"].get("byte_fallback"):
        alphabet, speller = {value: f"<0x{value:02X}>" for value in range(256)}, _spell_byte_fallback
    else:
        raise ModelFileError(
            "unsupported_tokenizer",
            f"tokenizer decoder {kinds or None} is not supported, only ByteLevel and ByteFallback",
        )
    missing = bytes(value for value in range(256) if alphabet[value] not in vocab)
    needed = string.ascii_letters.encode() + "\ufffd".encode()
    if set(missing) & set(needed):
        raise ModelFileError(
            "unsupported_tokenizer",
            f"the vocabulary lacks {len(missing)} of 256 bytes, needed ones too",
        )
    return speller, missing


def _decoder_kinds(decoder: dict[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [kind for inner in decoder["decoders"] for kind in _decoder_kinds(inner)]
    return [str(decoder["type"])]


def _gpt2_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {
        chr(256 + n): value for n, value in enumerate(others)
    }


_BYTE_OF = _gpt2_alphabet()


def _spell_byte_level(word: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in word)
    except KeyError:  # a word outside the alphabet is text as it stands, as in the library's own decoder
        return word.encode()


def _spell_byte_fallback(word: str) -> bytes:
    if len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
        return bytes([int(word[3:5], 16)])
    return word.replace(_SPACE_MARK, " ").encode()
