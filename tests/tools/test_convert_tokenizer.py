# SPDX-License-Identifier: Apache-2.0
"""GGUF vocabularies as tokenizer.json, judged by llama.cpp's ids and by the published split rules."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from cecilia.errors import ModelFileError, UsageError
from cecilia.formats.l3r import open_model
from tests.tools import tiny_gguf
from tools.convert.bpe import byte_alphabet
from tools.convert.byte_vocabulary import byte_vocabulary
from tools.convert.pipeline import Options, convert


def converted(tmp_path: Path, tokenizer: str | None = None, **keys: object) -> Tokenizer:
    """The tokenizer of a tiny model converted with these GGUF keys; a dot is written as two underscores."""
    changed = {key.replace("__", "."): value for key, value in keys.items()}
    tiny_gguf.write(tmp_path / "tiny.gguf", keys=changed)
    convert(tmp_path / "tiny.gguf", tmp_path / "tiny.l3r", Options(tokenizer=tokenizer))
    with open_model(tmp_path / "tiny.l3r") as model:
        assert model.tokenizer is not None
        return Tokenizer.from_buffer(model.tokenizer)


@pytest.mark.model
def test_default_model_gives_the_golden_ids_and_decodes_them(model_path: Path, fixtures_dir: Path) -> None:
    with open_model(model_path) as model:
        assert model.tokenizer is not None
        tokenizer = Tokenizer.from_buffer(model.tokenizer)
        assert model.metadata["text"] == {"bos_id": 1, "add_bos": False, "eos_ids": [2, 0], "pad_id": 2}
        assert model.chat_template is not None
        assert model.chat_template.startswith("{% for message in messages %}")
    text = (fixtures_dir / "smollm2" / "kjv.txt").read_text(encoding="utf-8")
    golden = np.load(fixtures_dir / "smollm2" / "golden_llamacpp.npz")["ids"].reshape(-1)
    ids = tokenizer.encode(text).ids
    assert ids[: golden.size] == golden.tolist()
    assert tokenizer.decode(ids) == text


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n\n\t x",
        "Don't 2 + 3 = 5?",
        "日本語 中文",
        "e\u0301 \u00e9",
        "🙂👩‍👩‍👧",
        "\u2028\x00\x7f",
        "٣٤ ½²",
    ],
)
def test_default_model_decodes_what_it_encoded(model_path: Path, text: str) -> None:
    with open_model(model_path) as model:
        assert model.tokenizer is not None
        tokenizer = Tokenizer.from_buffer(model.tokenizer)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


# What llama.cpp's pattern lists make of one text; Ġ stands for the space.
@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["it", "'s", "Ġ1234", "Ġ$", "5", "Ġok", "!!"]),
        ("smollm", ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġ$", "5", "Ġok", "!!"]),
        ("qwen2", ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġ$", "5", "Ġok", "!!"]),
        ("bailingmoe2", ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġ$", "5", "Ġok", "!!"]),
        ("llama-bpe", ["it", "'s", "Ġ", "123", "4", "Ġ$", "5", "Ġok", "!!"]),
        ("default", ["it", "'", "s", "Ġ", "123", "4", "Ġ", "$", "5", "Ġok", "!!"]),
    ],
)
def test_each_pre_tokenizer_splits_as_its_name_says(pre: str, pieces: list[str], tmp_path: Path) -> None:
    tokenizer = converted(tmp_path, tokenizer__ggml__pre=pre)
    found = tokenizer.pre_tokenizer.pre_tokenize_str("it's 1234 $5 ok!!")
    assert [piece for piece, _ in found] == pieces


def test_merges_apply_and_token_ids_are_those_of_the_gguf(tmp_path: Path) -> None:
    tokenizer = converted(tmp_path)
    ids = tokenizer.encode("he the").ids
    assert [tiny_gguf.TOKENS[index] for index in ids] == ["he", "Ġt", "he"]
    assert tokenizer.get_vocab() == {token: index for index, token in enumerate(tiny_gguf.TOKENS)}


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path: Path) -> None:
    added = converted(tmp_path).get_added_tokens_decoder()
    assert {index: (token.content, token.special) for index, token in added.items()} == {
        0: ("<|endoftext|>", True),
        1: ("<|im_start|>", True),
        2: ("<|im_end|>", True),
        261: ("<think>", False),
    }


def test_end_of_turn_tokens_join_the_eos_ids(tmp_path: Path) -> None:
    tiny_gguf.write(
        tmp_path / "tiny.gguf",
        keys={
            "tokenizer.ggml.eos_token_id": 0,
            "tokenizer.ggml.eot_token_id": 5,
            "tokenizer.ggml.padding_token_id": 0,
        },
    )
    convert(tmp_path / "tiny.gguf", tmp_path / "tiny.l3r")
    with open_model(tmp_path / "tiny.l3r") as model:
        assert model.metadata["text"] == {"bos_id": 1, "add_bos": False, "eos_ids": [0, 5, 2], "pad_id": 0}


def test_byte_alphabet_is_that_of_the_library() -> None:
    """Every byte's character decodes back to that byte."""
    tokenizer = Tokenizer.from_buffer(byte_vocabulary(259).tokenizer)
    assert sorted(byte_alphabet()) == sorted(tiny_gguf.ByteLevel.alphabet())
    for text in ("".join(map(chr, range(128))), "é", "日", "🙂"):
        assert tokenizer.encode(text).ids == list(text.encode("utf-8"))
        assert tokenizer.decode(list(text.encode("utf-8"))) == text


def test_byte_tokenizer_needs_259_tokens(tmp_path: Path) -> None:
    assert converted(tmp_path, "byte").encode("hé<|im_end|>").ids == [104, 0xC3, 0xA9, 258]
    with pytest.raises(UsageError, match="needs 259 tokens, the model has 258"):
        byte_vocabulary(258)


def test_no_tokenizer_means_none(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf", keys={"tokenizer.ggml.model": "no such thing"})
    convert(tmp_path / "tiny.gguf", tmp_path / "tiny.l3r", Options(tokenizer="none"))
    with open_model(tmp_path / "tiny.l3r") as model:
        assert model.tokenizer is None
        assert model.chat_template is None


def test_a_tokenizer_file_is_taken_as_it_is(tmp_path: Path) -> None:
    document = byte_vocabulary(259).tokenizer
    assert document is not None
    (tmp_path / "tokenizer.json").write_bytes(document)
    tokenizer = converted(tmp_path, str(tmp_path / "tokenizer.json"))
    assert json.loads(tokenizer.to_str())["model"] == json.loads(document)["model"]


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff\xfe", b'{"version":"1.0","model":{"type":"BPE"}}', b"[" * 9000]
)
def test_a_damaged_tokenizer_file_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        converted(tmp_path, str(tmp_path / "tokenizer.json"))
    assert caught.value.code == "damaged_tokenizer"
    assert "\n" not in str(caught.value)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    big = {f"t{index}": index for index in range(301)}
    document = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": big, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ModelFileError, match="token ids up to 300 for an embedding of 300 rows"):
        converted(tmp_path, str(tmp_path / "tokenizer.json"))


def test_an_absent_tokenizer_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        converted(tmp_path, str(tmp_path / "absent.json"))
