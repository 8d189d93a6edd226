# SPDX-License-Identifier: Apache-2.0
"""Cache recipes by the names users give them."""

from __future__ import annotations

from typing import Any

from cecilia.arch.base import Architecture
from cecilia.errors import UsageError

PROFILES = {
    "int8-v1": "int8",
    "bf16-v1": "bf16",
    "f32": "f32",
    "latent-int8-v1": "latent-int8",
    "latent-bf16-v1": "latent-bf16",
    "latent-f32": "latent-f32",
}
"""KV recipe of each profile. The name stands for exact bytes: another arithmetic needs another name."""

DEFAULT_PROFILE = "int8-v1"

LONGEST = 256 << 10  # tokens in the window of any recipe
LONGEST_OF = {"bf16-v1": 64 << 10}  # recipes that end earlier


def profiles_of(arch: Architecture[Any]) -> dict[str, str]:
    """The profiles an architecture has, with their KV recipes."""
    return {profile: kv for profile, kv in PROFILES.items() if kv in arch.RECIPES}


def recipe(arch: Architecture[Any], name: str, profile: str) -> str:
    """The KV recipe of `profile` for the architecture called `name`.

    Raises UsageError `unknown_profile` and `unsupported_profile`.
    """
    if profile not in PROFILES:
        raise UsageError("unknown_profile", f"profile {profile!r} is not one of: {' '.join(PROFILES)}")
    offered = profiles_of(arch)
    if profile not in offered:
        raise UsageError("unsupported_profile", f"{name} has no profile {profile}, but: {' '.join(offered)}")
    return offered[profile]


def longest(profile: str) -> int:
    """The most tokens in a window of recipe `profile`."""
    return LONGEST_OF.get(profile, LONGEST)


def require_recipe(window: int, profile: str, arch: Architecture[Any]) -> None:
    """Refuse a window the recipe is not made for. Raises UsageError `context_too_large`."""
    if window > longest(profile):
        others = " ".join(name for name in profiles_of(arch) if longest(name) >= window) or "none"
        raise UsageError(
            "context_too_large",
            f"a context of {window} tokens; profile {profile} ends at {longest(profile)}, "
            f"profiles for this one: {others}",
        )
