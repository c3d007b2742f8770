"""The model as its config.json describes it, in plain numbers, and what a parallel layout asks of it.

No Megatron here: the dry run reads this too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_ibpo.config import ParallelConfig

__all__ = [
    "FAMILIES",
    "ModelConfigError",
    "ModelShape",
    "check_layout",
    "pipeline_layers",
    "read_hf_config",
]

Family = Literal["qwen3", "qwen3_moe", "qwen3_next"]

FAMILIES: tuple[Family, ...] = ("qwen3", "qwen3_moe", "qwen3_next")
"""`model_type`s of config.json that can be trained."""


class ModelConfigError(ValueError):
    """config.json is missing, malformed, or describes a model that cannot be built."""


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a model. Names follow config.json; sizes are in elements."""

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    """Elements of a head that rotate; the rest carries no position."""
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    initializer_range: float
    full_attention: tuple[bool, ...]
    """For each layer: softmax attention (True) or gated delta net (False)."""
    ffn_hidden_size: int = 0
    """Dense MLP; 0 for mixtures of experts."""
    num_experts: int = 0
    experts_per_token: int = 0
    expert_hidden_size: int = 0
    shared_expert_hidden_size: int = 0
    normalize_expert_weights: bool = True
    """The weights of a token's chosen experts sum to one."""
    gdn_key_heads: int = 0
    gdn_value_heads: int = 0
    gdn_key_dim: int = 0
    gdn_value_dim: int = 0
    gdn_conv_kernel: int = 0

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def is_hybrid(self) -> bool:
        """Qwen3-Next: some layers are gated delta nets, norms are zero-centred, attention has a gate."""
        return self.family == "qwen3_next"


def read_hf_config(hf_dir: Path) -> ModelShape:
    """Read `hf_dir`/config.json.

    Raises:
        ModelConfigError: the directory or file is missing, the JSON is malformed, the model type is
            unknown, a field is missing or has the wrong type, or asks for what is not implemented.
    """
    path = hf_dir / "config.json"
    if not hf_dir.is_dir():
        raise ModelConfigError(f"no checkpoint directory {hf_dir}: --hf-checkpoint must name one")
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelConfigError(f"{hf_dir} holds no config.json: is it a Hugging Face checkpoint?") from None
    except ValueError as error:
        raise ModelConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ModelConfigError(f"{path} must hold a JSON object, not a {type(raw).__name__}")
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ModelConfigError(f"{path}: model_type {family!r} is unknown; one of {', '.join(FAMILIES)}")
    return _shape(_Fields(raw, path), family)


