"""Which Hugging Face tensors make up which Megatron parameter, and how both are cut over ranks.

One table an architecture part; loading, export and conversion all follow from it. A Megatron parameter is
an `Entry` under its global name (layer and expert numbers count over the whole model). It is joined from
one or more `Piece`s, HF tensors. Every piece is cut over the tensor-parallel ranks so that joining a rank's
cuts gives exactly that rank's shard of the parameter: joins never see the layout. A Megatron checkpoint
holds the parameter in `Block`s, which do not depend on the layout either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ibpo.shape import ModelShape

__all__ = [
    "Block",
    "Cut",
    "Entry",
    "Fused",
    "Piece",
    "global_name",
    "is_ignored",
    "mtp_layers",
    "weight_map",
]


@dataclass(frozen=True)
class Cut:
    """How ranks divide a tensor: along `dim`, each of the `sections` on its own (all of it if none)."""

    dim: int
    sections: tuple[int, ...] = ()


@dataclass(frozen=True)
class Fused:
    """Where a checkpoint with fused experts holds a piece: rows of one expert of a larger tensor."""

    name: str
    shape: tuple[int, ...]
    """Of the larger tensor."""
    expert: int
    first_row: int


@dataclass(frozen=True)
class Piece:
    """One Hugging Face tensor."""

    name: str
    shape: tuple[int, ...]
    cut: Cut | None = None
    """None: every rank holds all of it."""
    fused: Fused | None = None

    def ranges(self, rank: int, ranks: int) -> list[tuple[int, int]]:
        """(start, length) along the cut's dimension of what `rank` of `ranks` holds."""
        assert self.cut is not None
        return _ranges(self.shape, self.cut, rank, ranks)

    def shard_shape(self, ranks: int) -> tuple[int, ...]:
        if self.cut is None:
            return self.shape
        shape = list(self.shape)
        shape[self.cut.dim] //= ranks
        return tuple(shape)

    def merge(self, shards: list[Tensor]) -> Tensor:
        """The whole tensor from the shards of all ranks, in rank order."""
        if len(shards) == 1:
            return shards[0]
        assert self.cut is not None
        whole = torch.empty(self.shape, dtype=shards[0].dtype, device=shards[0].device)
        for rank, shard in enumerate(shards):
            taken = 0
            for start, length in self.ranges(rank, len(shards)):
                part = shard.narrow(self.cut.dim, taken, length)
                whole.narrow(self.cut.dim, start, length).copy_(part)
                taken += length
        return whole


@dataclass(frozen=True)
class Block:
    """A box of one tensor of a Megatron checkpoint."""

    key: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter."""

    name: str
    """Global name."""
    pieces: tuple[Piece, ...]
    join: Callable[[list[Tensor]], Tensor]
    """Cuts of the pieces -> shard of the parameter."""
    part: Callable[[Tensor], list[Tensor]]
    """The inverse."""
    layer: int | None = None
    expert: int | None = None
    cut: Cut | None = None
    """How ranks divide the parameter. None: every rank holds all of it."""
    stored_apart: tuple[str, ...] = ()
    """Suffixes of the keys under which a Megatron checkpoint holds the cut's sections; one key if none."""
    num_experts: int = 0
    """An expert's parameter is a slice of a stored tensor of all experts of the layer."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter: joins are by rows."""
        first = self.pieces[0].shape
        return (sum(piece.shape[0] for piece in self.pieces), *first[1:])

    def blocks(self, rank: int = 0, ranks: int = 1) -> list[Block]:
        """Where a Megatron checkpoint holds the shard of `rank` of `ranks`: in order, they make it up along
        the cut's dimension."""
        if self.cut is None:
            return [self._block(self.name, self.shape, 0, (0, self.shape[0]))]
        spans = _ranges(self.shape, self.cut, rank, ranks)
        if not self.stored_apart:
            return [self._block(self.name, self.shape, self.cut.dim, span) for span in spans]
        blocks, start = [], 0
        for suffix, rows, (first, length) in zip(self.stored_apart, self.cut.sections, spans, strict=True):
            shape = (rows, *self.shape[1:])
            blocks.append(self._block(f"{self.name}.{suffix}", shape, 0, (first - start, length)))
            start += rows
        return blocks

    def _block(self, key: str, shape: tuple[int, ...], dim: int, span: tuple[int, int]) -> Block:
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = span
        if self.expert is None:
            return Block(key, shape, tuple(offsets), tuple(sizes))
        together = key.removesuffix(str(self.expert)).replace(".experts.", ".experts.experts.")
        return Block(together, (self.num_experts, *shape), (self.expert, *offsets), (1, *sizes))


