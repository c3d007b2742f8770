"""A model's dimensions in plain numbers, as in its config.json."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_ibpo.basics.text import listed, shown
from megatron_ibpo.basics.user_files import read_json_object
from megatron_ibpo.models.families import FAMILIES, family_module


class ModelConfigError(ValueError):
    """config.json is missing, malformed, or describes a model that cannot be built."""


@dataclass(frozen=True)
class RopeScaling:
    """A change of the rotation's frequencies. Fields are named as in config.json."""

    rope_type: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int = 0
    """Positions of the model's first training; 0 for linear scaling, which does not need them."""
    beta_fast: float = 32.0
    """YaRN: turns within those positions above which a frequency is unchanged."""
    beta_slow: float = 1.0
    """YaRN: turns below which it is divided by `factor`."""
    truncate: bool = True
    """YaRN: True to round the bounds of the frequencies between the two to whole ones."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Dimensions of a model, in elements; names follow config.json. Families with others derive from this."""

    family: str
    """`model_type` of config.json."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    """Elements of a head that rotate; the others carry no position."""
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    initializer_range: float
    full_attention: tuple[bool, ...]
    """True for each layer with softmax attention, which keeps keys and values of every token; False for a
    mixer with a recurrent state."""
    rope_scaling: RopeScaling | None = None
    """None: plain rotation."""
    query_key_norms: bool = True
    """True if each head's query and key go through an RMSNorm before they rotate."""
    qkv_bias: bool = False
    """True if the projections to queries, keys and values add a bias."""
    attention_output_bias: bool = False
    """True if attention's output projection adds a bias."""
    attention_sinks: bool = False
    """True if each head's softmax has one more logit, a parameter without a value."""
    windows: tuple[int | None, ...] = ()
    """Tokens that each layer's attention covers, itself the last; None: all. Empty: no windows."""
    mlp_bias: bool = False
    """True if all linear layers of the dense MLP add a bias."""
    attention_output_gate: bool = False
    """True if attention's output is multiplied by a sigmoid gate, projected alongside the queries."""
    zero_centered_norms: bool = False
    """True if RMSNorm multiplies by 1 + weight."""
    mtp_in_checkpoints: bool = False
    """True if checkpoints may hold multi-token prediction layers, for speculative decoding. They are
    converted along with the model and not trained; config.json does not say whether they are there."""
    hf_prefix: str = "model."
    """Prefix of the checkpoint's names for the tensors of layers, embedding and final norm."""
    carried: tuple[str, ...] = ()
    """Prefixes of tensors that checkpoints hold beside the policy, such as a vision tower's. They are kept
    unchanged and not trained."""
    ffn_hidden_size: int = 0
    """Width of dense MLPs; 0 if every layer has experts."""
    dense_layers: int = 0
    """Number of first layers of a mixture that have a dense MLP in place of experts."""
    num_experts: int = 0
    experts_per_token: int = 0
    expert_hidden_size: int = 0
    shared_expert_hidden_size: int = 0
    shared_expert_gate: bool = True
    """True if the output of a shared expert is multiplied by a sigmoid of the token."""
    normalize_expert_weights: bool = True
    """True if the weights of a token's chosen experts sum to one."""
    expert_bias: bool = False
    """True if the linear layers of experts add a bias, and so does the router."""

    @property
    def is_moe(self) -> bool:
        """True if some layers have experts."""
        return self.num_experts > 0

    def has_experts(self, layer: int) -> bool:
        return self.is_moe and layer >= self.dense_layers

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        return self.num_layers - self.dense_layers if self.is_moe else 0

    @property
    def is_recurrent(self) -> bool:
        """True if some layers carry a state from token to token in place of keys and values."""
        return not all(self.full_attention)

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that the attention of a layer covers; None: all."""
        return self.windows[layer] if self.windows else None

    def attention_windows(self) -> Counter[int | None]:
        """Return window → number of softmax attention layers with it."""
        return Counter(self.window(layer) for layer, softmax in enumerate(self.full_attention) if softmax)

    def divided_by_tp(self) -> dict[str, int]:
        """Return the sizes that tensor parallelism has to divide, in trainer and engines, by what they
        count."""
        return {
            "the attention heads": self.num_attention_heads,
            "the MLP's hidden size": self.ffn_hidden_size,
            "the shared expert's hidden size": self.shared_expert_hidden_size,
        }


def read_hf_config(hf_dir: Path) -> ModelShape:
    """Read `hf_dir`/config.json. Raises ModelConfigError if there is none, it is malformed, lacks a field, or
    asks for what is not implemented."""
    path = hf_dir / "config.json"
    if not hf_dir.is_dir():
        raise ModelConfigError(f"no checkpoint directory {hf_dir}: --hf-checkpoint must name one")
    if not path.exists():
        raise ModelConfigError(f"{hf_dir} holds no config.json: is it a Hugging Face checkpoint?")
    raw = read_json_object(path, ModelConfigError)
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ModelConfigError(f"{path}: model_type {shown(family)} is unknown; one of {', '.join(FAMILIES)}")
    fields = Fields(raw, path)
    fields.refuse_quantization()
    shape: ModelShape = family_module(family).read(fields)
    if shape.moe_layers * shape.num_experts > MOST_EXPERTS:
        raise fields.error(
            f"{shape.moe_layers} layers of {shape.num_experts} experts are more than {MOST_EXPERTS} in all"
        )
    return shape


UNPACKED = "mxfp4"
"""The one quantization that is read, as bfloat16."""
LARGEST_COUNT = 2**31 - 1
"""Largest count that config.json may contain; C counts no further."""
MOST_REPEATED = 10_000
"""Most layers of a model, and most experts of a layer; they are listed one by one."""
MOST_EXPERTS = 200_000
"""Most experts in all layers of a model. The largest published models have a tenth of this."""


@dataclass(frozen=True)
class Fields:
    """The fields of config.json, each with a clear error."""

    raw: dict[str, Any]
    path: Path

    def or_default(self, defaults: Mapping[str, Any]) -> "Fields":
        """Return the fields with a family's defaults in `transformers`, as engines read the file."""
        return replace(self, raw={**defaults, **self.raw})

    def count(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = LARGEST_COUNT
    ) -> int:
        value = self.raw.get(name)
        if value is None:  # null means the same as a missing field
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise self.error(f"{name} must be {kind}, is {shown(value)}")
        if value > most:
            raise self.error(f"{name} must be at most {most}, is {value}")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a number."""
        value = self.raw.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e300:
            raise self.error(f"{name} must be a number, is {shown(value)}")
        return float(value)

    def epsilon(self, default: float = 1e-6) -> float:
        """Return the epsilon of RMSNorm; with 0 or less a row of zeros would become NaN."""
        value = self.number("rms_norm_eps", default)
        if not 0 < value < 1:
            raise self.error(f"rms_norm_eps must be above 0 and below 1, is {value:g}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, is {shown(value)}")
        return value

    def refuse(self, name: str, *allowed: Any) -> None:
        if (value := self.raw.get(name)) not in (None, *allowed):
            raise self.error(f"{name}={shown(value)} is not supported")

    def refuse_quantization(self) -> None:
        """Refuse weights in other formats, which would be missing or be misread as numbers."""
        inner = self.raw.get("text_config")
        for raw in (self.raw, inner) if isinstance(inner, dict) else (self.raw,):
            if (quantization := raw.get("quantization_config")) is None:
                continue
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            if method != UNPACKED:
                raise self.error(
                    f"quantization_config with quant_method {shown(method)} is not supported, only "
                    f"{UNPACKED}; take the model in bfloat16"
                )

    def groups(self, heads: str, shared: str) -> tuple[int, int]:
        """Return (heads, groups of heads that share something) from the fields of these names."""
        many = self.count(heads)
        few = self.count(shared, many)
        if many % few:
            raise self.error(f"{heads}={many} is no multiple of {shared}={few}")
        return many, few

    def error(self, problem: str) -> ModelConfigError:
        return ModelConfigError(f"{self.path}: {problem}")


def common_fields(fields: Fields, *, may_have_biases: bool = False) -> dict[str, Any]:
    """Return the fields common to decoders of this kind: SwiGLU, full attention in all layers. `fields` have
    the family's defaults; biases of attention are refused unless the family reads the field."""
    fields.refuse("hidden_act", "silu")
    if not may_have_biases:
        fields.refuse("attention_bias", False)
    fields.refuse("use_sliding_window", False)
    layers = fields.count("num_hidden_layers", most=MOST_REPEATED)
    heads, key_value_heads = fields.groups("num_attention_heads", "num_key_value_heads")
    hidden_size = fields.count("hidden_size")
    head_dim = fields.count("head_dim", hidden_size // heads)
    rope_theta, rotary_share, rope_scaling = _rope(fields)
    rotary_dim = int(head_dim * rotary_share)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise fields.error(f"{rotary_share} of head_dim={head_dim} is not an even number up to that")
    return {
        "family": fields.raw["model_type"],
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "rms_norm_eps": fields.epsilon(),
        "max_position_embeddings": fields.count("max_position_embeddings", 32768),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "initializer_range": fields.number("initializer_range", 0.02),
        "full_attention": (True,) * layers,
    }


def expert_fields(fields: Fields) -> dict[str, Any]:
    """Return the fields of a mixture of experts in every layer."""
    fields.refuse("decoder_sparse_step", 1)
    fields.refuse("mlp_only_layers", [])
    return {
        "num_experts": fields.count(
            "num_local_experts" if "num_local_experts" in fields.raw else "num_experts", most=MOST_REPEATED
        ),
        "experts_per_token": fields.count("num_experts_per_tok"),
        "expert_hidden_size": fields.count("moe_intermediate_size"),
        "normalize_expert_weights": fields.flag("norm_topk_prob", True),
    }


def _rope(fields: Fields) -> tuple[float, float, RopeScaling | None]:
    """Return (theta, rotating share of a head, scaling), since transformers 5 in `rope_parameters`."""
    old: dict[str, Any] = {
        name: fields.raw[name] for name in ("rope_theta", "partial_rotary_factor") if name in fields.raw
    }
    new = fields.raw.get("rope_parameters") or {}
    if not isinstance(new, dict):
        raise fields.error(f"rope_parameters must be an object, is {shown(new)}")
    scaling = fields.raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise fields.error(f"rope_scaling must be an object, is {shown(scaling)}")
    if nested := [name for name, value in new.items() if isinstance(value, dict)]:
        raise fields.error(f"rope_parameters of kinds of layers ({listed(nested, most=4)}) are not supported")
    if new and any(name in new and new[name] != value for name, value in scaling.items()):
        raise fields.error("rope_scaling and rope_parameters differ: drop one of them")
    longest = {"original_max_position_embeddings": fields.raw.get("max_position_embeddings")}
    merged = Fields({**longest, **old, **scaling, **new}, fields.path)
    share = merged.number("partial_rotary_factor", 1.0)
    theta = merged.number("rope_theta", 10000.0)
    if theta < 1:
        raise fields.error(f"rope_theta must be at least 1, is {theta:g}")
    return theta, share, _rope_scaling(merged, share)


MEGATRON_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Values written into megatron-core 0.19.2 (`RotaryEmbedding._apply_scaling`), those of Llama 3.1 to 3.3."""


def _rope_scaling(rope: Fields, share: float) -> RopeScaling | None:
    """Return the scaling, if megatron-core computes it exactly as transformers does; any other is refused."""
    kind = rope.raw.get("rope_type", rope.raw.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise rope.error(f"rope type {shown(kind)} is not supported, only default, linear, llama3 and yarn")
    if share != 1:
        raise rope.error(f"rope type {kind} over {share} of a head is not supported, only over all of it")
    factor = rope.number("factor", 0.0)
    if factor < 1:
        raise rope.error(
            f"rope type {kind} needs a factor of at least 1, has {shown(rope.raw.get('factor'))}"
        )
    if kind == "linear":
        return RopeScaling(kind, factor)
    original = rope.count("original_max_position_embeddings")
    if kind == "llama3":
        for name, value in MEGATRON_LLAMA3.items():
            if rope.raw.get(name) != value:
                raise rope.error(
                    f"rope type llama3 with {name}={shown(rope.raw.get(name))} is not supported: "
                    f"megatron-core has {value:g} written into its code"
                )
        return RopeScaling(kind, factor, original)
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        rope.refuse(name)
    betas = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    return RopeScaling(kind, factor, original, *betas, rope.flag("truncate", True))
