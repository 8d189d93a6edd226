# SPDX-License-Identifier: Apache-2.0
"""Ling-3.0 as GGUF files have it (architecture bailingmoe3): envelope, hyper-parameters, tensors.

What the target has in another form: the experts of a layer are one tensor there, and of the two key matrices
it has the one whose heads are transposed. Turning that back is exact for plain numbers; blocks of quantised
weights break, so the values are quantised again, to 8 bits where the source's types are kept.
"""

from __future__ import annotations

import re
from typing import Any

from cecilia.arch import ling3
from cecilia.arch.base import TensorSpec
from cecilia.arch.ling3 import CONV_WIDTH, Ling3Spec
from cecilia.errors import ModelFileError

from .checkpoint import Mapped, Rows, SourceTensor, check_shape, shown
from .gguf_source import GgufSource, positive, vocabulary_rows
from .views import Decoded, Transposed

GGUF_NAME = "bailingmoe3"

# Names within a layer, ours and theirs.
BOTH = {"input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight"}
KDA = {
    **{f"{name}_proj.weight": f"attn_{name}.weight" for name in ("q", "k", "v")},
    **{f"{name}_conv1d.weight": f"ssm_conv1d_{name}.weight" for name in ("q", "k", "v")},
    "f_proj.weight": "ssm_f_a.weight",
    "g_proj.weight": "ssm_g_a.weight",
    "b_proj.weight": "ssm_beta.weight",
    "A": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "o_norm.weight": "ssm_norm.weight",
    "o_proj.weight": "attn_output.weight",
}
MLA = {
    "q_proj.weight": "attn_q.weight",
    "q_a_proj.weight": "attn_q_a.weight",
    "q_a_layernorm.weight": "attn_q_a_norm.weight",
    "q_b_proj.weight": "attn_q_b.weight",
    "kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "k_b_proj_t.weight": "attn_k_b.weight",
    "v_b_proj.weight": "attn_v_b.weight",
    "g_proj.weight": "attn_gate.weight",
    "dense.weight": "attn_output.weight",
}
ROUTER = {"gate.weight": "ffn_gate_inp.weight", "gate.expert_bias": "exp_probs_b.bias"}
_OUTER = {ling3.EMBED: "token_embd.weight", ling3.NORM: "output_norm.weight", ling3.HEAD: "output.weight"}
_TURNED_BACK = "k_b_proj.weight"  # made of theirs

# Keys with the values the network is built for; the first one is what an absent key means.
_FIXED: dict[str, tuple[Any, ...]] = {
    "expert_gating_func": (2,),  # sigmoid
    "expert_shared_count": (1,),
    "expert_weights_norm": (True,),
    "kda.safe_gate": (True,),
    "ssm.conv_kernel": (CONV_WIDTH,),
}
_OPTIONAL = {"kda.safe_gate"}
_READ = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.key_length_mla",
    "attention.kv_lora_rank",
    "attention.layer_norm_rms_epsilon",
    "attention.q_lora_rank",
    "attention.value_length",
    "attention.value_length_mla",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_feed_forward_length",
    "expert_group_count",
    "expert_group_used_count",
    "expert_shared_feed_forward_length",
    "expert_used_count",
    "expert_weights_scale",
    "feed_forward_length",
    "kda.gate_lower_bound",
    "kda.head_dim",
    "leading_dense_block_count",
    "nextn_predict_layers",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "swiglu_clamp_exp",
    "swiglu_clamp_shexp",
    "vocab_size",
}
_NEXTN = f"{GGUF_NAME}.nextn_predict_layers"
_LAYER = re.compile(r"blk\.(\d+)\.")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_ONE = re.compile(r"mlp\.(shared_experts\.)?(gate|up|down)_proj\.weight")


