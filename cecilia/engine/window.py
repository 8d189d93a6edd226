# SPDX-License-Identifier: Apache-2.0
"""How many tokens a session may hold, and what a cache of so many takes with each recipe."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from cecilia.arch import architecture
from cecilia.arch.base import Architecture, Spec
from cecilia.engine import memory
from cecilia.engine.recipes import DEFAULT_PROFILE, longest, profiles_of
from cecilia.errors import UsageError
from cecilia.formats.l3r import open_model
from cecilia.formats.l3r_layout import naming
from cecilia.formats.residency import tensor_bytes
from cecilia.state.pages import POSITIONS

DEFAULT_CONTEXT = 8192

S = TypeVar("S", bound=Spec)


def choose_window(arch: Architecture[S], spec: S, wanted: int | None) -> tuple[int, S]:
    """The window as wanted, or the model's own up to DEFAULT_CONTEXT; and the spec for it.

    Raises UsageError `invalid_context` and `context_too_large`.
    """
    if wanted is None:
        return min(spec.context, DEFAULT_CONTEXT), spec
    if wanted < 1:
        raise UsageError("invalid_context", f"a context of {wanted} tokens")
    limit = arch.longest_window(spec)
    if wanted > limit:
        raise UsageError("context_too_large", f"a context of {wanted} tokens; this model's limit is {limit}")
    return wanted, arch.for_window(spec, wanted)


def window_bytes(page_bytes: int, window: int) -> int:
    """Bytes of the pages of a full window."""
    return page_bytes * -(-window // POSITIONS)


def cache_costs(path: str | os.PathLike[str], context: int | None) -> dict[str, Any]:
    """What each recipe would take for the window `context` of the model file `path`, which is not loaded.

    `rope`: how RoPE is stretched for it. `recipes`: bytes per token and of the full window, the longest
    window, and whether this one can be had now beside the weights. `recommended`: the recipe whose window
    takes least of those that can be had, or None; `saves_bytes`: how much less than with the default recipe.
    Raises ModelFileError, UsageError.
    """
    with open_model(path) as file, naming(file.path):
        arch = architecture(file.metadata["architecture"])
        spec = arch.spec_from(file.metadata["hyper"])
        weights = tensor_bytes(file.tensors)
        beside = weights + arch.state_bytes(spec)
    window, spec = choose_window(arch, spec, context)
    recipes: dict[str, dict[str, Any]] = {}
    for profile, kv in profiles_of(arch).items():
        page = arch.page_bytes(spec, kv)
        total = window_bytes(page, window)
        most = min(longest(profile), arch.longest_window(spec))
        recipes[profile] = {
            "bytes_per_token": page // POSITIONS,
            "window_bytes": total,
            "longest_window": most,
            "fits": window <= most and memory.fits(beside + total),
        }
    possible = [name for name, recipe in recipes.items() if recipe["fits"]]
    best = min(possible, key=lambda name: int(recipes[name]["window_bytes"]), default=None)
    saves = recipes[DEFAULT_PROFILE]["window_bytes"] - recipes[best]["window_bytes"] if best else 0
    return {
        "window": window,
        "rope": arch.rope_mode(spec),
        "weights_bytes": weights,
        "recipes": recipes,
        "recommended": best,
        "saves_bytes": saves,
    }
