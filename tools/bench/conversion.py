# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.bench.conversion`: convert Ling-3.0 checkpoints of full width; memory, time, equality.

A checkpoint of the official layout with the published sizes but few layers is written in BF16 shards, with
random weights, and converted in a process of its own. The same weights as an F32 GGUF file are converted too,
and every tensor of the two results is compared. Files are removed as soon as they are not needed; with four
layers some 13 GB are there at once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cecilia.arch import ling3
from cecilia.arch.ling3 import CONV_WIDTH, Ling3Spec
from cecilia.errors import CeciliaError
from cecilia.formats.l3r import open_model
from tools.bench import report
from tools.bench.export_gguf import export_gguf
from tools.shapes import hyper

SHARD_BYTES = 1 << 30
_DRAWN = 1 << 22  # values made at once
MOST_RESIDENT = 2_000_000_000  # bytes: what a conversion may take
HEAD = ["| source | read | written | time | peak RSS |", "|---|---|---|---|---|"]


@dataclass(frozen=True)
class Run:
    """A conversion: bytes, seconds, and the most bytes that were resident."""

    read: int
    written: int
    seconds: float
    resident: int


def official_tensors(spec: Ling3Spec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the official layout."""
    for name, t in ling3.tensors(spec).items():
        if name.endswith("_conv1d.weight"):
            yield name, (t.cols // CONV_WIDTH, 1, CONV_WIDTH)
        elif name.endswith(".k_b_proj.weight"):
            yield name.replace(".k_b_", ".kv_b_"), (spec.heads * (spec.nope_dim + spec.v_dim), spec.kv_rank)
        elif name.endswith(".attention.A"):
            yield f"{name}_log", (t.cols,)
        elif not name.endswith((".k_b_proj_t.weight", ".v_b_proj.weight")):
            yield name, ((t.rows, t.cols) if t.rank == 2 else (t.cols,))


def write_checkpoint(folder: Path, spec: Ling3Spec) -> int:
    """A checkpoint in shards of about SHARD_BYTES; returns its bytes."""
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    room = SHARD_BYTES
    for name, shape in official_tensors(spec):
        nbytes = 2 * int(np.prod(shape))
        if nbytes > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append((name, shape))
        room -= nbytes
    rng, weight_map = np.random.default_rng(0), {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / file, shard, rng)
        weight_map |= {name: file for name, _ in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(_config(spec)))
    return sum(path.stat().st_size for path in folder.iterdir())


def _write_shard(path: Path, shard: list[tuple[str, tuple[int, ...]]], rng: np.random.Generator) -> None:
    header, at = {}, 0
    for name, shape in shard:
        nbytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, shape in shard:
            left = int(np.prod(shape))
            while left:
                values = rng.standard_normal(min(left, _DRAWN), np.float32) * np.float32(0.02)
                file.write((values.view(np.uint32) >> 16).astype("<u2").tobytes())
                left -= values.size


def _config(spec: Ling3Spec) -> dict[str, Any]:
    return {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "vocab_size": spec.vocab,
        "hidden_size": spec.width,
        "intermediate_size": spec.dense_ff,
        "num_hidden_layers": spec.layers,
        "layer_group_size": spec.group,
        "num_attention_heads": spec.heads,
        "head_dim": spec.head_dim,
        "q_lora_rank": spec.q_rank or None,
        "kv_lora_rank": spec.kv_rank,
        "qk_nope_head_dim": spec.nope_dim,
        "qk_rope_head_dim": spec.rope_dim,
        "v_head_dim": spec.v_dim,
        "gated_attention_proj_granularity_type": "head_wise",
        "rope_theta": spec.rope_base,
        "rope_interleave": True,
        "max_position_embeddings": spec.context,
        "num_experts": spec.experts,
        "num_experts_per_tok": spec.experts_used,
        "num_shared_experts": 1,
        "n_group": spec.expert_groups,
        "topk_group": spec.expert_groups_used,
        "moe_intermediate_size": spec.expert_ff,
        "moe_shared_expert_intermediate_size": spec.shared_ff,
        "first_k_dense_replace": spec.dense_layers,
        "routed_scaling_factor": spec.route_scale,
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "short_conv_kernel_size": CONV_WIDTH,
        "no_kda_lora": True,
        "kda_safe_gate": True,
        "kda_lower_bound": spec.gate_lower_bound,
        "expert_swiglu_limit_list": None,
        "share_expert_swiglu_limit_list": None,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": "silu",
    }


def convert_apart(source: Path, out: Path, quant: str) -> Run:
    """Convert in a process of its own. Raises CeciliaError `bench_failed` when that fails."""
    read = sum(path.stat().st_size for path in source.iterdir()) if source.is_dir() else source.stat().st_size
    command = [sys.executable, "-m", "tools.convert", str(source), "--out", str(out), "--quant", quant]
    started = time.monotonic()
    child = subprocess.Popen(
        [*command, "--tokenizer", "none", "--weights", "random"], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise CeciliaError("bench_failed", f"the conversion of {source.name} ended with {child.returncode}")
    return Run(read, out.stat().st_size, time.monotonic() - started, usage.ru_maxrss << 10)


def digests(path: Path) -> dict[str, str]:
    """SHA-256 of every tensor with its format and shape."""
    found = {}
    with open_model(path) as file:
        for t in file.tensors.values():
            digest = hashlib.sha256(f"{t.format} {t.rows} {t.cols}".encode())
            digest.update(np.fromfile(path, np.uint8, t.nbytes, offset=t.offset))
            found[t.name] = digest.hexdigest()
    return found


def measure(folder: Path, layers: int) -> tuple[dict[str, Run], int, list[str]]:
    """The runs by source, how many tensors there are, and the names of those that differ."""
    spec = ling3.spec_from(hyper("ling3", full=True, changes={"layers": layers}))
    checkpoint, first, gguf, second = (folder / name for name in ("hf", "hf.l3r", "x.gguf", "gguf.l3r"))
    checkpoint.mkdir()
    write_checkpoint(checkpoint, spec)
    runs = {"BF16 shards, official layout": convert_apart(checkpoint, first, "f32")}
    shutil.rmtree(checkpoint)
    want = digests(first)
    export_gguf(first, gguf)
    first.unlink()
    runs["F32 GGUF, bailingmoe3"] = convert_apart(gguf, second, "keep")
    gguf.unlink()
    found = digests(second)
    second.unlink()
    different = sorted(name for name in want.keys() | found.keys() if want.get(name) != found.get(name))
    return runs, len(want), different


def lines(runs: dict[str, Run], tensors: int, different: list[str]) -> list[str]:
    """The report."""
    rows = [
        f"| {name} | {run.read / 1e9:.2f} GB | {run.written / 1e9:.2f} GB | {run.seconds:.0f} s | "
        f"{run.resident / 1e9:.2f} GB |"
        for name, run in runs.items()
    ]
    if different:
        outcome = f"{len(different)} of {tensors} tensors differ, the first one is {different[0]}."
    else:
        outcome = f"All {tensors} tensors of the two results are equal, byte for byte."
    return [*HEAD, *rows, "", outcome]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m tools.bench.conversion", description="Conversions.")
    found.add_argument("--layers", type=int, default=4, help="of the model (default: 4)")
    report.add_log_option(found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, append to docs/BENCH.md; 1 when a conversion takes too much or a tensor differs."""
    args = parser().parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            runs, tensors, different = measure(Path(folder), args.layers)
    except CeciliaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    facts = [f"`{report.command('tools.bench.conversion', argv)}`", f"{args.layers} layers of full width"]
    body = lines(runs, tensors, different)
    report.publish(report.section("conversion of Ling-3.0", facts, body), no_log=args.no_log)
    return int(bool(different) or any(run.resident > MOST_RESIDENT for run in runs.values()))


if __name__ == "__main__":
    sys.exit(main())
