# SPDX-License-Identifier: Apache-2.0
"""The text side of a target, whatever the source: where the vocabulary comes from, checks, end tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from cecilia.errors import ModelFileError, UsageError
from cecilia.formats.l3r_layout import naming

from .bpe import AddedToken
from .byte_vocabulary import byte_vocabulary
from .checkpoint import Vocabulary, text_metadata

MAX_TEMPLATE_BYTES = 64 << 10
MAX_TOKENIZER_BYTES = 64 << 20
# Control tokens that end a turn or a document; generation must stop at any of them the vocabulary has.
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end_of_turn|>", "<|role_end|>", "<|endoftext|>")


def choose(
    choice: str | None,
    size: int,
    architecture: str,
    own: Callable[[], Vocabulary],
    given: Callable[[bytes], Vocabulary],
) -> Vocabulary:
    """The vocabulary for an embedding of `size` rows.

    `choice`: None takes the source's `own`, `none` leaves it out, `byte` makes one of 256 bytes and of the
    control tokens the architecture's chat needs, anything else is the path of a tokenizer.json, to which
    `given` adds the source's markers.
    """
    if choice is None:
        return own()
    if choice == "none":
        return Vocabulary(None, None, text_metadata(None, False, [], None))
    if choice == "byte":
        return byte_vocabulary(size, architecture)
    with naming(choice):
        document = read_limited(Path(choice), MAX_TOKENIZER_BYTES)
        check_tokenizer(document, size)
    return given(document)


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
