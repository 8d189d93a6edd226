# SPDX-License-Identifier: Apache-2.0
"""The config.json of a Hugging Face checkpoint: which architecture, and checked values by key.

Every key is either read, or must have a value that means what is computed here, or is known not to matter
when a sequence is evaluated. Any other key is refused by name: it may change what the model means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from cecilia.errors import ModelFileError

from .checkpoint import shown

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "BailingMoeV3ForCausalLM": "ling3",
}
# Training, serialisation, other libraries, and text settings that are read elsewhere.
IGNORED = {
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "max_window_layers",  # matters only with sliding windows
    "model_type",  # one value stands for several networks; `architectures` tells them apart
    "name_or_path",
    "pad_token_id",
    "tokenizer_class",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
}
# The keys that describe quantised weights.
_QUANTISED = ("quantization_config", "compression_config", "quantization")
# quant_method -> what is published under it
_RELEASES = {
    "fp8": " (an FP8 release)",
    "compressed-tensors": " (a compressed-tensors release, such as INT4)",
}


@dataclass(frozen=True)
class Envelope:
    """The keys of a family: those that are read, those of which some values are right, those ignored.

    Of a key in `fixed` the absence counts as None.
    """

    read: Set[str]
    fixed: Mapping[str, tuple[Any, ...]]
    ignored: Set[str]

    def check(self, config: dict[str, Any]) -> None:
        """Raise ModelFileError for the first key that is unknown or has a value outside `fixed`."""
        check_released_as_float(config)
        known_keys = self.read | self.fixed.keys() | self.ignored | IGNORED | set(_QUANTISED)
        for key in config:
            if key not in known_keys and not key.startswith("_"):
                raise ModelFileError("unsupported_model", f"config.json has the unknown key {shown(key)}")
        for key, known in self.fixed.items():
            value = config.get(key)
            if not any(value is one or value == one for one in known):
                raise ModelFileError("unsupported_model", f"{key} {shown(value)} is not supported")


def architecture(config: dict[str, Any]) -> str:
    """Our name of the one class in `architectures`; raises ModelFileError for another."""
    found = config.get("architectures")
    if not isinstance(found, list) or len(found) != 1 or found[0] not in ARCHITECTURES:
        hint = ""
        if config.get("model_type") == "bailing_hybrid":
            hint = " (Ling-2.6 has the model_type of Ling-3.0, but is another network)"
        raise ModelFileError(
            "unsupported_architecture",
            f"config.json names the architectures {shown(found)}{hint}; supported: {' '.join(ARCHITECTURES)}",
        )
    return ARCHITECTURES[found[0]]


def check_released_as_float(config: dict[str, Any]) -> None:
    """Raise ModelFileError for a checkpoint whose weights are stored quantised."""
    for key in _QUANTISED:
        value = config.get(key)
        if value is None:
            continue
        method = value.get("quant_method") if isinstance(value, dict) else None
        release = _RELEASES.get(method, "") if isinstance(method, str) else ""
        raise ModelFileError(
            "unsupported_quantisation",
            f"{key} {shown(value)} is not supported{release}; convert the checkpoint of float weights",
        )


def positive(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of at least 1."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
        raise invalid(key, value, "a whole number from 1 to 2147483647")
    return value


def number(key: str, value: Any) -> float:
    """`value`, of `key`, as a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise invalid(key, value, "a finite number above 0")
    return float(value)


def rope_settings(config: dict[str, Any]) -> tuple[float | None, dict[str, Any]]:
    """The base, from rope_theta or from the newer rope_parameters, and the scaling, {} when there is none.

    Raises ModelFileError when the places where both may stand contradict each other.
    """
    bases, scalings = {}, []
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise invalid(key, value, "an object or null")
        if "rope_theta" in value:
            bases[key] = number(f"{key}.rope_theta", value["rope_theta"])
        kind = value.get("rope_type", value.get("type", "default"))
        scaling = {
            name: one for name, one in value.items() if name not in ("rope_type", "type", "rope_theta")
        }
        if kind != "default" or scaling:
            scalings.append({"rope_type": kind, **scaling})
    if config.get("rope_theta") is not None:
        bases["rope_theta"] = number("rope_theta", config["rope_theta"])
    if len(set(bases.values())) > 1:
        raise ModelFileError("invalid_metadata", f"config.json contradicts itself about rope_theta: {bases}")
    if len(scalings) > 1 and scalings[0] != scalings[1]:
        raise ModelFileError("invalid_metadata", f"config.json contradicts itself about RoPE: {scalings}")
    return next(iter(bases.values()), None), scalings[0] if scalings else {}


def invalid(key: str, value: Any, wanted: str) -> ModelFileError:
    """The error for a key of config.json, to be raised by the caller."""
    return ModelFileError("invalid_metadata", f"config.json: {key} is {shown(value)}; it must be {wanted}")
