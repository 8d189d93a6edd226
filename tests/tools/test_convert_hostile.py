# SPDX-License-Identifier: Apache-2.0
"""Damaged, foreign and unsupported sources, and conversions cut short: one line, the right code, no file."""

from __future__ import annotations

import errno
import os
import signal
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from cecilia.errors import ModelFileError
from tests.tools import tiny_gguf
from tools.convert.__main__ import main
from tools.convert.pipeline import convert


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a tiny GGUF that converts."""
    path = tmp_path_factory.mktemp("sound") / "tiny.gguf"
    tiny_gguf.write(path)
    return path.read_bytes()


def refusal(data: bytes, folder: Path) -> str:
    """Convert `data`, which must be refused as a model file, and return the message."""
    (folder / "x.gguf").write_bytes(data)
    with pytest.raises(ModelFileError) as caught:
        convert(folder / "x.gguf", folder / "x.l3r")
    assert sorted(path.name for path in folder.iterdir()) == ["x.gguf"]
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f" {folder / 'x.gguf'}:", "")


def test_a_file_cut_anywhere_is_refused(sound: bytes, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    cuts = {*range(64), *(int(cut) for cut in rng.integers(64, len(sound), 150)), len(sound) - 1}
    for cut in sorted(cuts):
        message = refusal(sound[:cut], tmp_path)
        assert message.startswith("truncated_model: "), (cut, message)


def test_flipped_header_bytes_never_escape_as_another_error(sound: bytes, tmp_path: Path) -> None:
    """A changed byte may mean another sound file; whatever is refused must be refused properly."""
    rng = np.random.default_rng(4)
    for at in rng.integers(0, 12000, 150):
        data = bytearray(sound)
        data[at] ^= int(rng.integers(1, 256))
        (tmp_path / "x.gguf").write_bytes(data)
        with suppress(ModelFileError):
            convert(tmp_path / "x.gguf", tmp_path / "x.l3r")


def header(tensors: int, keys: int, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + body


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def entry(name: bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """A tensor directory entry; kind 0 is F32."""
    packed = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
    return packed + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


DAMAGED = {
    "empty": (b"", "truncated_model"),
    "foreign magic": (b"PK\3\4" + bytes(60), "unsupported_container: the file begins with b'PK"),
    "version 1": (b"GGUF" + struct.pack("<III", 1, 0, 0), "unsupported_container: GGUF version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "unsupported_container: a big-endian"),
    "tensor count": (header(1 << 60, 0), "damaged_model: the tensor count"),
    "key count": (header(0, 1 << 60), "damaged_model: the key count"),
    "key length": (header(0, 1, struct.pack("<Q", 1 << 62)), "damaged_model: the name of key 0"),
    "string length": (header(0, 1, key(b"a", 8, struct.pack("<Q", 1 << 62))), "damaged_model: the value"),
    "no UTF-8": (header(0, 1, key(b"\xff", 4, bytes(4))), "damaged_model: the name of key 0 is not valid"),
    "value type": (header(0, 1, key(b"a", 99, b"")), "damaged_model: the key 'a' has the unknown value type"),
    "boolean": (header(0, 1, key(b"a", 7, b"\2")), "damaged_model: the value of 'a' is neither"),
    "array length": (
        header(0, 1, key(b"a", 9, struct.pack("<IQ", 0, 1 << 60))),
        "damaged_model: the array 'a'",
    ),
    "nested array": (header(0, 1, key(b"a", 9, struct.pack("<IQ", 9, 1))), "damaged_model: the array 'a'"),
    "array beyond the end": (header(0, 1, key(b"a", 9, struct.pack("<IQ", 12, 999))), "truncated_model"),
    "key twice": (header(0, 2, key(b"a", 0, b"\0") * 2), "damaged_model: the key 'a' appears twice"),
    "alignment": (
        header(0, 1, key(b"general.alignment", 4, b"\3\0\0\0")),
        "damaged_model: general.alignment",
    ),
    "alignment type": (
        header(0, 1, key(b"general.alignment", 8, bytes(8))),
        "damaged_model: general.alignment",
    ),
    "rank": (header(1, 0, entry(b"t", (1,) * 5)), "damaged_model: the tensor 't' has 5 dimensions"),
    "no elements": (header(1, 0, entry(b"t", (0, 8))), "damaged_model: the tensor 't' claims the shape"),
    "too many elements": (
        header(1, 0, entry(b"t", (1 << 63, 1 << 63))),
        "damaged_model: the tensor 't' claims",
    ),
    "tensor type": (header(1, 0, entry(b"t", (8,), 250)), "unsupported_tensor_type: the tensor 't'"),
    "partial block": (header(1, 0, entry(b"t", (33, 2), 8)), "damaged_model: the tensor 't' has rows of 33"),
    "offset": (
        header(1, 0, entry(b"t", (8,), offset=1 << 63) + bytes(99)),
        "truncated_model: the tensor 't'",
    ),
    "misaligned": (
        header(1, 0, entry(b"t", (8,), offset=4) + bytes(99)),
        "damaged_model: the tensor 't' starts",
    ),
    "overlap": (
        header(2, 0, entry(b"t", (16,)) + entry(b"u", (8,), offset=32) + bytes(999)),
        "damaged_model: the tensors 't' and 'u' overlap",
    ),
    "tensor twice": (header(2, 0, entry(b"t", (8,)) * 2 + bytes(999)), "damaged_model: two tensors share"),
    "no metadata": (header(0, 0), "unsupported_architecture: the architecture None; supported: llama"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_headers_are_refused_cheaply(case: str, tmp_path: Path) -> None:
    data, expected = DAMAGED[case]
    tracemalloc.start()
    try:
        assert refusal(data, tmp_path).startswith(expected)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20  # importing the reader is most of it
    finally:
        tracemalloc.stop()


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "scaling": ({"llama.rope.scaling.type": "yarn"}, "RoPE scaling is not supported"),
    "experts": ({"llama.expert_count": 8}, "experts are not supported"),
    "window": ({"llama.attention.sliding_window": 512}, "sliding windows are not supported"),
    "unknown key": ({"llama.logit_scale": 0.5}, "this variant of the architecture is not supported"),
    "partial rotary": ({"llama.rope.dimension_count": 8}, "partial rotary"),
    "value width": ({"llama.attention.value_length": 8}, "values of width 8"),
    "head groups": ({"llama.attention.head_count_kv": 3}, "4 heads are no multiple of 3"),
    "layers": ({"llama.block_count": 4_000_000_000}, "llama.block_count is 4000000000"),
    "many layers": ({"llama.block_count": 5000}, "5000 layers; at most 1024"),
    "no width": ({"llama.embedding_length": None}, "the file has no llama.embedding_length"),
    "zero heads": ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0"),
    "heads per layer": ({"llama.attention.head_count": [4, 4]}, "must be one non-negative integer"),
    "text for a number": ({"llama.block_count": "2"}, "must be one non-negative integer"),
    "huge heads": ({"llama.attention.key_length": 1 << 30}, "partial rotary"),
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "must be one finite number"),
    "missing layer": ({"llama.block_count": 3}, "the file has no tensor blk.2.attn_norm.weight"),
    "extra layer": ({"llama.block_count": 1}, "tensor 'blk.1.attn_k.weight', one of 9 too many"),
    "shape": ({"llama.feed_forward_length": 128}, r"blk.0.ffn_gate.weight is [96, 64]; expected [128, 64]"),
    "vocabulary": ({"llama.vocab_size": 299}, "token_embd.weight has 300 rows, llama.vocab_size is 299"),
    "tokenizer model": ({"tokenizer.ggml.model": "t5"}, "the tokenizer model 't5'; supported: gpt2 llama"),
    "pre-tokenizer": ({"tokenizer.ggml.pre": "tekken"}, "'tekken'; supported: bailingmoe2 default gpt-2"),
    "scores": ({"tokenizer.ggml.model": "llama"}, "the file has no tokenizer.ggml.scores"),
    "no pre-tokenizer": ({"tokenizer.ggml.pre": None}, "no tokenizer.ggml.pre"),
    "token count": ({"tokenizer.ggml.tokens": tiny_gguf.TOKENS[:-1]}, "299 tokens"),
    "token twice": ({"tokenizer.ggml.tokens": ["he", *tiny_gguf.TOKENS[1:]]}, "the token 'he' appears twice"),
    "merge": ({"tokenizer.ggml.merges": ["h e", "q q"]}, "merge 1, 'q q', does not join"),
    "three parts": ({"tokenizer.ggml.merges": ["h e r"]}, "merge 0, 'h e r', does not join"),
    "eos": ({"tokenizer.ggml.eos_token_id": 300}, "eos_token_id is 300, beyond the vocabulary of 300"),
    "bos": (
        {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None},
        "add_bos_token is true, but there is no bos token",
    ),
    "template": ({"tokenizer.chat_template": "x" * 70000}, "the chat template is larger than 65536"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_is_outside_the_envelope_is_refused_by_name(case: str, tmp_path: Path) -> None:
    keys, expected = UNSUPPORTED[case]
    tiny_gguf.write(tmp_path / "x.gguf", keys=keys)
    assert expected in refusal((tmp_path / "x.gguf").read_bytes(), tmp_path)


def _bias(tensors: dict[str, np.ndarray]) -> None:
    tensors["blk.0.attn_q.bias"] = np.zeros(64, np.float32)


def _no_embedding(tensors: dict[str, np.ndarray]) -> None:
    del tensors["token_embd.weight"]


def _not_finite(tensors: dict[str, np.ndarray]) -> None:
    tensors["blk.1.ffn_up.weight"][3, 5] = np.inf


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (_bias, "biases are not supported (tensor 'blk.0.attn_q.bias'"),
        (_no_embedding, "no matrix token_embd.weight"),
        (_not_finite, "the tensor 'blk.1.ffn_up.weight' holds values that are not finite"),
    ],
)
def test_wrong_tensors_are_refused_by_name(edit: tiny_gguf.Edit, expected: str, tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "x.gguf", Kind.F32, edit=edit)
    assert expected in refusal((tmp_path / "x.gguf").read_bytes(), tmp_path)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "x.gguf", architecture="gemma3")
    assert "'gemma3'; supported: llama" in refusal((tmp_path / "x.gguf").read_bytes(), tmp_path)


def test_every_refusal_names_the_file(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(sound[:100])
    with pytest.raises(ModelFileError, match=rf"truncated_model: {path}: the file ends at byte 100"):
        convert(path, tmp_path / "x.l3r")


def test_a_file_the_system_refuses_is_unreadable(
    sound: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tools.convert.gguf_source.check_gguf", refuse)
    assert refusal(sound, tmp_path) == "file_unreadable: Permission denied"


def test_names_with_line_breaks_stay_on_one_line(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "x.gguf", keys={"llama.a\nb": 1})
    assert r"key 'llama.a\nb'" in refusal((tmp_path / "x.gguf").read_bytes(), tmp_path)


def test_the_command_ends_with_one_line_and_exit_code_3(
    sound: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.gguf").write_bytes(sound[:5000])
    for source in (tmp_path / "x.gguf", tmp_path / "absent.gguf", tmp_path):
        assert main([str(source), "--out", str(tmp_path / "x.l3r")]) == 3
        captured = capfd.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1


def _send(number: int) -> Callable[..., None]:
    def at_the_third_tensor(*_: Any) -> None:
        os.kill(os.getpid(), number)

    return at_the_third_tensor


def _disk_full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def heeded_sigint() -> Iterator[None]:
    """Ctrl-C as a terminal has it: a shell starts its background jobs with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded_sigint")