@dataclass(frozen=True)
class _Fields:
    """config.json's fields, each with a clear error."""

    raw: dict[str, Any]
    path: Path

    def count(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelConfigError(f"{self.path}: {name} must be a positive integer, is {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.raw.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelConfigError(f"{self.path}: {name} must be a number, is {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name, default)
        if not isinstance(value, bool):
            raise ModelConfigError(f"{self.path}: {name} must be true or false, is {value!r}")
        return value

    def refuse(self, name: str, *allowed: Any) -> None:
        if (value := self.raw.get(name)) not in (None, *allowed):
            raise ModelConfigError(f"{self.path}: {name}={value!r} is not supported")


def _shape(fields: _Fields, family: Family) -> ModelShape:
    fields.refuse("hidden_act", "silu")
    fields.refuse("attention_bias", False)
    fields.refuse("use_sliding_window", False)
    layers = fields.count("num_hidden_layers")
    heads = fields.count("num_attention_heads")
    head_dim = fields.count("head_dim", 256 if family == "qwen3_next" else 128)
    rope_theta, rotary_share = _rope(fields, 0.25 if family == "qwen3_next" else 1.0)
    rotary_dim = int(head_dim * rotary_share)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ModelConfigError(f"{fields.path}: {rotary_share} of head_dim={head_dim} is not an even number")
    shape: dict[str, Any] = {
        "family": family,
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": fields.count("hidden_size"),
        "num_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("num_key_value_heads", heads),
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
        "rope_theta": rope_theta,
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "max_position_embeddings": fields.count("max_position_embeddings", 32768),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "initializer_range": fields.number("initializer_range", 0.02),
        "full_attention": (True,) * layers,
    }
    if family == "qwen3":
        return ModelShape(**shape, ffn_hidden_size=fields.count("intermediate_size"))
    fields.refuse("decoder_sparse_step", 1)
    fields.refuse("mlp_only_layers", [])
    shape |= {
        "num_experts": fields.count(
            "num_local_experts" if "num_local_experts" in fields.raw else "num_experts"
        ),
        "experts_per_token": fields.count("num_experts_per_tok"),
        "expert_hidden_size": fields.count("moe_intermediate_size"),
        "normalize_expert_weights": fields.flag("norm_topk_prob", family == "qwen3_next"),
    }
    if family == "qwen3_moe":
        return ModelShape(**shape)
    shape |= {
        "full_attention": _full_attention(fields, layers),
        "shared_expert_hidden_size": fields.count("shared_expert_intermediate_size"),
        "gdn_key_heads": fields.count("linear_num_key_heads"),
        "gdn_value_heads": fields.count("linear_num_value_heads"),
        "gdn_key_dim": fields.count("linear_key_head_dim"),
        "gdn_value_dim": fields.count("linear_value_head_dim"),
        "gdn_conv_kernel": fields.count("linear_conv_kernel_dim"),
    }
    return ModelShape(**shape)


def _rope(fields: _Fields, default_share: float) -> tuple[float, float]:
    """(theta, rotating share of a head); since transformers 5 both live in `rope_parameters`."""
    old: dict[str, Any] = {
        name: fields.raw[name] for name in ("rope_theta", "partial_rotary_factor") if name in fields.raw
    }
    new = fields.raw.get("rope_parameters") or {}
    if not isinstance(new, dict):
        raise ModelConfigError(f"{fields.path}: rope_parameters must be an object, is {new!r}")
    scaling = fields.raw.get("rope_scaling") or {}
    kind = new.get("rope_type", scaling.get("rope_type", scaling.get("type", "default")))
    if kind != "default":
        raise ModelConfigError(f"{fields.path}: rope type {kind!r} is not supported, only plain rotation")
    merged = _Fields({**old, **new}, fields.path)
    return merged.number("rope_theta", 10000.0), merged.number("partial_rotary_factor", default_share)


def _full_attention(fields: _Fields, layers: int) -> tuple[bool, ...]:
    types = fields.raw.get("layer_types")
    if types is None:
        interval = fields.count("full_attention_interval", 4)
        return tuple((layer + 1) % interval == 0 for layer in range(layers))
    names = {"full_attention": True, "linear_attention": False}
    if not isinstance(types, list) or len(types) != layers or not set(types) <= set(names):
        raise ModelConfigError(
            f"{fields.path}: layer_types must name {layers} layers, each one of {', '.join(names)}"
        )
    return tuple(names[kind] for kind in types)


def pipeline_layers(
    num_layers: int, parallel: ParallelConfig, virtual_stages: int = 1
) -> list[tuple[range, ...]]:
    """Which layers each pipeline stage holds: for every stage, one range for each of its model chunks.

    With one virtual stage a stage holds consecutive layers. With more the pipeline is interleaved: it runs
    through all stages once for each virtual stage.

    Raises:
        ValueError: the layers cannot be divided so; names the flags.
    """
    stages = parallel.pipeline_model_parallel_size
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if stages == 1 and (first, last) != (None, None):
        raise ValueError("layers of the first or last pipeline stage need --pipeline-model-parallel-size > 1")
    counts: list[int | None] = [None] * stages
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    given = [count for count in counts if count is not None]
    others, left = stages - len(given), num_layers - sum(given)
    if left < 0 or (left % others if others else left):
        if not given:
            raise ValueError(
                f"--pipeline-model-parallel-size={stages} does not divide the layers ({num_layers})"
            )
        raise ValueError(
            f"--pipeline-model-parallel-size={stages}: {left} of {num_layers} layers remain for the "
            f"{others} stages besides those of --decoder-first/last-pipeline-num-layers"
        )
    sizes = [left // others if count is None else count for count in counts]
    for stage, size in enumerate(sizes):
        if size == 0 or size % virtual_stages:
            raise ValueError(
                f"pipeline stage {stage} would hold {size} layers, "
                f"not a positive multiple of its {virtual_stages} virtual stages"
            )
    chunks: list[list[range]] = [[] for _ in sizes]
    start = 0
    for _ in range(virtual_stages):
        for stage, size in enumerate(sizes):
            chunks[stage].append(range(start, start + size // virtual_stages))
            start += size // virtual_stages
    return [tuple(ranges) for ranges in chunks]


def check_layout(shape: ModelShape, parallel: ParallelConfig, world_size: int) -> list[str]:
    """What is wrong with training `shape` under `parallel` on `world_size` ranks; empty if nothing is."""
    return list(_layout_problems(shape, parallel, world_size))


def _layout_problems(shape: ModelShape, parallel: ParallelConfig, world_size: int) -> Iterator[str]:
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    sizes = {
        "--tensor-model-parallel-size": tp,
        "--pipeline-model-parallel-size": pp,
        "--expert-model-parallel-size": ep,
        "--expert-tensor-parallel-size": etp,
    }
    for flag, size in sizes.items():
        if size < 1:
            yield f"{flag}={size}: must be at least 1"
    if min(sizes.values()) < 1:
        return
    if parallel.context_parallel_size != 1:
        yield (
            f"--context-parallel-size={parallel.context_parallel_size}: context parallelism is not "
            "supported yet; use 1"
        )

    def divides(flag: str, what: str, count: int) -> Iterator[str]:
        if count % sizes[flag]:
            yield f"{flag}={sizes[flag]} does not divide {what} ({count})"

    yield from divides("--tensor-model-parallel-size", "the attention heads", shape.num_attention_heads)
    yield from divides("--tensor-model-parallel-size", "the key/value heads", shape.num_key_value_heads)
    yield from divides("--tensor-model-parallel-size", "the vocabulary", shape.vocab_size)
    if shape.ffn_hidden_size:
        yield from divides("--tensor-model-parallel-size", "the MLP's hidden size", shape.ffn_hidden_size)
    if shape.shared_expert_hidden_size:
        yield from divides(
            "--tensor-model-parallel-size", "the shared expert's hidden size", shape.shared_expert_hidden_size
        )
    if shape.is_hybrid:
        yield from divides("--tensor-model-parallel-size", "the delta net's key heads", shape.gdn_key_heads)
        yield from divides(
            "--tensor-model-parallel-size", "the delta net's value heads", shape.gdn_value_heads
        )
    if shape.is_hybrid and shape.gdn_value_heads % shape.gdn_key_heads:
        yield (
            f"the delta net's {shape.gdn_value_heads} value heads are no multiple of its "
            f"{shape.gdn_key_heads} key heads"
        )
    if shape.num_attention_heads % shape.num_key_value_heads:
        yield (
            f"{shape.num_attention_heads} attention heads are no multiple of "
            f"{shape.num_key_value_heads} key/value heads"
        )
    try:
        pipeline_layers(shape.num_layers, parallel)
    except ValueError as error:
        yield str(error)
    if shape.is_moe:
        yield from divides("--expert-model-parallel-size", "the experts", shape.num_experts)
        yield from divides(
            "--expert-tensor-parallel-size", "an expert's hidden size", shape.expert_hidden_size
        )
        if tp > 1 and not parallel.sequence_parallel:
            yield "a mixture of experts with --tensor-model-parallel-size > 1 needs --sequence-parallel"
        if world_size % (ep * etp * pp):
            yield f"EP x ETP x PP = {ep * etp * pp} does not divide the world size ({world_size})"
    elif ep > 1 or etp > 1:
        yield (
            f"{shape.family} has no experts: --expert-model-parallel-size {ep} and "
            f"--expert-tensor-parallel-size {etp} must be 1; is this the recipe of a mixture of experts? "
            "examples/run.sh chooses a recipe by the model"
        )
    if world_size % (tp * pp):
        yield f"TP x PP = {tp * pp} does not divide the world size ({world_size})"
