# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face directory as a source: its JSON files, and its tensors in one or several safetensors files.

The `safetensors` package opens each file and thereby checks its header, bounds and overlaps; the rows are
then read from the places the header names, since the package has no numpy type for bfloat16.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Set
from pathlib import Path
from typing import Any

from cecilia.errors import ModelFileError, UsageError
from cecilia.formats.l3r_layout import naming

from .checkpoint import SourceTensor, shown

MAX_JSON_BYTES = 64 << 20
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PREFIX_BYTES = 8  # the length of the header, u64


class HuggingFaceSource:
    """JSON files and tensors, by name. Raises ModelFileError for what is no sound checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: list[Path] = []
        config = self.json("config.json")
        if config is None:
            raise ModelFileError("unsupported_container", "a directory without config.json")
        self.config = config
        self.tensors: dict[str, SourceTensor] = {}
        for name, wanted in self._shards().items():
            self._open(name, wanted)

    def json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file of the directory, None when there is no such file."""
        text = self.text(name)
        if text is None:
            return None
        with naming(self.path / name):
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ModelFileError("damaged_model", f"not JSON: {' '.join(str(error).split())}") from None
            if not isinstance(value, dict):
                raise ModelFileError("damaged_model", "not a JSON object")
            return value

    def text(self, name: str) -> str | None:
        """The content of a text file of the directory, None when there is no such file."""
        path = self.path / name
        if not path.is_file():
            return None
        with naming(path):
            try:
                if path.stat().st_size > MAX_JSON_BYTES:
                    raise ModelFileError("damaged_model", f"larger than {MAX_JSON_BYTES} bytes")
                text = path.read_bytes().decode("utf-8")
            except OSError as error:
                raise ModelFileError("file_unreadable", error.strerror or str(error)) from None
            except UnicodeDecodeError:
                raise ModelFileError("damaged_model", "not UTF-8") from None
        if path not in self.files:
            self.files.append(path)
        return text

    def tensor(self, name: str) -> SourceTensor:
        """A tensor; raises ModelFileError `missing_tensor`."""
        if name not in self.tensors:
            raise ModelFileError("missing_tensor", f"no safetensors file has the tensor {name}")
        return self.tensors[name]

    def check_no_others(self, known: Set[str], arch: str) -> None:
        """Raise ModelFileError `unsupported_model` if there are tensors besides those `known`."""
        extra = sorted(self.tensors.keys() - known)
        if extra:
            raise ModelFileError(
                "unsupported_model",
                f"the tensor {extra[0]!r} (one of {len(extra)} too many) has no place in the architecture "
                f"{arch}",
            )

    def _shards(self) -> dict[str, set[str] | None]:
        """The tensors the index promises of each safetensors file; None: no index, all it has."""
        index = self.json(_INDEX)
        if index is None:
            if not (self.path / _SINGLE).is_file():
                raise ModelFileError("missing_tensor", f"neither {_SINGLE} nor {_INDEX}")
            return {_SINGLE: None}
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFileError("damaged_model", f"{_INDEX}: no weight_map")
        shards: dict[str, set[str] | None] = {}
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise ModelFileError("damaged_model", f"{_INDEX}: the shard {shown(name)}")
            members = shards.setdefault(name, set())
            if members is not None:
                members.add(tensor)
        return shards

    def _open(self, name: str, wanted: set[str] | None) -> None:
        """Add the tensors of one safetensors file."""
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise UsageError(
                "missing_dependency",
                "reading safetensors needs the extra 'convert': pip install 'cecilia[convert]'",
            ) from None
        path = self.path / name
        with naming(path):
            try:
                with safe_open(path, framework="np") as checked:
                    found = set(checked.keys())
                header, start = _header(path)
            except OSError as error:
                raise ModelFileError("file_unreadable", error.strerror or str(error)) from None
            except SafetensorError as error:
                raise ModelFileError("damaged_model", f"no sound safetensors file: {error}") from None
            if wanted is not None and wanted != found:
                name = min(wanted ^ found)
                raise ModelFileError("damaged_model", f"the index and the file differ in the tensor {name!r}")
            for tensor in found:
                self.tensors[tensor] = _tensor(tensor, header[tensor], path, start)
        self.files.append(path)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file that was checked, and where its data begins."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(_PREFIX_BYTES))
        return json.loads(file.read(length)), _PREFIX_BYTES + length


def _tensor(name: str, entry: dict[str, Any], path: Path, start: int) -> SourceTensor:
    first, end = entry["data_offsets"]
    return SourceTensor(name, entry["dtype"], tuple(entry["shape"]), path, start + first, end - first)
