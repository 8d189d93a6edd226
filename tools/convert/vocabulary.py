# SPDX-License-Identifier: Apache-2.0
"""The text side of a target, whatever the source: checks, byte vocabularies, the metadata's `text`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cecilia.errors import ModelFileError, UsageError
from cecilia.formats.l3r_layout import naming

from .bpe import AddedToken, byte_alphabet, byte_level
from .checkpoint import Vocabulary

MAX_TEMPLATE_BYTES = 64 << 10
MAX_TOKENIZER_BYTES = 64 << 20
# Control tokens that end a turn or a document; generation must stop at any of them the vocabulary has.
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end_of_turn|>", "<|role_end|>", "<|endoftext|>")
_BYTE_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def choose(
    choice: str | None, size: int, own: Callable[[], Vocabulary], given: Callable[[bytes], Vocabulary]
) -> Vocabulary:
    """The vocabulary for an embedding of `size` rows.

    `choice`: None takes the source's `own`, `none` leaves it out, `byte` makes one of 256 bytes and three
    markers, anything else is the path of a tokenizer.json, to which `given` adds the source's markers.
    """
    if choice is None:
        return own()
    if choice == "none":
        return Vocabulary(None, None, text_metadata(None, False, [], None))
    if choice == "byte":
        return byte_vocabulary(size)
    with naming(choice):
        document = read_limited(Path(choice), MAX_TOKENIZER_BYTES)
        check_tokenizer(document, size)
    return given(document)


def byte_vocabulary(size: int) -> Vocabulary:
    """A token for each byte (id = byte), then three ChatML markers; ids from 259 on are never produced."""
    needed = 256 + len(_BYTE_TOKENS)
    if size < needed:
        raise UsageError(
            "vocabulary_too_small", f"a byte tokenizer needs {needed} tokens, the model has {size}"
        )
    added = [AddedToken(256 + index, token, True) for index, token in enumerate(_BYTE_TOKENS)]
    document = byte_level([*byte_alphabet(), *_BYTE_TOKENS], [], added, "gpt-2")
    return Vocabulary(document, _CHATML, text_metadata(None, False, [258, 256], None))


def read_limited(path: Path, limit: int) -> bytes:
    """A file's bytes; raises UsageError when it cannot be read, ModelFileError when it is larger."""
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise UsageError("tokenizer_unreadable", f"{path}: {error.strerror}") from None
    if len(content) > limit:
        raise ModelFileError("damaged_tokenizer", f"larger than {limit} bytes")
    return content


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


def added_tokens(document: bytes) -> list[AddedToken]:
    """The added tokens of a checked tokenizer.json."""
    return [
        AddedToken(token["id"], token["content"], token["special"])
        for token in json.loads(document).get("added_tokens") or []
    ]


def end_tokens(added: list[AddedToken]) -> list[int]:
    """The ids of control tokens that are known to end a turn or a document."""
    return [token.id for token in added if token.special and token.content in _END_TOKENS]


def check_template(template: str | None) -> str | None:
    """The template itself; raises ModelFileError when it is too large."""
    if template is not None and len(template.encode("utf-8")) > MAX_TEMPLATE_BYTES:
        raise ModelFileError(
            "unsupported_template", f"the chat template is larger than {MAX_TEMPLATE_BYTES} bytes"
        )
    return template


def text_metadata(
    bos_id: int | None, add_bos: bool, eos_ids: list[int], pad_id: int | None
) -> dict[str, Any]:
    """The metadata object `text`."""
    return {"bos_id": bos_id, "add_bos": add_bos, "eos_ids": eos_ids, "pad_id": pad_id}
