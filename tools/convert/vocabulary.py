# SPDX-License-Identifier: Apache-2.0
"""Everything about text that goes into the file: tokenizer, chat template, marker ids, sampling defaults."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cecilia.errors import ModelFileError, UsageError
from cecilia.formats.l3r_layout import naming

from .bpe import AddedToken, byte_alphabet, tokenizer_json
from .gguf_source import GgufSource, shown

MAX_TEMPLATE_BYTES = 64 << 10
MAX_TOKENIZER_BYTES = 64 << 20
# Control tokens that end a turn or a document; generation must stop at any of them the vocabulary has.
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end_of_turn|>", "<|endoftext|>")
_BYTE_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# llama.cpp's token types
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


@dataclass(frozen=True)
class Vocabulary:
    """The text side of a model; `tokenizer` is a tokenizer.json, None when the file is to have none."""

    tokenizer: bytes | None
    chat_template: str | None
    text: dict[str, Any]


def vocabulary(source: GgufSource, choice: str | None, size: int) -> Vocabulary:
    """The vocabulary for an embedding of `size` rows.

    `choice`: None takes the one inside the GGUF, `none` leaves it out, `byte` makes one of 256 bytes and
    three markers, anything else is the path of a tokenizer.json.
    """
    if choice is None:
        with naming(source.path):
            return _from_gguf(source, size)
    if choice == "none":
        return Vocabulary(None, None, _text(None, False, [], None))
    if choice == "byte":
        return byte_vocabulary(size)
    with naming(choice):
        return _from_file(source, Path(choice), size)


def byte_vocabulary(size: int) -> Vocabulary:
    """A token for each byte (id = byte), then three ChatML markers; ids from 259 on are never produced."""
    needed = 256 + len(_BYTE_TOKENS)
    if size < needed:
        raise UsageError(
            "vocabulary_too_small", f"a byte tokenizer needs {needed} tokens, the model has {size}"
        )
    added = [AddedToken(256 + index, token, True) for index, token in enumerate(_BYTE_TOKENS)]
    document = tokenizer_json([*byte_alphabet(), *_BYTE_TOKENS], [], added, "gpt-2")
    return Vocabulary(document, _CHATML, _text(None, False, [258, 256], None))


def sampling_defaults(source: GgufSource) -> dict[str, Any]:
    """What a request that does not say gets: the file's own recommendation, else greedy."""
    return {
        "temperature": source.number("general.sampling.temp", 0.0),
        "top_p": source.number("general.sampling.top_p", 1.0),
        "top_k": source.integer("general.sampling.top_k", 0),
    }


def _from_gguf(source: GgufSource, size: int) -> Vocabulary:
    model = source.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelFileError(
            "unsupported_tokenizer",
            f"the tokenizer model {shown(model)}; supported: gpt2 (or give --tokenizer)",
        )
    pre = source.text("tokenizer.ggml.pre")
    if pre is None:
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
    document = tokenizer_json(tokens, source.array("tokenizer.ggml.merges", str), added, pre)
    check_tokenizer(document, size)
    return Vocabulary(document, _template(source), _markers(source, added, size))


def _from_file(source: GgufSource, path: Path, size: int) -> Vocabulary:
    try:
        with path.open("rb") as file:
            document = file.read(MAX_TOKENIZER_BYTES + 1)
    except OSError as error:
        raise UsageError("tokenizer_unreadable", f"{path}: {error.strerror}") from None
    if len(document) > MAX_TOKENIZER_BYTES:
        raise ModelFileError("damaged_tokenizer", f"larger than {MAX_TOKENIZER_BYTES} bytes")
    check_tokenizer(document, size)
    added = [
        AddedToken(token["id"], token["content"], token["special"])
        for token in json.loads(document).get("added_tokens") or []
    ]
    return Vocabulary(document, _template(source), _markers(source, added, size))


def check_tokenizer(document: bytes, size: int) -> None:
    """Raise ModelFileError unless the library reads `document` and its ids stay below `size`."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(document)
    except Exception as error:  # noqa: BLE001 - the library raises Exception itself
        raise ModelFileError(
            "damaged_tokenizer", f"no usable tokenizer.json: {' '.join(str(error).split())}"
        ) from None
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if not 0 <= highest < size:
        raise ModelFileError(
            "damaged_tokenizer", f"token ids up to {highest} for an embedding of {size} rows"
        )


def _template(source: GgufSource) -> str | None:
    template = source.text("tokenizer.chat_template")
    if template is not None and len(template.encode("utf-8")) > MAX_TEMPLATE_BYTES:
        raise ModelFileError(
            "unsupported_template", f"the chat template is larger than {MAX_TEMPLATE_BYTES} bytes"
        )
    return template


def _markers(source: GgufSource, added: list[AddedToken], size: int) -> dict[str, Any]:
    """bos, pad and every token that ends a generation: eos, eot, eom, and the known end markers."""
    ends = [_token_id(source, key, size) for key in ("eos", "eot", "eom")]
    ends += [token.id for token in added if token.special and token.content in _END_TOKENS]
    bos = _token_id(source, "bos", size)
    add_bos = source.boolean("tokenizer.ggml.add_bos_token", False)
    if add_bos and bos is None:
        raise ModelFileError(
            "damaged_tokenizer", "tokenizer.ggml.add_bos_token is true, but there is no bos token"
        )
    eos_ids = list(dict.fromkeys(token for token in ends if token is not None))
    if not eos_ids:
        raise ModelFileError(
            "damaged_tokenizer", "no token ends a generation: tokenizer.ggml.eos_token_id is missing"
        )
    return _text(bos, add_bos, eos_ids, _token_id(source, "padding", size))


def _token_id(source: GgufSource, name: str, size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if source.value(key) is None:
        return None
    token = source.integer(key)
    if token >= size:
        raise ModelFileError("damaged_tokenizer", f"{key} is {token}, beyond the vocabulary of {size}")
    return token


def _text(bos_id: int | None, add_bos: bool, eos_ids: list[int], pad_id: int | None) -> dict[str, Any]:
    return {"bos_id": bos_id, "add_bos": add_bos, "eos_ids": eos_ids, "pad_id": pad_id}
