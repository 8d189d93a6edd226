# SPDX-License-Identifier: Apache-2.0
"""From a model file to something that runs: whatever is wrong with the file or the wishes is found here."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cecilia._kernels import isa
from cecilia._kernels.threads import set_threads
from cecilia.arch import architecture
from cecilia.arch.base import Architecture, Hints, Model, Spec, check_tensors
from cecilia.arch.published import model_id
from cecilia.engine import cpus, memory
from cecilia.engine.generate import Engine
from cecilia.engine.recipes import DEFAULT_PROFILE, recipe, require_recipe
from cecilia.engine.runner import Runner
from cecilia.engine.window import choose_window, window_bytes
from cecilia.errors import MemoryLimitError, ModelFileError, UsageError
from cecilia.formats.l3r import ModelFile, open_model
from cecilia.formats.l3r_layout import naming
from cecilia.formats.residency import MODES, HugePages, Progress, choose, tensor_bytes, touch
from cecilia.layers.weights import Weights
from cecilia.state.pages import PagePool
from cecilia.text.chat import ChatTemplate
from cecilia.text.tokenizer import Tokenizer

# Prompt tokens per forward pass: enough to reuse the weights, few enough to notice a cancel.
DEFAULT_CHUNK = 512
# More weights than this move to huge pages while the engine is idle: the first answer must not wait for them.
MOVED_AT_ONCE = 512 << 20  # bytes
LARGEST_DEFAULT_CACHE = 1 << 30  # bytes


def load(
    path: str | os.PathLike[str],
    *,
    profile: str = DEFAULT_PROFILE,
    context: int | None = None,
    threads: int | None = None,
    weights: str = "auto",
    progress: Progress | None = None,
    verify: bool = False,
    force_context: bool = False,
    cache_bytes: int | None = None,
) -> Engine:
    """Load a model for chat; to be called on the thread that will compute.

    `context`: tokens in the window; by default the model's own, at most 8192. Beyond the model's own, RoPE is
    stretched where its makers say how. `threads`: by default one for each fast core; the calling thread is
    then confined to those. `weights`: "mmap", "hugepage" or "auto", see cecilia.formats.residency.
    `force_context`: take a window although its cache does not fit now; requests are still refused one by one.
    `cache_bytes`: what sequences at rest may take beyond a full window; by default half of what weights and
    window leave free, up to 1 GiB.
    `verify`: compare all data with its digests first. `progress` is told the fraction that is in memory.
    Raises ModelFileError, MemoryLimitError `insufficient_memory`, DeviceError `huge_pages_unavailable` and
    `affinity_refused`, UsageError `unknown_profile`, `unsupported_profile`, `unknown_weights_mode`,
    `invalid_context`, `context_too_large` and `invalid_threads`.
    """
    with ExitStack() as on_error:
        file = on_error.enter_context(open_model(path, verify=verify))
        runner = _runner(
            file,
            profile,
            context,
            threads,
            weights,
            progress or _silent,
            force_context=force_context,
            cache=cache_bytes,
        )
        with naming(file.path):
            hints = architecture(file.metadata["architecture"]).HINTS
            tokenizer, template = _text(file, runner.vocab, hints)
        engine = Engine(runner, tokenizer, template, hints, _info(file, runner, profile))
        on_error.pop_all()
    return engine


def load_runner(
    path: str | os.PathLike[str],
    *,
    profile: str = DEFAULT_PROFILE,
    context: int | None = None,
    threads: int | None = None,
    weights: str = "auto",
    force_context: bool = False,
    cache_bytes: int | None = None,
) -> Runner:
    """Load a model for token ids only; the file needs no tokenizer. Arguments and errors as for `load`."""
    with ExitStack() as on_error:
        file = on_error.enter_context(open_model(path))
        runner = _runner(
            file,
            profile,
            context,
            threads,
            weights,
            _silent,
            force_context=force_context,
            cache=cache_bytes,
        )
        on_error.pop_all()
    return runner


def _runner(
    file: ModelFile,
    profile: str,
    context: int | None,
    threads: int | None,
    weights: str,
    report: Progress,
    *,
    force_context: bool,
    cache: int | None = None,
) -> Runner:
    usable = cpus.usable_cpus()
    threads = cpus.default_threads(usable, cpus.cpu_quota()) if threads is None else threads
    set_threads(threads, yields=True)
    cpus.confine(threads, usable)
    arch, spec = _checked(file)
    kv = recipe(arch, file.metadata["architecture"], profile)
    window, spec = choose_window(arch, spec, context)
    require_recipe(window, profile, arch)
    page_bytes = arch.page_bytes(spec, kv)
    limit = window_bytes(page_bytes, window)
    state_bytes = arch.state_bytes(spec)
    needs = {"weights": tensor_bytes(file.tensors)}
    if state_bytes:
        needs["recurrent state"] = state_bytes
    if not force_context:
        needs[f"KV cache of {window} tokens"] = limit
    memory.require(needs)
    huge = _place_weights(file, arch.looked_up(spec), weights, report)
    model = _bind(arch, spec, file, kv, min(DEFAULT_CHUNK, window))
    beside = _default_cache(sum(needs.values())) if cache is None else cache
    pool = PagePool(page_bytes, limit + beside)
    return Runner(
        file,
        model,
        pool,
        vocab=spec.vocab,
        context=window,
        threads=threads,
        state_bytes=state_bytes,
        rope=arch.rope_mode(spec),
        huge=huge,
    )


def _default_cache(needed: int) -> int:
    """Bytes for sequences at rest, beside the `needed` ones of weights and a full window."""
    return max(0, min(LARGEST_DEFAULT_CACHE, (memory.available() - memory.RESERVE - needed) // 2))


def _place_weights(
    file: ModelFile, looked_up: frozenset[str], mode: str, report: Progress
) -> HugePages | None:
    """Read the weights into the page cache if they stay there; few move to huge pages now, many later."""
    if mode not in MODES:
        raise UsageError("unknown_weights_mode", f"weights mode {mode!r} is not one of: {' '.join(MODES)}")
    nbytes = tensor_bytes(file.tensors)
    if choose(mode, nbytes, memory.available()) == "mmap":
        touch(file, report)
        return None
    huge = HugePages(file, looked_up)
    if nbytes <= MOVED_AT_ONCE:
        huge.finish(report)
    report(1.0)
    return huge


def _checked(file: ModelFile) -> tuple[Architecture[Any], Spec]:
    """The file's architecture and spec, after every tensor was compared with what they call for."""
    with naming(file.path):
        arch = architecture(file.metadata["architecture"])
        spec = arch.spec_from(file.metadata["hyper"])
        check_tensors(arch.tensors(spec), file.tensors)
    return arch, spec


