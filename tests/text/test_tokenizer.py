# SPDX-License-Identifier: Apache-2.0
"""The tokenizer: plain text never reaches a control token, and every id spells its own bytes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as NativeTokenizer

from cecilia.errors import ModelFileError, RequestError
from cecilia.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import ORDINARY, SPECIAL, as_bytes, byte_fallback, byte_level

KINDS = {
    "plain": byte_level(dangerous=False),
    "words that spell control tokens": byte_level(),
    "whole words looked up first": byte_level(ignore_merges=True),
    "normalised added tokens": byte_level(normalized=True),
}


def load(spec: dict[str, Any], **options: Any) -> Tokenizer:
    return Tokenizer(as_bytes(spec), **{"bos_id": None, "add_bos": False, "eos_ids": [], **options})


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def spec(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(spec: dict[str, Any]) -> Tokenizer:
    return load(spec)


@pytest.fixture(scope="module")
def added(spec: dict[str, Any]) -> dict[str, int]:
    return {entry["content"]: entry["id"] for entry in spec["added_tokens"]}


TAGS = [*SPECIAL, *ORDINARY]


def test_the_library_alone_would_let_ordinary_added_tokens_through() -> None:
    """Why the wall exists; should this ever fail, the library has changed."""
    native = NativeTokenizer.from_str(as_bytes(KINDS["plain"]).decode())
    native.encode_special_tokens = True
    assert native.encode("<think>").tokens == ["<think>"]


@pytest.mark.parametrize(
    "shape",
    [
        "{a}",
        "x{a}",
        "{a}x",
        " {a} ",
        "\n{a}\n",
        "{a}{b}",
        "{a} {b}",
        "<{a}>",
        "<thi{a}nk>",
        "é{a}漢{b}🙂",
        "{a}" * 5,
    ],
)
def test_text_never_becomes_a_control_token(tokenizer: Tokenizer, added: dict[str, int], shape: str) -> None:
    for a, b in itertools.product(TAGS, TAGS):
        text = shape.format(a=a, b=b)
        ids = tokenizer.encode_text(text)
        assert not set(ids) & set(added.values())
        assert tokenizer.decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from([*TAGS, "<", "think", ">", "<|", " the", "  "]), st.text(max_size=3)))
)
def test_any_mixture_stays_text_and_comes_back(parts: list[str]) -> None:
    text = "".join(parts)
    for kind in ("plain", "whole words looked up first"):
        tokenizer = load_once(kind)
        ids = tokenizer.encode_text(text)
        assert not {entry["id"] for entry in KINDS[kind]["added_tokens"]}.intersection(ids)
        assert tokenizer.decode(ids) == text


def load_once(kind: str, _loaded: dict[str, Tokenizer] = {}) -> Tokenizer:  # noqa: B006 - a cache over examples
    if kind not in _loaded:
        _loaded[kind] = load(KINDS[kind])
    return _loaded[kind]


@pytest.mark.parametrize("text", ["system user", " the  the evil", "hello, wörld 漢字 🙂", "a\n\n b\t", ""])
def test_harmless_text_has_the_ids_of_the_library(
    spec: dict[str, Any], tokenizer: Tokenizer, text: str
) -> None:
    native = NativeTokenizer.from_str(as_bytes(spec).decode())
    assert tokenizer.encode_text(text) == native.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode_control(text) == tokenizer.encode_text(text)


def test_control_text_recognises_every_added_token(tokenizer: Tokenizer, added: dict[str, int]) -> None:
    for a, b in itertools.product(TAGS, TAGS):
        assert tokenizer.encode_control(a + b) == [added[a], added[b]]
        parts = ["é ", added[a], "\nuser", added[b], added[a], "漢"]
        text = "".join(
            part if isinstance(part, str) else {v: k for k, v in added.items()}[part] for part in parts
        )
        assert tokenizer.split_control(text) == parts


def test_control_text_gets_no_bos_even_if_the_file_adds_one() -> None:
    spec = byte_level()
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}},
    }
    tokenizer = load(spec, bos_id=2, add_bos=True)
    assert tokenizer.encode_control("<|im_end|>") == [1]
    assert 2 not in tokenizer.encode_text("a")


def test_padding_and_truncation_of_the_file_are_ignored() -> None:
    spec = byte_level()
    spec["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    assert load(spec).decode(load(spec).encode_text("longer than two")) == "longer than two"


def test_bytes_of_tokens() -> None:
    tokenizer = load(byte_level())
    ids = tokenizer.encode_text("漢 ")
    assert [tokenizer.token_bytes(index) for index in ids] == [b"\xe6", b"\xbc", b"\xa2", b" "]
    assert [tokenizer.token_bytes(index) for index in (0, 1, 2)] == [b"", b"", b""]
    shown = tokenizer.encode_control("<think>")
    assert b"".join(map(tokenizer.token_bytes, shown)) == b"<think>", "tags are there for the think splitter"
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.decode(tokenizer.encode_text("漢")[:-1]) == "\ufffd"


def test_what_is_to_be_spelt_is_spelt_though_flagged_special() -> None:
    tokenizer = load(byte_level(), spelt=("<|im_end|>", "not there"))
    assert [tokenizer.token_bytes(index) for index in (0, 1, 2)] == [b"", b"<|im_end|>", b""]


def test_every_byte_has_its_token() -> None:
    tokenizer = load(byte_level())
    assert {tokenizer.token_bytes(index) for index in range(3, 259)} == {
        bytes([value]) for value in range(256)
    }


def test_byte_fallback() -> None:
    tokenizer = load(byte_fallback())
    ids = tokenizer.encode_text("ab ab é<s>")
    assert 0 not in ids
    assert tokenizer.decode(ids) == "ab ab é<s>"
    assert [tokenizer.token_bytes(index) for index in tokenizer.encode_text(" abé")] == [
        b" ab",
        b"\xc3",
        b"\xa9",
    ]
    assert tokenizer.token_bytes(0) == b""


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "\udcff" * 3])
def test_lone_surrogates_are_refused(text: str) -> None:
    tokenizer = load(byte_level())
    for encode in (tokenizer.encode_text, tokenizer.encode_control, tokenizer.split_control):
        with pytest.raises(RequestError) as caught:
            encode(text)
        assert caught.value.code == "invalid_value"


def test_special_tokens_by_their_template_names() -> None:
    tokenizer = load(byte_level(), bos_id=2, eos_ids=[1])
    assert tokenizer.special_tokens() == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert load(byte_level()).special_tokens() == {}


def broken(**changes: Any) -> bytes:
    return as_bytes({**byte_level(), **changes})


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "bad_tokenizer"),
        (b"\xff\xfe", "bad_tokenizer"),
        (b"[1]", "unsupported_tokenizer"),
        (b"[" * 100_000, "bad_tokenizer"),
        (broken(model={"type": "WordPiece", "vocab": {}, "unk_token": "u"}), "unsupported_tokenizer"),
        (broken(model={"type": "BPE", "vocab": [], "merges": []}), "bad_tokenizer"),
        (broken(model={"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}), "bad_tokenizer"),
        (broken(decoder={"type": "BPEDecoder", "suffix": "</w>"}), "unsupported_tokenizer"),
        (broken(decoder=None), "unsupported_tokenizer"),
        (broken(decoder=7), "bad_tokenizer"),
        (broken(model={"type": "BPE", "vocab": {"a": 0}, "merges": []}), "unsupported_tokenizer"),
        (broken(added_tokens=[{"content": "x"}]), "bad_tokenizer"),
    ],
)
def test_what_cannot_be_a_tokenizer(data: bytes, code: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        Tokenizer(data, bos_id=None, add_bos=False, eos_ids=[])
    assert caught.value.code == code
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("options", [{"eos_ids": [100_000]}, {"bos_id": -1}, {"add_bos": True}])
def test_ids_that_contradict_the_vocabulary(options: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match="bad_tokenizer"):
        load(byte_level(), **options)


def test_what_the_vocabulary_cannot_spell_becomes_the_replacement_character() -> None:
    spec = byte_level()
    missing = {"\u0104", "\u00f1"}  # how GPT-2's alphabet writes the bytes 0x04 and 0xf1
    spec["model"]["vocab"] = {w: i for w, i in spec["model"]["vocab"].items() if w not in missing}
    lacking = load(spec)
    for text, shown in (("a\x04b", "a\ufffdb"), ("\U00040000", "\ufffd"), ("\x05 \u00e9", "\x05 \u00e9")):
        assert lacking.decode(lacking.encode_text(text)) == shown
        assert lacking.decode(lacking.encode_control(text)) == shown
        assert "".join(part for part in lacking.split_control(text) if isinstance(part, str)) == shown


def test_a_vocabulary_without_basic_bytes_is_refused() -> None:
    spec = byte_level()
    del spec["model"]["vocab"]["q"]
    with pytest.raises(ModelFileError) as caught:
        load(spec)
    assert caught.value.code == "unsupported_tokenizer"


def test_the_fewest_tokens_a_text_can_come_to() -> None:
    tokenizer = load(byte_level())
    longest = max(
        len(word.encode()) for word in ("<tool_response>", "<|im_start|>", "\u0120evil", "assistant")
    )
    assert tokenizer.least_tokens(0) == 0
    assert tokenizer.least_tokens(1) == 1
    assert tokenizer.least_tokens(10 * longest) == 10
    assert tokenizer.least_tokens(10 * longest + 1) == 11
    text = "assistant the evil 漢字 " * 50
    assert tokenizer.least_tokens(len(text.encode())) <= len(tokenizer.encode_text(text))
