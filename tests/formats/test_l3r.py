# SPDX-License-Identifier: Apache-2.0
"""The container's good path, and a writer that is interrupted, misused or out of disk."""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cecilia.errors import CeciliaError, ModelFileError, UsageError
from cecilia.formats.l3r import open_model
from cecilia.formats.l3r_write import PlannedTensor
from cecilia.formats.quant import unpack
from tests.formats.samples import METADATA, PLAN, TEMPLATE, TOKENIZER, content, weights, write_sample, writer


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("l3r") / "sample.l3r")


def test_round_trip(sample: Path) -> None:
    with open_model(sample, verify=True) as model:
        assert model.metadata == METADATA
        assert model.tokenizer == TOKENIZER
        assert model.chat_template == TEMPLATE
        assert list(model.tensors) == [t.name for t in PLAN]
        for planned, (name, blocks) in zip(PLAN, weights().items(), strict=True):
            entry = model.tensors[name]
            assert (entry.format, entry.rank, entry.rows, entry.cols, entry.layer) == (
                planned.format,
                planned.rank,
                planned.rows,
                planned.cols,
                planned.layer,
            )
            if entry.rank == 1:
                np.testing.assert_array_equal(np.frombuffer(model.data(name), "<f4"), blocks.q[0])
            else:
                back = unpack(model.data(name), entry.format, entry.rows, entry.cols)
                np.testing.assert_array_equal(back.q, blocks.q)


def test_alignment_and_layers(sample: Path) -> None:
    with open_model(sample) as model:
        assert [s.layer for s in model.slices] == [-1, 0, 1, -1]
        assert all(s.offset % 65536 == 0 and s.nbytes % 65536 == 0 for s in model.slices)
        assert all(e.offset % 64 == 0 for e in model.tensors.values())
        assert model.tensors["model.layers.0.mlp.gate_proj.weight"].offset % 16384 == 0
        for s in model.slices:
            inside = [e for e in model.tensors.values() if s.offset <= e.offset < s.offset + s.nbytes]
            assert {e.layer for e in inside} == {s.layer}


def test_absent_and_empty_texts(tmp_path: Path) -> None:
    absent = write_sample(tmp_path / "absent.l3r", tokenizer=None, chat_template=None)
    empty = write_sample(tmp_path / "empty.l3r", tokenizer=b"", chat_template="")
    with open_model(absent) as model:
        assert (model.tokenizer, model.chat_template) == (None, None)
    with open_model(empty) as model:
        assert (model.tokenizer, model.chat_template) == (b"", "")


def test_two_writes_are_the_same_bytes(sample: Path, tmp_path: Path) -> None:
    reordered = dict(reversed(METADATA.items()))
    again = write_sample(tmp_path / "other name.l3r", metadata=reordered)
    assert again.read_bytes() == sample.read_bytes()


def test_the_digest_changes_with_the_data_and_with_the_metadata(sample: Path, tmp_path: Path) -> None:
    renamed = write_sample(tmp_path / "renamed.l3r", metadata={**METADATA, "name": "other"})
    changed = tmp_path / "changed.l3r"
    with writer(changed) as out:
        for name, blocks in weights(seed=8).items():
            out.write(name, content(name, blocks))
        out.finish()
    digests = set()
    for path in (sample, renamed, changed):
        with open_model(path) as model:
            digests.add(model.digest)
    assert len(digests) == 3


def test_views_are_read_only_and_outlive_close(sample: Path) -> None:
    name, expected = "model.norm.weight", weights()["model.norm.weight"].q[0]
    with open_model(sample) as model:
        view = model.data(name)
        assert view.readonly
        array = np.frombuffer(view, "<f4")
    np.testing.assert_array_equal(array, expected)
    with pytest.raises(UsageError, match="file_closed"):
        model.data(name)
    with pytest.raises(UsageError, match="file_closed"):
        model.verify()


def test_an_unknown_tensor_has_a_code(sample: Path) -> None:
    with (
        open_model(sample) as model,
        pytest.raises(ModelFileError, match=r"missing_tensor: .*'lm_head.weight'"),
    ):
        model.data("lm_head.weight")


def test_verify_reports_progress_to_the_last_byte(sample: Path) -> None:
    calls: list[tuple[int, int]] = []
    with open_model(sample) as model:
        model.verify(lambda done, total: calls.append((done, total)))
        data_bytes = sample.stat().st_size - model.slices[0].offset
    # 304 x 900 f32 are 1094400 bytes, 1114112 when padded: one leaf of 1 MiB, one of 64 KiB, then one a slice
    assert [done for done, _ in calls] == [1 << 20, *(n << 16 for n in range(17, 21))]
    assert {total for _, total in calls} == {data_bytes}