def _bind(arch: Architecture[Any], spec: Spec, file: ModelFile, kv: str, chunk: int) -> Model:
    try:
        return arch.bind(spec, Weights(file), kv=kv, chunk=chunk)
    except MemoryError as error:
        raise MemoryLimitError(
            "insufficient_memory", f"no memory for work buffers of {chunk} tokens: {error}"
        ) from error
    except ValueError as error:  # a kernel's, of a width it is not made for or formats it cannot mix
        raise ModelFileError("unsupported_model", f"{file.path}: {error}") from error


def _text(file: ModelFile, vocab: int, hints: Hints) -> tuple[Tokenizer, ChatTemplate]:
    """What chatting needs besides the model; a file without it is for tools only."""
    if file.tokenizer is None:
        raise ModelFileError("no_tokenizer", "no tokenizer inside, so it cannot chat")
    if file.chat_template is None:
        raise ModelFileError("no_chat_template", "no chat template inside, so it cannot chat")
    text = file.metadata["text"]
    tokenizer = Tokenizer(
        file.tokenizer,
        bos_id=text["bos_id"],
        add_bos=text["add_bos"],
        eos_ids=text["eos_ids"],
        spelt=hints.think or (),
    )
    if tokenizer.vocab_size > vocab:
        raise ModelFileError(
            "bad_tokenizer", f"the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab}"
        )
    return tokenizer, ChatTemplate(file.chat_template, special_tokens=tokenizer.special_tokens())


def _info(file: ModelFile, runner: Runner, profile: str) -> dict[str, Any]:
    """What the server tells about the model. `quantisation` is the format most of the bytes are in."""
    sizes: dict[str, int] = {}
    for entry in file.tensors.values():
        sizes[entry.format] = sizes.get(entry.format, 0) + entry.nbytes
    return {
        "id": model_id(file.metadata) or Path(file.path).stem,
        "architecture": file.metadata["architecture"],
        "weights": file.metadata["weights"],
        "context": runner.context,
        "profile": profile,
        "rope": runner.rope,
        "threads": runner.threads,
        "weights_in": runner.weights_in,
        "isa": isa.name(),
        "digest": file.digest,
        "quantisation": max(sizes, key=lambda name: sizes[name]),
    }


def _silent(fraction: float) -> None:
    """Progress nobody asked for."""