def hyper(source: GgufSource) -> dict[str, Any]:
    """The hyper-parameters for the metadata; raises ModelFileError for anything outside the envelope."""
    _check_keys(source)

    def count(key: str, default: int | None = None) -> int:
        return positive(source, f"{GGUF_NAME}.{key}", default)

    heads, kv_rank, rope = (
        count(key) for key in ("attention.head_count", "attention.kv_lora_rank", "rope.dimension_count")
    )
    v_dim, key_dim = count("attention.value_length_mla"), count("attention.key_length_mla")
    _check_lengths(source, kv_rank, rope, key_dim, v_dim)
    layers = count("block_count") - source.integer(_NEXTN, 0)
    width, context, expert_ff = (
        count("embedding_length"),
        count("context_length"),
        count("expert_feed_forward_length"),
    )
    factor, native = _yarn(source, context)
    q_rank = f"{GGUF_NAME}.attention.q_lora_rank"
    return {
        "layers": layers,
        "width": width,
        "dense_ff": count("feed_forward_length"),
        "heads": heads,
        "head_dim": count("kda.head_dim"),
        "q_rank": 0 if not source.integer(q_rank, 0) else positive(source, q_rank),
        "kv_rank": kv_rank,
        "nope_dim": key_dim - rope,
        "rope_dim": rope,
        "v_dim": v_dim,
        "vocab": vocabulary_rows(source, GGUF_NAME, width),
        "context": context,
        "norm_eps": source.number(f"{GGUF_NAME}.attention.layer_norm_rms_epsilon"),
        "rope_base": source.number(f"{GGUF_NAME}.rope.freq_base"),
        "group": _group(source, layers),
        "experts": count("expert_count"),
        "experts_used": count("expert_used_count"),
        "expert_groups": count("expert_group_count", 1),
        "expert_groups_used": count("expert_group_used_count", 1),
        "expert_ff": expert_ff,
        "shared_ff": count("expert_shared_feed_forward_length", expert_ff),
        "dense_layers": source.integer(f"{GGUF_NAME}.leading_dense_block_count"),
        "route_scale": source.number(f"{GGUF_NAME}.expert_weights_scale"),
        "gate_lower_bound": source.number(f"{GGUF_NAME}.kda.gate_lower_bound"),
        "yarn_factor": factor,
        "yarn_context": native,
    }


def mapped(source: GgufSource, values: dict[str, Any]) -> list[Mapped]:
    """Every tensor of the target; raises ModelFileError unless the file holds exactly what they need."""
    spec = ling3.spec_from(values)
    if _OUTER[ling3.HEAD] not in source.tensors:
        raise ModelFileError("unsupported_model", "tied embeddings are not supported (no output.weight)")
    wanted = {name: (gguf_name(spec, name), tensor) for name, tensor in ling3.tensors(spec).items()}
    needed = {theirs for theirs, _ in wanted.values()}
    extra = sorted(source.tensors.keys() - needed - set(predicting(source, spec.layers)))
    if extra:
        raise ModelFileError(
            "unsupported_model",
            f"this variant of the architecture is not supported (tensor {extra[0]!r}, one of {len(extra)} "
            "too many)",
        )
    return [_mapped(source, spec, name, theirs, tensor) for name, (theirs, tensor) in wanted.items()]


def notes(source: GgufSource, values: dict[str, Any]) -> list[str]:
    """What of the source the target leaves out."""
    count = len(predicting(source, values["layers"]))
    return [f"{count} tensors that predict further tokens (MTP) are left out"] if count else []


def predicting(source: GgufSource, layers: int) -> list[str]:
    """The tensors of the heads that predict further tokens: the layers after the last, as many as it says."""
    last = layers + source.integer(_NEXTN, 0)
    found = ((name, _LAYER.match(name)) for name in source.tensors)
    return [name for name, layer in found if layer and layers <= int(layer[1]) < last]


def gguf_name(spec: Ling3Spec, name: str) -> str:
    """The tensor of the GGUF file that the tensor `name` of ours is, or is made of, or is a part of."""
    if name in _OUTER:
        return _OUTER[name]
    _, _, layer, inner = name.split(".", 3)
    kind, _, part = inner.partition(".")
    if kind == "attention":
        names = MLA if spec.is_mla(int(layer)) else KDA
        theirs = names["k_b_proj_t.weight" if part == _TURNED_BACK else part]
    elif expert := _EXPERT.fullmatch(inner):
        theirs = f"ffn_{expert[2]}_exps.weight"
    elif one := _ONE.fullmatch(inner):
        theirs = f"ffn_{one[2]}{'_shexp' if one[1] else ''}.weight"
    else:
        theirs = ROUTER[part] if kind == "mlp" else BOTH[inner]
    return f"blk.{layer}.{theirs}"