@pytest.mark.parametrize(
    ("interruption", "code", "message"),
    [
        (_send(signal.SIGINT), 130, "interrupted: no file was written"),
        (_send(signal.SIGTERM), 143, "terminated: no file was written"),
        (_disk_full, 3, "No space left on device"),
    ],
    ids=["SIGINT", "SIGTERM", "ENOSPC"],
)
def test_a_conversion_cut_short_leaves_the_old_file_and_nothing_else(
    interruption: Callable[..., None],
    code: int,
    message: str,
    sound: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, out = tmp_path / "x.gguf", tmp_path / "x.l3r"
    source.write_bytes(sound)
    out.write_bytes(b"the file of before")
    real, calls = os.pwrite, 0

    def pwrite(*args: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 3:
            interruption()
        return real(*args)

    monkeypatch.setattr("os.pwrite", pwrite)
    before = signal.getsignal(signal.SIGTERM)
    assert main([str(source), "--out", str(out)]) == code
    assert message in capsys.readouterr().err
    assert out.read_bytes() == b"the file of before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.gguf", "x.l3r"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_kill_9_left_is_swept_once_it_is_old(sound: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(sound)
    old, young = tmp_path / ".x.l3r.0123abcd.partial", tmp_path / ".x.l3r.4567cdef.partial"
    for leftover in (old, young):
        leftover.write_bytes(b"half")
    os.utime(old, (0, 0))
    convert(tmp_path / "x.gguf", tmp_path / "x.l3r")
    assert not old.exists()
    assert young.exists()


def test_too_little_room_is_said_before_anything_is_written(
    sound: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.gguf").write_bytes(sound)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    assert main([str(tmp_path / "x.gguf"), "--out", str(tmp_path / "x.l3r")]) == 1
    assert "disk_full: " in capsys.readouterr().err
    assert not (tmp_path / "x.l3r").exists()