def test_no_descriptor_is_left_open(sample: Path, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with open_model(sample):
        pass
    (tmp_path / "bad.l3r").write_bytes(b"GGUF" * 2000)
    with pytest.raises(ModelFileError):
        open_model(tmp_path / "bad.l3r")
    write_sample(tmp_path / "good.l3r")
    assert len(os.listdir("/proc/self/fd")) == before


# ---- the writer -------------------------------------------------------------------------------------------


def test_the_file_obeys_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        assert write_sample(tmp_path / "m.l3r").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(old)


@pytest.mark.parametrize("written", [0, 1, len(PLAN)])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
def test_an_interrupted_writer_leaves_nothing(
    tmp_path: Path, written: int, error: type[BaseException]
) -> None:
    target = tmp_path / "m.l3r"
    target.write_bytes(b"the old file")
    with pytest.raises(error), writer(target) as out:  # noqa: PT012 - the point is where it is raised
        for name, blocks in list(weights().items())[:written]:
            out.write(name, content(name, blocks))
        raise error
    assert [p.name for p in tmp_path.iterdir()] == ["m.l3r"]
    assert target.read_bytes() == b"the old file"


def test_leaving_without_finish_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="bad_write"), writer(tmp_path / "m.l3r"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_finishing_too_early_names_the_missing_tensor(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"bad_write: .*embed_tokens"), writer(tmp_path / "m.l3r") as out:
        out.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ModelFileError, match=r"file_unwritable: .*m\.l3r: No space left"):
        write_sample(tmp_path / "m.l3r")
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_continued(sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:100_001], at))
    path = write_sample(tmp_path / "m.l3r")
    assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(sample.read_bytes()).digest()


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="file_unwritable"):
        writer(tmp_path / "none" / "m.l3r")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (PLAN[1].name, bytes(256)),
        (PLAN[0].name, bytes(1)),
        (PLAN[0].name, np.zeros(1094400 * 2, np.uint8)[::2]),
    ],
    ids=["out of order", "wrong size", "not contiguous"],
)
def test_data_that_does_not_follow_the_plan_is_refused(tmp_path: Path, name: str, data: object) -> None:
    with pytest.raises(UsageError, match="bad_write"), writer(tmp_path / "m.l3r") as out:
        out.write(name, data)
    assert list(tmp_path.iterdir()) == []


def tensor(name: str = "a", **changes: Any) -> PlannedTensor:
    return replace(PlannedTensor(name, "f32", 2, 1, 1, -1), **changes)


def test_nothing_follows_the_last_tensor_or_finish(tmp_path: Path) -> None:
    plan = [tensor("a", rank=1)]
    with writer(tmp_path / "m.l3r", tensors=plan) as out:
        out.write("a", bytes(4))
        with pytest.raises(UsageError, match=r"bad_write: .*follows the last"):
            out.write("b", bytes(4))
        out.finish()
        with pytest.raises(UsageError, match=r"bad_write: .*closed"):
            out.write("a", bytes(4))
    with open_model(tmp_path / "m.l3r", verify=True) as model:
        assert list(model.tensors) == ["a"]


BAD_PLANS = {
    "none": [],
    "twice": [tensor("a"), tensor("a")],
    "empty name": [tensor("")],
    "long name": [tensor("é" * 128)],
    "control character": [tensor("a\nb")],
    "surrogate": [tensor("\ud800")],
    "format": [tensor(format="q3")],
    "no rows": [tensor(rows=0)],
    "no columns": [tensor(cols=0)],
    "many rows": [tensor(rows=1 << 31)],
    "rank": [tensor(rank=3)],
    "block": [tensor(format="q8_32", cols=33)],
    "layer below": [tensor(layer=-2)],
    "layer above": [tensor(layer=65536)],
    "small align": [tensor(align=32)],
    "large align": [tensor(align=131072)],
    "odd align": [tensor(align=96)],
    "split layer": [tensor("a", layer=0), tensor("b", layer=1), tensor("c", layer=0)],
}


@pytest.mark.parametrize("plan", BAD_PLANS.values(), ids=BAD_PLANS)
def test_bad_plans_are_refused(tmp_path: Path, plan: list[PlannedTensor]) -> None:
    with pytest.raises(ModelFileError, match="bad_directory") as caught:
        writer(tmp_path / "m.l3r", tensors=plan)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"chat_template": "x" * 65537}, "bad_section"),
        ({"chat_template": "\ud800"}, "bad_section"),
        ({"metadata": {**METADATA, "name": "\ud800"}}, "bad_metadata"),
        ({"metadata": {**METADATA, "hyper": {"x": float("nan")}}}, "bad_metadata"),
        ({"metadata": {**METADATA, "hyper": {"x": object()}}}, "bad_metadata"),
        ({"metadata": {**METADATA, "weights": "mine"}}, "bad_metadata"),
        ({"metadata": {**METADATA, "extra": "x" * (1 << 20)}}, "bad_section"),
    ],
)
def test_bad_texts_are_refused(tmp_path: Path, change: dict[str, object], code: str) -> None:
    with pytest.raises(CeciliaError, match=code) as caught:
        writer(tmp_path / "m.l3r", **change)
    assert str(tmp_path) in caught.value.message
    assert list(tmp_path.iterdir()) == []
