# SPDX-License-Identifier: Apache-2.0
"""Vocabularies of bytes: a token for each (id = byte), then the control tokens of an architecture's chat."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cecilia.errors import UsageError

from .bpe import AddedToken, byte_alphabet, byte_level
from .checkpoint import Vocabulary, text_metadata

_CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LING3_TEMPLATE = (Path(__file__).parent / "templates" / "ling3.jinja").read_text(encoding="utf-8")
OWN_TEMPLATES = {"ling3": LING3_TEMPLATE}
"""By architecture: for checkpoints that come without one."""


@dataclass(frozen=True)
class _Chat:
    """How an architecture chats: special tokens (left out of decoded text), plain ones, which of them are
    what, and the split of text before merging."""

    special: tuple[str, ...]
    plain: tuple[str, ...]
    bos: str | None
    ends: tuple[str, ...]
    pad: str | None
    pre: str
    template: str


_CHATML = _Chat(
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    plain=(),
    bos=None,
    ends=("<|im_end|>", "<|endoftext|>"),
    pad=None,
    pre="gpt-2",
    template=_CHATML_TEMPLATE,
)
_LING3 = _Chat(
    special=("<|startoftext|>", "<|endoftext|>", "<|role_end|>", "<role>", "</role>"),
    plain=("<tool_call>", "</tool_call>", "<think>", "</think>"),
    bos="<|startoftext|>",
    ends=("<|role_end|>", "<|endoftext|>"),
    pad="<|endoftext|>",
    pre="bailingmoe2",
    template=LING3_TEMPLATE,
)


def byte_vocabulary(size: int, architecture: str = "llama") -> Vocabulary:
    """The vocabulary for an embedding of `size` rows; ids behind the control tokens have no meaning.

    Raises UsageError when `size` is too small.
    """
    chat = _LING3 if architecture == "ling3" else _CHATML
    control = (*chat.special, *chat.plain)
    needed = 256 + len(control)
    if size < needed:
        raise UsageError(
            "vocabulary_too_small", f"a byte tokenizer needs {needed} tokens, the model has {size}"
        )
    ids = {token: 256 + index for index, token in enumerate(control)}
    added = [AddedToken(index, token, token in chat.special) for token, index in ids.items()]
    document = byte_level([*byte_alphabet(), *control], [], added, chat.pre)
    bos, pad = (None if token is None else ids[token] for token in (chat.bos, chat.pad))
    text = text_metadata(bos, False, [ids[token] for token in chat.ends], pad)
    return Vocabulary(document, chat.template, text)
