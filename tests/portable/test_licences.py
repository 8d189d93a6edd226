# SPDX-License-Identifier: Apache-2.0
"""Sources, licences and the SBOM of what is inside."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cecilia.errors import CeciliaError
from portable import licences, wheels
from portable.debian import Package
from portable.target import TARGETS
from portable.wheels import Wheel

LIBC = Package("libc6", "2.36-9+deb12u14", "arm64", "glibc", "2.36-9+deb12u14", "1" * 64)
GOMP = Package("libgomp1", "12.2.0-14", "arm64", "gcc-12", "12.2.0-14", "2" * 64)
TEXTS = Package("base-files", "12.4", "arm64", "base-files", "12.4", "3" * 64)
NUMPY = Wheel("numpy", "2.4.6", "BSD-3-Clause AND Zlib", "4" * 64, Path("numpy.whl"))
VENDOR = Wheel("rknn-toolkit-lite2", "2.5.0", "not stated", "5" * 64, Path("rknn.whl"))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    for name in (
        "numpy.libs/libgfortran-daac5196-038a5e3c.so.5.0.0",
        "numpy-2.4.6.dist-info/licenses/LICENSE.txt",
        "numpy-2.4.6.dist-info/licenses/numpy/ma/LICENSE",
        "numpy-2.4.6.dist-info/licenses/numpy/fft/LICENSE",
        "numpy-2.4.6.dist-info/RECORD",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x", encoding="utf-8")
    return folder


def test_what_is_inside_is_named_with_its_source(site: Path) -> None:
    found = licences.components([GOMP, LIBC, TEXTS], [NUMPY, VENDOR], site, "debian-12")
    assert [part.name for part in found] == [
        "libc6",
        "libgfortran",
        "libgomp1",
        "numpy",
        "rknn-toolkit-lite2",
    ]
    libc, gfortran, gomp, numpy, vendor = found
    assert libc.purl == "pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?arch=arm64&distro=debian-12"
    assert libc.licence == "LGPL-2.1-or-later"
    assert "apt-get source glibc=2.36-9+deb12u14" in libc.source
    assert gomp.licence == gfortran.licence == "GPL-3.0-or-later WITH GCC-exception-3.1"
    assert gfortran.version == "5.0.0"
    assert numpy.purl == "pkg:pypi/numpy@2.4.6"
    assert "numpy==2.4.6" in numpy.source
    assert vendor.source == "none published"


def test_a_package_whose_licence_nobody_wrote_down_stops_the_build(site: Path) -> None:
    odd = replace(LIBC, name="libodd1", source="odd")
    with pytest.raises(CeciliaError, match=r"licence_unknown|no licence is written down for odd"):
        licences.components([odd], [], site, "debian-12")


def sbom(path: Path, site: Path, epoch: int = 0) -> dict[str, Any]:
    found = licences.components([LIBC], [NUMPY, VENDOR], site, "debian-12")
    licences.write_sbom(path, found, "9.9.9", TARGETS["aarch64"], epoch)
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_sbom_is_cyclonedx(tmp_path: Path, site: Path) -> None:
    document = sbom(tmp_path / "a.json", site)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    # The pattern of the published schema.
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", document["serialNumber"])
    assert document["metadata"]["timestamp"] == "1970-01-01T00:00:00Z"
    by_name = {part["name"]: part for part in document["components"]}
    assert by_name["libc6"]["licenses"] == [{"expression": "LGPL-2.1-or-later"}]
    assert by_name["libc6"]["hashes"] == [{"alg": "SHA-256", "content": "1" * 64}]
    assert by_name["rknn-toolkit-lite2"]["licenses"] == [{"license": {"name": "not stated"}}]
    (dependency,) = document["dependencies"]
    assert dependency["ref"] == document["metadata"]["component"]["bom-ref"]
    assert dependency["dependsOn"] == [part["bom-ref"] for part in document["components"]]


def test_the_sbom_is_the_same_each_time(tmp_path: Path, site: Path) -> None:
    sbom(tmp_path / "a.json", site, 5)
    sbom(tmp_path / "b.json", site, 5)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_licence_texts_of_packages_and_wheels(tmp_path: Path, site: Path) -> None:
    root = tmp_path / "root"
    for name in (f"{licences.COMMON}/LGPL-2.1", "usr/share/doc/libc6/copyright"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name, encoding="utf-8")
    found = licences.components([LIBC], [NUMPY], site, "debian-12")
    out = tmp_path / "licenses"
    licences.write_texts(out, root, site, [LIBC], found)
    assert {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} == {
        "SOURCES.md",
        "common/LGPL-2.1",
        "libc6/copyright",
        "numpy-2.4.6/LICENSE.txt",
        "numpy-2.4.6/numpy/ma/LICENSE",
        "numpy-2.4.6/numpy/fft/LICENSE",
    }
    table = (out / "SOURCES.md").read_text(encoding="utf-8")
    assert "| libc6 | 2.36-9+deb12u14 | LGPL-2.1-or-later |" in table
    with pytest.raises(CeciliaError, match="libgomp1 brings no copyright file"):
        licences.write_texts(out, root, site, [GOMP], found)


@pytest.mark.parametrize("group", ["core", "build", "rknnlite"])
def test_every_wheel_is_pinned_for_every_architecture(group: str) -> None:
    text = (wheels.LOCKS / f"{group}.txt").read_text(encoding="utf-8")
    pinned = {re.sub(r"[-_.]+", "-", name).lower() for name in wheels.locked(group)}
    wanted = {re.sub(r"[-_.]+", "-", re.split(r"[<>=;\[]", line)[0]).lower() for line in wheels.wanted(group)}
    assert pinned == wanted
    assert not pinned & {name.replace("_", "-") for name in wheels.LEFT_OUT}
    for entry in re.split(r"\n(?=\S)", text.split("\n", 1)[1].strip()):
        hashes = re.findall(r"--hash=sha256:[0-9a-f]{64}", entry)
        assert 1 <= len(hashes) <= len(wheels.architectures(group))


def test_pins_satisfy_the_project() -> None:
    from packaging.requirements import Requirement

    pinned = {name.lower(): version for name, version in wheels.locked("core").items()}
    for line in wheels.wanted("core"):
        requirement = Requirement(line)
        assert requirement.specifier.contains(pinned[requirement.name.lower()])
