# SPDX-License-Identifier: Apache-2.0
"""Whose work is in a bundle: licence texts, where the sources are, and the same as a CycloneDX 1.6 SBOM."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cecilia.errors import CeciliaError
from portable.collect import copy_file, files
from portable.debian import Package
from portable.target import Target
from portable.wheels import Wheel

# SPDX expressions of the packages by source; a package that is not here stops the build until somebody has
# read its copyright file.
_GCC = "GPL-3.0-or-later WITH GCC-exception-3.1"
_OF_SOURCE = {
    "python3.11": "PSF-2.0",
    "glibc": "LGPL-2.1-or-later",
    "gcc-12": _GCC,
    "zlib": "Zlib",
    "expat": "MIT",
    "libffi": "MIT",
    "openssl": "Apache-2.0",
}
_NO_CODE = ("base-files", "gcc-12-base")  # packages of which only licence texts are taken
# Libraries that a wheel brings in its own `.libs` folder.
_OF_VENDORED = {
    "libscipy_openblas64_": "BSD-3-Clause",
    "libgfortran": _GCC,
    "libquadmath": "LGPL-2.1-or-later",
}
# Names that older metadata gives instead of an SPDX expression.
_SPDX = {
    "MIT License": "MIT",
    "BSD License": "BSD-3-Clause",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
}
_IS_SPDX = re.compile(r"[A-Za-z0-9.+()-]+(?: (?:AND|OR|WITH) [A-Za-z0-9.+()-]+)*")
_LICENCE_FILE = re.compile(r"\.dist-info/(?:licenses/|sboms/|LICEN[SC]E|COPYING|NOTICE|AUTHORS)")
COMMON = "usr/share/common-licenses"

_HEAD = """\
# What is inside, under which licence, and where its source is

Cecilia itself is under the Apache License 2.0 (LICENSE). Every licence text lies in a folder beside this
page, those that several refer to in `common/`. The libraries under the LGPL are shared files in `lib/`: put a
build of your own there and it is used. Nothing was changed after it was built, but that symbol tables were
stripped and Python sources compiled.

| part | version | licence | source |
|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Component:
    """One piece of others' work."""

    name: str
    version: str
    licence: str  # an SPDX expression where the metadata allows to say so
    purl: str
    source: str
    sha256: str | None = None


def components(
    debs: Iterable[Package], wheels: Iterable[Wheel], site: Path, distribution: str
) -> list[Component]:
    """Everything inside, sorted by name. `site` holds the bundle's wheels; `distribution` is debian-12, say.

    CeciliaError `licence_unknown` names a package whose licence nobody wrote down.
    """
    found = [_of_deb(deb, distribution) for deb in debs if deb.name not in _NO_CODE]
    for wheel in wheels:
        found.append(_of_wheel(wheel))
        found += _vendored(wheel, site)
    return sorted(found, key=lambda component: component.name.lower())


def _known(table: dict[str, str], name: str) -> str:
    if name not in table:
        raise CeciliaError("licence_unknown", f"no licence is written down for {name} (portable/licences.py)")
    return table[name]


def _of_deb(deb: Package, distribution: str) -> Component:
    vendor = distribution.partition("-")[0]
    source = f"{deb.source}={deb.source_version}"
    return Component(
        name=deb.name,
        version=deb.version,
        licence=_known(_OF_SOURCE, deb.source),
        purl=f"pkg:deb/{vendor}/{_quoted(deb.name)}@{_quoted(deb.version)}?arch={deb.architecture}&distro={distribution}",
        source=f"{vendor.capitalize()} source package: `apt-get source {source}`",
        sha256=deb.sha256,
    )


def _of_wheel(wheel: Wheel) -> Component:
    has_source = wheel.licence != "not stated"
    sources = f"`pip download --no-deps --no-binary=:all: {wheel.name}=={wheel.version}`"
    return Component(
        name=wheel.name,
        version=wheel.version,
        licence=_SPDX.get(wheel.licence, wheel.licence),
        purl=f"pkg:pypi/{wheel.name.lower().replace('_', '-')}@{wheel.version}",
        source=sources if has_source else "none published",
        sha256=wheel.sha256,
    )


def _vendored(wheel: Wheel, site: Path) -> Iterable[Component]:
    for path in sorted((site / f"{wheel.name}.libs").glob("lib*.so*")):
        name, _, rest = path.name.partition("-")
        version = rest.partition(".so.")[2] or rest.partition(".so")[0].strip("-")
        owner = f"{wheel.name.lower()}@{wheel.version}"
        yield Component(
            name=name,
            version=version,
            licence=_known(_OF_VENDORED, name),
            purl=f"pkg:pypi/{owner}#{wheel.name}.libs/{path.name}",
            source=f"in the wheel of {wheel.name} {wheel.version}, whose licence file names it",
        )


def _quoted(text: str) -> str:
    return text.replace("+", "%2B").replace(":", "%3A").replace("~", "%7E")


def write_texts(
    folder: Path, root: Path, site: Path, debs: Sequence[Package], found: Sequence[Component]
) -> None:
    """Fill `folder` with the licence texts of packages (unpacked in `root`) and wheels (in `site`)."""
    for deb in debs:
        text = root / f"usr/share/doc/{deb.name}/copyright"
        if not text.is_file():
            raise CeciliaError("licence_unknown", f"the package {deb.name} brings no copyright file")
        copy_file(text, folder / deb.name / "copyright")
    for path in files(site):
        if _LICENCE_FILE.search(str(path)):
            owner = path.parts[0].removesuffix(".dist-info")
            # numpy brings several files of one name, each in the folder of what it is about.
            inner = path.parts[2:] if path.parts[1] == "licenses" else path.parts[1:]
            copy_file(site / path, folder / owner / Path(*inner))
    for text in sorted((root / COMMON).iterdir()):
        copy_file(text, folder / "common" / text.name)
    rows = (f"| {part.name} | {part.version} | {part.licence} | {part.source} |" for part in found)
    (folder / "SOURCES.md").write_text(_HEAD + "\n".join(rows) + "\n", encoding="utf-8")


def write_sbom(path: Path, found: Sequence[Component], version: str, target: Target, epoch: int) -> None:
    """Write the SBOM; its serial number follows from its content, so the same bundle has the same one."""
    own = f"pkg:generic/cecilia@{version}?arch={target.name}"
    parts = [_entry(part) for part in found]
    content = json.dumps(parts, sort_keys=True) + own
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": "cecilia",
                "version": version,
                "purl": own,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            },
        },
        "components": parts,
        "dependencies": [{"ref": own, "dependsOn": [part.purl for part in found]}],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _entry(part: Component) -> dict[str, Any]:
    stated = _IS_SPDX.fullmatch(part.licence) is not None
    licence = {"expression": part.licence} if stated else {"license": {"name": part.licence}}
    entry = {
        "type": "library",
        "bom-ref": part.purl,
        "name": part.name,
        "version": part.version,
        "purl": part.purl,
        "licenses": [licence],
    }
    return entry | ({"hashes": [{"alg": "SHA-256", "content": part.sha256}]} if part.sha256 else {})