def _ranges(shape: tuple[int, ...], cut: Cut, rank: int, ranks: int) -> list[tuple[int, int]]:
    """(start, length) of what `rank` of `ranks` holds of each section."""
    ranges, start = [], 0
    for size in cut.sections or (shape[cut.dim],):
        ranges.append((start + rank * (size // ranks), size // ranks))
        start += size
    return ranges


@dataclass(frozen=True)
class _Rule:
    """An entry without its place in the model: names relative to the layer, or for experts with {}."""

    name: str
    pieces: tuple[Piece, ...]
    join: Callable[[list[Tensor]], Tensor] = lambda cuts: cuts[0]
    part: Callable[[Tensor], list[Tensor]] = lambda shard: [shard]
    cut: Cut | None = None
    """Of the joined parameter; of the piece if there is only one."""
    stored_apart: tuple[str, ...] = ()


ROWS, COLUMNS = Cut(0), Cut(1)


def weight_map(shape: ModelShape, mtp_layers: int = 0) -> dict[str, Entry]:
    """Every Megatron parameter of the whole model, by global name, in checkpoint order.

    Args:
        mtp_layers: multi-token prediction layers to carry along. Qwen3-Next's checkpoints have one, for
            speculative decoding; config.json does not say so and the policy that is trained has none.
    """
    hidden, vocab = shape.hidden_size, shape.vocab_size
    embedding = Piece("model.embed_tokens.weight", (vocab, hidden), ROWS)
    head = embedding if shape.tie_word_embeddings else Piece("lm_head.weight", (vocab, hidden), ROWS)
    entries = [_entry(_Rule("embedding.word_embeddings.weight", (embedding,)))]
    for layer, full_attention in enumerate(shape.full_attention):
        entries += _layer(shape, full_attention, f"decoder.layers.{layer}.", f"model.layers.{layer}.", layer)
    entries.append(_entry(_Rule("decoder.final_layernorm.weight", (Piece("model.norm.weight", (hidden,)),))))
    entries.append(_entry(_Rule("output_layer.weight", (head,))))
    for layer in range(mtp_layers):
        entries += _mtp_layer(shape, layer)
    return {entry.name: entry for entry in entries}


def _layer(
    shape: ModelShape, full_attention: bool, megatron: str, hf: str, layer: int | None = None
) -> list[Entry]:
    """A layer's entries; `megatron` and `hf` are the prefixes of its names."""
    mixer = _attention(shape) if full_attention else _gated_delta_net(shape)
    mlp = _moe(shape) if shape.is_moe else _dense_mlp(shape)
    entries = [_entry(rule, megatron, hf, layer) for rule in (*mixer, *mlp)]
    for expert in range(shape.num_experts):
        rules = _expert(shape, f"{hf}mlp.experts", expert)
        entries += [_entry(rule, megatron, hf, layer, expert, shape.num_experts) for rule in rules]
    return entries


def _mtp_layer(shape: ModelShape, layer: int) -> list[Entry]:
    """Multi-token prediction: embedding and hidden state, each normed, are projected to one vector that
    goes through an attention layer. HF has the projection and norms once, whatever the layers."""
    hidden = shape.hidden_size
    prefix = f"mtp.layers.{layer}."
    rules = [
        _Rule("enorm.weight", (Piece("mtp.pre_fc_norm_embedding.weight", (hidden,)),)),
        _Rule("hnorm.weight", (Piece("mtp.pre_fc_norm_hidden.weight", (hidden,)),)),
        _Rule("eh_proj.weight", (Piece("mtp.fc.weight", (hidden, 2 * hidden), ROWS),)),
        _Rule("final_layernorm.weight", (Piece("mtp.norm.weight", (hidden,)),)),
    ]
    inner = _layer(shape, True, f"{prefix}transformer_layer.", prefix)
    return [*(_entry(rule, prefix) for rule in rules), *inner]


def _entry(
    rule: _Rule,
    megatron: str = "",
    hf: str = "",
    layer: int | None = None,
    expert: int | None = None,
    num_experts: int = 0,
) -> Entry:
    return Entry(
        megatron + rule.name,
        tuple(Piece(hf + piece.name, piece.shape, piece.cut, piece.fused) for piece in rule.pieces),
        rule.join,
        rule.part,
        layer,
        expert,
        rule.pieces[0].cut if len(rule.pieces) == 1 else rule.cut,
        rule.stored_apart,
        num_experts,
    )


def _attention(shape: ModelShape) -> list[_Rule]:
    hidden, dim = shape.hidden_size, shape.head_dim
    queries, groups = shape.num_attention_heads * dim, shape.num_key_value_heads * dim
    gated = shape.is_hybrid
    qkv = _QKV(shape.num_attention_heads // shape.num_key_value_heads, dim, gated)
    return [
        _Rule("self_attention.linear_qkv.layer_norm_weight", (Piece("input_layernorm.weight", (hidden,)),)),
        _Rule(
            "self_attention.linear_qkv.weight",
            (
                Piece("self_attn.q_proj.weight", (queries * (2 if gated else 1), hidden), ROWS),
                Piece("self_attn.k_proj.weight", (groups, hidden), ROWS),
                Piece("self_attn.v_proj.weight", (groups, hidden), ROWS),
            ),
            qkv.join,
            qkv.part,
            ROWS,
        ),
        _Rule("self_attention.q_layernorm.weight", (Piece("self_attn.q_norm.weight", (dim,)),)),
        _Rule("self_attention.k_layernorm.weight", (Piece("self_attn.k_norm.weight", (dim,)),)),
        _Rule(
            "self_attention.linear_proj.weight",
            (Piece("self_attn.o_proj.weight", (hidden, queries), COLUMNS),),
        ),
    ]


def _gated_delta_net(shape: ModelShape) -> list[_Rule]:
    hidden = shape.hidden_size
    keys = shape.gdn_key_heads * shape.gdn_key_dim
    values = shape.gdn_value_heads * shape.gdn_value_dim
    in_proj = _DeltaNetInput(
        shape.gdn_key_dim, shape.gdn_value_dim, shape.gdn_value_heads // shape.gdn_key_heads
    )
    return [
        _Rule("self_attention.in_proj.layer_norm_weight", (Piece("input_layernorm.weight", (hidden,)),)),
        _Rule(
            "self_attention.in_proj.weight",
            (
                Piece("linear_attn.in_proj_qkvz.weight", (2 * keys + 2 * values, hidden), ROWS),
                Piece("linear_attn.in_proj_ba.weight", (2 * shape.gdn_value_heads, hidden), ROWS),
            ),
            in_proj.join,
            in_proj.part,
            Cut(0, (keys, keys, values, values, shape.gdn_value_heads, shape.gdn_value_heads)),
            ("query", "key", "value", "z", "beta", "alpha"),
        ),
        _Rule(
            "self_attention.conv1d.weight",
            (
                Piece(
                    "linear_attn.conv1d.weight",
                    (2 * keys + values, 1, shape.gdn_conv_kernel),
                    Cut(0, (keys, keys, values)),
                ),
            ),
            stored_apart=("query", "key", "value"),
        ),
        _Rule("self_attention.dt_bias", (Piece("linear_attn.dt_bias", (shape.gdn_value_heads,), ROWS),)),
        _Rule("self_attention.A_log", (Piece("linear_attn.A_log", (shape.gdn_value_heads,), ROWS),)),
        _Rule("self_attention.out_norm.weight", (Piece("linear_attn.norm.weight", (shape.gdn_value_dim,)),)),
        _Rule(
            "self_attention.out_proj.weight",
            (Piece("linear_attn.out_proj.weight", (hidden, values), COLUMNS),),
        ),
    ]


def _gated_mlp(megatron: str, hf: str, size: int, hidden: int) -> list[_Rule]:
    """SwiGLU: fc1 is [gate; up] on each rank."""
    return [
        _Rule(
            f"{megatron}.linear_fc1.weight",
            (
                Piece(f"{hf}.gate_proj.weight", (size, hidden), ROWS),
                Piece(f"{hf}.up_proj.weight", (size, hidden), ROWS),
            ),
            torch.cat,
            _halves,
            Cut(0, (size, size)),
        ),
        _Rule(f"{megatron}.linear_fc2.weight", (Piece(f"{hf}.down_proj.weight", (hidden, size), COLUMNS),)),
    ]


def _dense_mlp(shape: ModelShape) -> list[_Rule]:
    norm = Piece("post_attention_layernorm.weight", (shape.hidden_size,))
    return [
        _Rule("mlp.linear_fc1.layer_norm_weight", (norm,)),
        *_gated_mlp("mlp", "mlp", shape.ffn_hidden_size, shape.hidden_size),
    ]


def _moe(shape: ModelShape) -> list[_Rule]:
    """A mixture of experts without its experts."""
    hidden = shape.hidden_size
    rules = [
        _Rule("pre_mlp_layernorm.weight", (Piece("post_attention_layernorm.weight", (hidden,)),)),
        _Rule("mlp.router.weight", (Piece("mlp.gate.weight", (shape.num_experts, hidden)),)),
    ]
    if shape.shared_expert_hidden_size:
        gate = Piece("mlp.shared_expert_gate.weight", (1, hidden))
        rules += [
            _Rule("mlp.shared_experts.gate_weight", (gate,)),
            *_gated_mlp("mlp.shared_experts", "mlp.shared_expert", shape.shared_expert_hidden_size, hidden),
        ]
    return rules


def _expert(shape: ModelShape, fused: str, expert: int) -> list[_Rule]:
    """`fused`: what the names of a layer's fused experts begin with."""
    hidden, size = shape.hidden_size, shape.expert_hidden_size
    hf = f"mlp.experts.{expert}"
    up = f"{fused}.gate_up_proj", (shape.num_experts, 2 * size, hidden)
    down = f"{fused}.down_proj", (shape.num_experts, hidden, size)
    return [
        _Rule(
            f"mlp.experts.linear_fc1.weight{expert}",
            (
                Piece(f"{hf}.gate_proj.weight", (size, hidden), ROWS, Fused(*up, expert, 0)),
                Piece(f"{hf}.up_proj.weight", (size, hidden), ROWS, Fused(*up, expert, size)),
            ),
            torch.cat,
            _halves,
            Cut(0, (size, size)),
        ),
        _Rule(
            f"mlp.experts.linear_fc2.weight{expert}",
            (
                Piece(
                    f"{hf}.down_proj.weight",
                    (hidden, size),
                    COLUMNS,
                    Fused(*down, expert, 0),
                ),
            ),
        ),
    ]


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
        hidden = query.shape[-1]
        kinds = 2 if self.gated else 1
        query = query.view(-1, self.heads_per_group, kinds, self.dim, hidden).transpose(1, 2)
        groups = (query.flatten(1, 3), key.view(-1, self.dim, hidden), value.view(-1, self.dim, hidden))
        return torch.cat(groups, dim=1).flatten(0, 1)

    def part(self, shard: Tensor) -> list[Tensor]:
        kinds = 2 if self.gated else 1
        queries = kinds * self.heads_per_group * self.dim
        groups = shard.view(-1, queries + 2 * self.dim, shard.shape[-1])
        query, key, value = groups.split([queries, self.dim, self.dim], dim=1)
        query = query.unflatten(1, (kinds, self.heads_per_group, self.dim)).transpose(1, 2)
        return [query.flatten(0, 3), key.flatten(0, 1), value.flatten(0, 1)]


@dataclass(frozen=True)
class _DeltaNetInput:
    """The gated delta net's input projection. HF: for each key head [q | k | v | z] and [b | a] (v, z, b
    and a of its value heads). Megatron: [q | k | v | z | b | a], each of all heads."""

    key_dim: int
    value_dim: int
    values_per_key: int

    @property
    def _sizes(self) -> tuple[list[int], list[int]]:
        values = self.values_per_key * self.value_dim
        return [self.key_dim, self.key_dim, values, values], [self.values_per_key] * 2

    def join(self, cuts: list[Tensor]) -> Tensor:
        kinds = [
            kind.flatten(0, 1)
            for cut, sizes in zip(cuts, self._sizes, strict=True)
            for kind in cut.view(-1, sum(sizes), cut.shape[-1]).split(sizes, dim=1)
        ]
        return torch.cat(kinds)

    def part(self, shard: Tensor) -> list[Tensor]:
        qkvz, ba = self._sizes
        key_heads = len(shard) // (sum(qkvz) + sum(ba))
        kinds = [
            kind.unflatten(0, (key_heads, -1)) for kind in shard.split([key_heads * n for n in qkvz + ba])
        ]
        return [torch.cat(kinds[:4], dim=1).flatten(0, 1), torch.cat(kinds[4:], dim=1).flatten(0, 1)]


_MTP = re.compile(r"^mtp\.layers\.(\d+)\.")


def mtp_layers(names: Iterable[str]) -> int:
    """How many multi-token prediction layers a checkpoint with these tensors has, in either format."""
    return max((int(match[1]) + 1 for name in names if (match := _MTP.match(name))), default=0)


_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(?<=\.experts\.linear_fc[12]\.weight)(\d+)$")


def global_name(local_name: str, first_layer: int, first_expert: int) -> str:
    """A rank's own parameter name -> the name over the whole model. DDP's "module." is dropped."""
    name = local_name
    while name.startswith("module."):
        name = name.removeprefix("module.")
    name = _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + first_layer}.", name)
    return _EXPERT.sub(lambda match: str(int(match[1]) + first_expert), name)


def is_ignored(shape: ModelShape, name: str) -> bool:
    """Tensors of a checkpoint that the trained model has no use for: multi-token prediction heads
    (Qwen3-Next ships one for speculative decoding), rotary tables, the head's copy of tied embeddings."""
    return (
        (shape.is_hybrid and name.startswith("mtp."))
        or name.endswith("rotary_emb.inv_freq")
        or (shape.tie_word_embeddings and name == "lm_head.weight")
    )