def _mapped(source: GgufSource, spec: Ling3Spec, name: str, theirs: str, tensor: TensorSpec) -> Mapped:
    if theirs not in source.tensors:
        raise ModelFileError("missing_tensor", f"the file has no tensor {theirs}")
    found = source.tensors[theirs]
    inner = name.split(".", 3)[-1]
    rows: Rows
    if expert := _EXPERT.fullmatch(inner):
        _expect(found, (spec.experts, tensor.rows, tensor.cols))
        rows = found.part(int(expert[1]))
    elif inner.endswith(("k_b_proj.weight", "k_b_proj_t.weight")):
        _expect(found, (spec.heads, spec.kv_rank, spec.nope_dim))
        rows = found
        if inner.endswith(_TURNED_BACK):
            rows = Transposed(Decoded.if_blocks(found, spec.nope_dim), spec.kv_rank, spec.nope_dim)
    elif inner.endswith("v_b_proj.weight"):
        _expect(found, (spec.heads, spec.v_dim, spec.kv_rank))
        rows = found
    elif inner.endswith("_conv1d.weight"):
        _expect(found, (tensor.cols // CONV_WIDTH, 1, CONV_WIDTH))
        rows = found.shaped(tensor.cols)
    elif inner == "attention.A":
        _expect(found, (tensor.cols, 1))
        rows = found.shaped(tensor.cols)
    else:
        check_shape(found.name, found.shape, tensor)
        rows = found
    return Mapped(name, tensor, rows)


def _expect(tensor: SourceTensor, shape: tuple[int, ...]) -> None:
    """Compare shapes; outer dimensions of one may be there or not, as writers please."""
    found = tensor.shape
    while len(found) > len(shape) and found[0] == 1:
        found = found[1:]
    if found != shape:
        raise ModelFileError(
            "wrong_shape", f"the tensor {tensor.name} is {list(tensor.shape)}; expected {list(shape)}"
        )


def _check_keys(source: GgufSource) -> None:
    prefix = f"{GGUF_NAME}."
    for key in source.metadata_keys():
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and name not in _READ | _FIXED.keys():
            raise ModelFileError(
                "unsupported_model", f"this variant of the architecture is not supported (key {key!r})"
            )
    for name, known in _FIXED.items():
        value = source.value(prefix + name)
        if value is None and name in _OPTIONAL:
            continue
        if value is None or type(value) is not type(known[0]) or value not in known:
            raise ModelFileError(
                "unsupported_model", f"{prefix}{name} is {shown(value)}; supported: {known[0]}"
            )
    for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        limits = source.value(prefix + name)
        if limits is not None and any(limits if isinstance(limits, list) else [limits]):
            raise ModelFileError(
                "unsupported_model", f"SwiGLU clamps are not supported (key {prefix + name!r})"
            )


def _check_lengths(source: GgufSource, kv_rank: int, rope: int, key_dim: int, v_dim: int) -> None:
    """The lengths of the latent cache follow from the others; of values, writers note one or the other."""
    prefix = f"{GGUF_NAME}.attention."
    if key_dim <= rope:
        raise ModelFileError(
            "unsupported_model", f"{prefix}key_length_mla is {key_dim}, of which {rope} rotate"
        )
    for key, meant in (("key_length", (kv_rank + rope,)), ("value_length", (kv_rank, v_dim))):
        found = source.integer(prefix + key, meant[0])
        if found not in meant:
            raise ModelFileError(
                "unsupported_model", f"{prefix}{key} is {found}; expected {' or '.join(map(str, meant))}"
            )


def _group(source: GgufSource, layers: int) -> int:
    """Every how manieth layer is MLA. The file has a map of the layers, which must be of that kind."""
    key = f"{GGUF_NAME}.attention.head_count_kv"
    heads = source.array(key, int)
    if layers < 1 or len(heads) < layers:
        raise ModelFileError("invalid_metadata", f"{key} has {len(heads)} entries for {layers} layers")
    is_mla = [count > 0 for count in heads[:layers]]
    group = is_mla.index(True) + 1 if any(is_mla) else layers + 1
    tail = layers // group * group
    if group > layers or is_mla != [(i + 1) % group == 0 or i >= tail for i in range(layers)]:
        raise ModelFileError(
            "unsupported_model", f"this order of layers is not supported ({key} {shown(heads)})"
        )
    return group


def _yarn(source: GgufSource, context: int) -> tuple[float, int]:
    """YaRN's factor and the window it stretches; 1 and the whole window without."""
    prefix = f"{GGUF_NAME}.rope.scaling."
    kind = source.text(f"{prefix}type")
    if kind in (None, "none"):
        for name in ("factor", "original_context_length"):
            if source.value(prefix + name) is not None:
                raise ModelFileError("unsupported_model", f"{prefix}{name} without {prefix}type")
        return 1.0, context
    if kind != "yarn":
        raise ModelFileError("unsupported_model", f"RoPE scaling {shown(kind)} is not supported")
    return source.number(f"{prefix}factor"), positive(source, f"{prefix}original_context_length")
