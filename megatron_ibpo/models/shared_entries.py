"""Weight-map entries that families share: attention, a dense MLP, a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from megatron_ibpo.models.shape import ModelShape
from megatron_ibpo.models.weight_map import COLUMNS, ROWS, Cut, Entry, Fused, Piece, concatenate

if TYPE_CHECKING:
    from torch import Tensor


def attention(shape: ModelShape) -> list[Entry]:
    hidden, dim = shape.hidden_size, shape.head_dim
    queries = shape.num_attention_heads * dim
    norm = Piece("input_layernorm.weight", (hidden,))
    entries = [
        Entry("self_attention.linear_qkv.layer_norm_weight", (norm,)),
        _qkv(shape, "weight", (hidden,)),
    ]
    if shape.qkv_bias:
        entries.append(_qkv(shape, "bias", ()))
    if shape.query_key_norms:
        entries += [
            Entry("self_attention.q_layernorm.weight", (Piece("self_attn.q_norm.weight", (dim,)),)),
            Entry("self_attention.k_layernorm.weight", (Piece("self_attn.k_norm.weight", (dim,)),)),
        ]
    projection = Piece("self_attn.o_proj.weight", (hidden, queries), COLUMNS)
    entries.append(Entry("self_attention.linear_proj.weight", (projection,)))
    if shape.attention_output_bias:
        bias = Piece("self_attn.o_proj.bias", (hidden,))
        entries.append(Entry("self_attention.linear_proj.bias", (bias,)))
    if shape.attention_sinks:
        sinks = Piece("self_attn.sinks", (shape.num_attention_heads,), ROWS)
        entries.append(Entry("self_attention.core_attention.softmax_offset", (sinks,)))
    return entries


def _qkv(shape: ModelShape, kind: str, columns: tuple[int, ...]) -> Entry:
    """Return the input projection's weight, with rows of `columns`, or its bias."""
    dim, gated = shape.head_dim, shape.attention_output_gate
    queries, groups = shape.num_attention_heads * dim, shape.num_key_value_heads * dim
    qkv = _QKV(shape.num_attention_heads // shape.num_key_value_heads, dim, gated)
    return Entry(
        f"self_attention.linear_qkv.{kind}",
        (
            Piece(f"self_attn.q_proj.{kind}", (queries * (2 if gated else 1), *columns), ROWS),
            Piece(f"self_attn.k_proj.{kind}", (groups, *columns), ROWS),
            Piece(f"self_attn.v_proj.{kind}", (groups, *columns), ROWS),
        ),
        qkv.join,
        qkv.part,
        ROWS,
        even_up_to=shape.num_key_value_heads,
    )


def dense_mlp(shape: ModelShape) -> list[Entry]:
    size, hidden = shape.ffn_hidden_size, shape.hidden_size
    norm = Piece("post_attention_layernorm.weight", (hidden,))
    entries = [Entry("mlp.linear_fc1.layer_norm_weight", (norm,)), *_gated_mlp("mlp", "mlp", size, hidden)]
    if shape.mlp_bias:
        entries += [
            _gate_and_up("mlp", "mlp", "bias", (size,)),
            Entry("mlp.linear_fc2.bias", (Piece("mlp.down_proj.bias", (hidden,)),)),
        ]
    return entries


def mlp(shape: ModelShape) -> list[Entry]:
    """Return the entries of experts, or of a dense MLP in a model without."""
    return moe(shape) if shape.is_moe else dense_mlp(shape)


def moe(shape: ModelShape, shared: str = "mlp.shared_expert") -> list[Entry]:
    """Return the norm, router, shared expert if there is one (`shared` in checkpoints), and experts."""
    hidden = shape.hidden_size
    entries = [
        Entry("pre_mlp_layernorm.weight", (Piece("post_attention_layernorm.weight", (hidden,)),)),
        Entry("mlp.router.weight", (Piece("mlp.gate.weight", (shape.num_experts, hidden)),)),
    ]
    if shape.shared_expert_hidden_size:
        if shape.shared_expert_gate:
            gate = Piece(f"{shared}_gate.weight", (1, hidden))
            entries.append(Entry("mlp.shared_experts.gate_weight", (gate,)))
        entries += _gated_mlp("mlp.shared_experts", shared, shape.shared_expert_hidden_size, hidden)
    return [*entries, *_experts(shape)]


@lru_cache(maxsize=2)  # the same in every layer, and a model may have tens of thousands
def _experts(shape: ModelShape) -> tuple[Entry, ...]:
    return tuple(entry for expert in range(shape.num_experts) for entry in _expert(shape, expert))


def _expert(shape: ModelShape, expert: int) -> list[Entry]:
    """Return the entries of one expert, which is in tensors of its own or in the layer's fused ones."""
    hidden, size = shape.hidden_size, shape.expert_hidden_size
    hf = f"mlp.experts.{expert}"
    up = "mlp.experts.gate_up_proj", (shape.num_experts, 2 * size, hidden)
    down = "mlp.experts.down_proj", (shape.num_experts, hidden, size)
    return [
        Entry(
            f"mlp.experts.linear_fc1.weight{expert}",
            (
                Piece(f"{hf}.gate_proj.weight", (size, hidden), ROWS, Fused(*up, expert, 0)),
                Piece(f"{hf}.up_proj.weight", (size, hidden), ROWS, Fused(*up, expert, size)),
            ),
            concatenate,
            _halves,
            Cut(0, (size, size)),
            expert=expert,
            num_experts=shape.num_experts,
        ),
        Entry(
            f"mlp.experts.linear_fc2.weight{expert}",
            (Piece(f"{hf}.down_proj.weight", (hidden, size), COLUMNS, Fused(*down, expert, 0)),),
            expert=expert,
            num_experts=shape.num_experts,
        ),
    ]


def _gated_mlp(megatron: str, hf: str, size: int, hidden: int) -> list[Entry]:
    """Return the entries of SwiGLU."""
    return [
        _gate_and_up(megatron, hf, "weight", (size, hidden)),
        Entry(f"{megatron}.linear_fc2.weight", (Piece(f"{hf}.down_proj.weight", (hidden, size), COLUMNS),)),
    ]


def _gate_and_up(megatron: str, hf: str, kind: str, half: tuple[int, ...]) -> Entry:
    """Return the entry of fc1, which is [gate; up] on each rank."""
    return Entry(
        f"{megatron}.linear_fc1.{kind}",
        (Piece(f"{hf}.gate_proj.{kind}", half, ROWS), Piece(f"{hf}.up_proj.{kind}", half, ROWS)),
        concatenate,
        _halves,
        Cut(0, (half[0], half[0])),
    )


def _halves(shard: Tensor) -> list[Tensor]:
    return list(shard.chunk(2))


@dataclass(frozen=True)
class _QKV:
    """Attention's input projection. HF: q (with a gate: each head's [q | gate]), k, v. Megatron: for each
    key/value group [its q heads | their gates | k | v]."""

    heads_per_group: int
    dim: int
    gated: bool

    def join(self, cuts: list[Tensor]) -> Tensor:
        query, key, value = cuts
        columns = query.shape[1:]  # a bias has none
        kinds = 2 if self.gated else 1
        query = query.view(-1, self.heads_per_group, kinds, self.dim, *columns).transpose(1, 2)
        key, value = key.view(-1, self.dim, *columns), value.view(-1, self.dim, *columns)
        return concatenate([query.flatten(1, 3), key, value], dim=1).flatten(0, 1)

    def part(self, shard: Tensor) -> list[Tensor]:
        kinds = 2 if self.gated else 1
        queries = kinds * self.heads_per_group * self.dim
        groups = shard.unflatten(0, (-1, queries + 2 * self.dim))
        query, key, value = groups.split([queries, self.dim, self.dim], dim=1)
        query = query.unflatten(1, (kinds, self.heads_per_group, self.dim)).transpose(1, 2)
        return [query.flatten(0, 3), key.flatten(0, 1), value.flatten(0, 1)]
