# SPDX-License-Identifier: Apache-2.0
"""A GGUF file as a source of typed metadata and of tensor rows, streamed.

Reading the container is the `gguf` package's work, done only after `gguf_check` has passed the header.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cecilia.errors import ModelFileError, UsageError

from .checkpoint import SourceTensor, shown
from .gguf_check import check_gguf


class GgufSource:
    """Metadata by key with its type checked, tensors by name."""

    def __init__(self, path: Path) -> None:
        """Open `path`; raises ModelFileError for anything but a sound GGUF file."""
        try:
            import gguf
        except ImportError:
            raise UsageError(
                "missing_dependency", "reading GGUF needs the extra 'convert': pip install 'cecilia[convert]'"
            ) from None
        self.path = path
        sizes = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
        try:
            check_gguf(path, sizes)
            reader = gguf.GGUFReader(path)
        except OSError as error:
            raise ModelFileError("file_unreadable", error.strerror or str(error)) from None
        # Plain values, taken at once: the reader keeps an array object for every element of every list.
        self._values = {key: field.contents() for key, field in reader.fields.items()}
        self.tensors: dict[str, SourceTensor] = {}
        for tensor in reader.tensors:
            self.tensors[tensor.name] = SourceTensor(
                name=tensor.name,
                type_name=tensor.tensor_type.name,
                shape=tuple(int(dim) for dim in reversed(tensor.shape)),  # GGUF: the fastest axis first
                path=path,
                offset=int(tensor.data_offset),
                nbytes=int(tensor.n_bytes),
            )

    def metadata_keys(self) -> list[str]:
        """Every metadata key of the file, in file order."""
        return [key for key in self._values if not key.startswith("GGUF.")]

    def value(self, key: str) -> Any:
        """The value of `key` as a Python object, None when the key is absent."""
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer at least 0; raises ModelFileError when absent without a default, or of another type."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelFileError(
                "invalid_metadata", f"{key} is {shown(value)}; it must be one non-negative integer"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; float32 values come back as the shortest decimal that means them."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise ModelFileError("invalid_metadata", f"{key} is {shown(value)}; it must be one finite number")
        single = np.float32(value)
        return float(str(single)) if float(single) == value else float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise ModelFileError("invalid_metadata", f"{key} is {shown(value)}; it must be true or false")
        return value

    def text(self, key: str) -> str | None:
        """A string, None when the key is absent."""
        value = self.value(key)
        if value is not None and not isinstance(value, str):
            raise ModelFileError("invalid_metadata", f"{key} is {shown(value)}; it must be a string")
        return value

    def array(self, key: str, kind: type) -> list[Any]:
        """A list whose elements are all of `kind`; raises ModelFileError when absent."""
        value = self._required(key, None)
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise ModelFileError("invalid_metadata", f"{key} must be a list of {kind.__name__}")
        return value

    def _required(self, key: str, default: Any) -> Any:
        value = self.value(key)
        if value is None:
            value = default
        if value is None:
            raise ModelFileError("invalid_metadata", f"the file has no {key}")
        return value


def positive(source: GgufSource, key: str, default: int | None = None) -> int:
    """An integer from 1 to 2**31 - 1; raises ModelFileError."""
    value = source.integer(key, default)
    if not 1 <= value < 1 << 31:
        raise ModelFileError("invalid_metadata", f"{key} is {value}; it must be 1 to 2147483647")
    return value


def vocabulary_rows(source: GgufSource, name: str, width: int) -> int:
    """The rows of the embedding; the count of the architecture `name` is optional and must agree."""
    embedding = source.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError("missing_tensor", f"the file has no matrix token_embd.weight of {width} columns")
    rows = embedding.shape[0]
    claimed = source.integer(f"{name}.vocab_size", rows)
    if claimed != rows:
        raise ModelFileError(
            "wrong_shape", f"token_embd.weight has {rows} rows, {name}.vocab_size is {claimed}"
        )
    return rows
