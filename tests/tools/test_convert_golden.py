# SPDX-License-Identifier: Apache-2.0
"""Converted vocabularies against llama.cpp's own test cases (MIT; the notice is in the file of cases).

`golden/llama_cpp_vocabularies.json` holds each vocabulary cut down to the tokens and merges its cases need;
what was cut is never reached, so the ids must be those of the whole one. Where the llama.cpp sources are
unpacked (make bench-peers does it) the whole vocabularies are tested too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cecilia.formats.l3r import open_model
from cecilia.text.tokenizer import Tokenizer
from tests.tools import tiny_gguf
from tools.bench.peer_build import CACHE
from tools.convert import gguf_vocabulary
from tools.convert.gguf_source import GgufSource
from tools.convert.pipeline import convert

NORMAL, CONTROL, UNUSED = 1, 3, 5
GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parent / "golden" / "llama_cpp_vocabularies.json").read_text(encoding="utf-8")
)["vocabularies"]
WHOLE = ("gpt-2", "llama-bpe", "qwen2", "llama-spm", "phi-3")


def gguf_keys(entry: dict[str, Any]) -> dict[str, Any]:
    """The vocabulary keys of a tiny GGUF; ids are places in the list, an end marker follows the tokens."""
    count = len(entry["tokens"])
    unused = tiny_gguf.VOCAB_LARGE - count - 1
    tokens = [*entry["tokens"], "<end>", *(f"[PAD{index}]" for index in range(unused))]
    types = [*entry.get("types", [NORMAL] * count), CONTROL, *[UNUSED] * unused]
    keys = {
        "llama.vocab_size": tiny_gguf.VOCAB_LARGE,
        "tokenizer.ggml.model": entry["model"],
        "tokenizer.ggml.pre": entry["pre"],
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": entry.get("merges"),
        "tokenizer.ggml.bos_token_id": count,
        "tokenizer.ggml.eos_token_id": count,
    }
    if "scores" in entry:
        keys["tokenizer.ggml.scores"] = [*entry["scores"], *[0.0] * (unused + 1)]
    return keys


@pytest.mark.parametrize("name", GOLDEN)
def test_the_ids_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    entry = GOLDEN[name]
    tiny_gguf.write(tmp_path / "x.gguf", keys=gguf_keys(entry), vocab=tiny_gguf.VOCAB_LARGE)
    convert(tmp_path / "x.gguf", tmp_path / "x.l3r")
    with open_model(tmp_path / "x.l3r") as model:
        assert model.tokenizer is not None
        tokenizer = Tokenizer(model.tokenizer, **without_pad(model.metadata["text"]))
    for text, want in entry["cases"]:
        ids = tokenizer.encode_text(text)
        assert [entry["ids"][index] for index in ids] == want, text
        spelt = f" {text}" if "scores" in entry else text  # this kind puts a space before every text
        assert tokenizer.decode(ids) == spelt


def without_pad(text: dict[str, Any]) -> dict[str, Any]:
    """What `Tokenizer` takes of the metadata's `text`."""
    return {key: value for key, value in text.items() if key != "pad_id"}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_vocabularies_give_every_golden_id(name: str) -> None:
    found = sorted(CACHE.glob(f"*/source/models/ggml-vocab-{name}.gguf"))
    if not found:
        pytest.skip("the llama.cpp sources are not unpacked: make bench-peers")
    source = GgufSource(found[0])
    size = len(source.array("tokenizer.ggml.tokens", str))
    words = gguf_vocabulary.vocabulary(source, size, "llama", None)
    tokenizer = Tokenizer(words.tokenizer or b"", **without_pad(words.text))
    texts = Path(f"{found[0]}.inp").read_bytes().decode("utf-8").split("\n__ggml_vocab_test__\n")
    wanted = Path(f"{found[0]}.out").read_text(encoding="utf-8").split("\n")
    assert len(texts) == len(wanted)
    for text, ids in zip(texts, wanted, strict=True):
        assert tokenizer.encode_text(text) == [int(index) for index in ids.split()], text
