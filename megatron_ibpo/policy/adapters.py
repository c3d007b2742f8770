"""Low-rank adapters beside a Megatron model's linear layers: all that a run with --lora-rank trains.

A hook adds their output to the layer's. Ranks divide B's rows as a column-parallel layer's, A's columns as a
row-parallel one's; A's output, rank wide, is passed on as the layer's input or output is. Of a factor that is
whole on several ranks each has part of the gradient: Megatron sums it where `sequence_parallel` is set, the
backward pass for experts.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ibpo.config import ModelConfig
from megatron_ibpo.models import ModelShape
from megatron_ibpo.models.local_modules import norm_function
from megatron_ibpo.models.lora import Lora, Pair, adapted, chosen_lora, lora_entries, module_of, pairs
from megatron_ibpo.models.weight_map import Entry, global_name, weight_map
from megatron_ibpo.weights.formats.hf_models import Adapters
from megatron_ibpo.weights.layout.export import HFExport, Holding, my_holding


def add_adapters(chunks: Sequence[Any], shape: ModelShape, lora: Lora, seed: int) -> None:
    """Freeze the parts of a model on this rank, not wrapped yet, and put adapters beside its layers.

    B starts at 0, so that the model computes as before, and A as in PEFT, uniform within ±1/√(its inputs),
    the same under every layout.
    """
    holding = my_holding(shape, chunks)
    by_module: dict[str, list[Entry]] = {}
    for entry in weight_map(shape).values():
        if holding.holds(entry) and pairs(entry, lora):
            by_module.setdefault(module_of(entry), []).append(entry)
    for chunk, layers in zip(chunks, holding.layers, strict=True):
        chunk.requires_grad_(False)
        for name, module in list(chunk.named_modules()):
            if entries := by_module.get(global_name(name, layers.start, 0)):
                module.lora = Adapter(module, entries, lora, holding, chunk.config.sequence_parallel, seed)
                module.register_forward_hook(_add)
        if chunk.pre_process:  # recomputed layers would have no gradient if their input needs none
            chunk.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())


def _add(linear: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Add the adapters to a layer, as its hook: return (output of both, the layer's bias)."""
    x, *tokens_per_expert = inputs
    if hasattr(linear, "layer_norm_weight"):  # the layer's own norm, whose result it does not expose
        config = linear.config
        x = norm_function(config)(
            x, linear.layer_norm_weight, config.layernorm_epsilon, config.layernorm_zero_centered_gamma
        )
    output, bias = outputs
    return output + linear.lora(x, *tokens_per_expert), bias


class Adapter(Module):
    """This rank's part of the adapters beside one linear layer, or beside one layer of all its experts."""

    def __init__(
        self,
        linear: Module,
        entries: Sequence[Entry],
        lora: Lora,
        holding: Holding,
        sequence_parallel: bool,
        seed: int,
    ):
        """`entries` are those of the layer's matrices on this rank: one, or one per expert."""
        super().__init__()
        self.entries, self.scale, self.sequence_parallel = tuple(entries), lora.scale, sequence_parallel
        self.shard = holding.shard(entries[0])
        self.pairs = [pairs(entry, lora) for entry in entries]
        """Pairs of matrices of each entry."""
        self.by_columns = entries[0].cut is not None and entries[0].cut.dim == 1
        weight = next(linear.parameters())
        for of_experts in zip(*self.pairs, strict=True):
            pair = of_experts[0]
            initial = [
                _initial(expert_pair.a, seed, *self.shard, weight.device) for expert_pair in of_experts
            ]
            self._register(f"A{pair.number}", initial, pair.a, weight.dtype)
            ranks = 1 if self.by_columns else self.shard[1]
            for section, rows in enumerate(pair.sections()):
                blank = torch.zeros(rows // ranks, lora.rank, device=weight.device)
                self._register(f"B{pair.number}_{section}", [blank] * len(entries), pair.b, weight.dtype)

    def _register(self, name: str, values: list[Tensor], entry: Entry, dtype: torch.dtype) -> None:
        parameter: Any = Parameter((torch.stack(values) if self._is_moe else values[0]).to(dtype))
        divided = entry.cut is not None
        dim = entry.cut.dim + self._is_moe if entry.cut else -1
        set_tensor_model_parallel_attributes(parameter, divided, dim, 1)
        if self._is_moe:
            parameter.allreduce = False
        else:
            parameter.sequence_parallel = self.sequence_parallel and not divided
        self.register_parameter(name, parameter)

    @property
    def _is_moe(self) -> bool:
        return self.entries[0].expert is not None

    def forward(self, x: Tensor, tokens_per_expert: Sequence[int] | None = None) -> Tensor:
        """Return what to add to the layer's output, for its input `x` after its norm; of experts with the
        numbers of rows that belong to each, in order."""
        a, b = self._factors()
        if tokens_per_expert is None:
            return F.linear(self._between(F.linear(x, a) * self.scale), b)
        # summed over the ranks that divide an expert: each has its own rows of it, or its own columns
        group = parallel_state.get_expert_tensor_parallel_group()
        a, b = (
            (a, copy_to_tensor_model_parallel_region(b, group=group))
            if self.by_columns
            else (copy_to_tensor_model_parallel_region(a, group=group), b)
        )
        parts = [
            F.linear(F.linear(rows, a[expert]) * self.scale, b[expert])
            for expert, rows in enumerate(x.split(list(tokens_per_expert)))
        ]
        return torch.cat(parts)

    def _between(self, hidden: Tensor) -> Tensor:
        """Turn the ranks' parts of A's output into the input of their parts of B."""
        if self.by_columns:
            if self.sequence_parallel:
                return reduce_scatter_to_sequence_parallel_region(hidden)
            return reduce_from_tensor_model_parallel_region(hidden)
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden)
        return copy_to_tensor_model_parallel_region(hidden)

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Return (A, B) of the whole layer on this rank: the factors of all its HF matrices as one, of
        experts with these as the first dimension."""
        a = torch.cat([self._a(pair) for pair in self.pairs[0]], dim=-2)
        b_by_number = {pair.number: self._b(pair) for pair in self.pairs[0]}
        entry = self.entries[0]
        if self._is_moe:
            return a, b_by_number[0]
        rank, padding_before, rows = a.shape[0] // len(b_by_number), 0, []
        for number in range(len(adapted(entry))):
            if number in b_by_number:
                padding_after = a.shape[0] - padding_before - rank
                rows.append(F.pad(b_by_number[number], (padding_before, padding_after)))
                padding_before += rank
            else:
                num_rows = sum(length for _, length in entry.ranges(number, *self.shard))
                rows.append(a.new_zeros(num_rows, a.shape[0]))
        return a, entry.assemble(rows, *self.shard)

    def _a(self, pair: Pair) -> Tensor:
        factor: Tensor = getattr(self, f"A{pair.number}")
        return factor

    def _b(self, pair: Pair) -> Tensor:
        sections = [getattr(self, f"B{pair.number}_{section}") for section in range(len(pair.sections()))]
        return torch.cat(sections, dim=-2)

    @torch.no_grad()
    def added(self, place: int) -> Tensor:
        """Return the increase of this rank's part of matrix number `place`: alpha/rank · B·A, at least
        fp32."""
        factors = self._factors()
        a, b = (factor[place] if self._is_moe else factor for factor in factors)
        dtype = torch.promote_types(a.dtype, torch.float32)
        return self.scale * (b.to(dtype) @ a.to(dtype))

    def factors_by_name(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """Yield this rank's part of each A and B, under the names of their entries."""
        for place, of_entry in enumerate(self.pairs):
            for pair in of_entry:
                for entry, read in ((pair.a, self._a), (pair.b, self._b)):
                    yield entry.name, partial(self._read_factor, read, pair, place)

    @torch.no_grad()
    def _read_factor(self, read: Callable[[Pair], Tensor], pair: Pair, place: int) -> Tensor:
        return read(pair)[place] if self._is_moe else read(pair)

    def sharded(self) -> Iterator[tuple[str, ShardedTensor]]:
        """Yield (name in this module, sharded tensor to store in a Megatron checkpoint)."""
        parameter: Any
        for name, parameter in self.named_parameters():
            offsets, rank = [], self.shard[0]
            if self._is_moe:
                experts = parallel_state.get_expert_model_parallel_rank()
                offsets.append((0, experts, parallel_state.get_expert_model_parallel_world_size()))
                data = parallel_state.get_expert_data_parallel_rank()
            else:
                data = parallel_state.get_data_parallel_rank(with_context_parallel=True)
            if parameter.tensor_model_parallel:
                offsets.append((parameter.partition_dim, *self.shard))
                rank = 0
            key = f"{module_of(self.entries[0])}.lora.{name}"
            yield (
                name,
                ShardedTensor.from_rank_offsets(key, parameter, *offsets, replica_id=(0, rank, data)),
            )


def _initial(entry: Entry, seed: int, rank: int, ranks: int, device: torch.device) -> Tensor:
    """Return this rank's part of an A, drawn from a seed of its own name."""
    if device.type == "meta":
        return torch.empty(entry.shard_shape(rank, ranks), device=device)
    digest = hashlib.sha256(f"{seed} {entry.pieces[0].name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    matrix = torch.empty(entry.shape).uniform_(-1, 1, generator=generator) / math.sqrt(entry.shape[1])
    if entry.cut is None:
        return matrix.to(device)
    parts = [matrix.narrow(entry.cut.dim, *span) for span in entry.ranges(0, rank, ranks)]
    return torch.cat(parts, dim=entry.cut.dim).to(device)


def sharded_adapters(chunk: Module) -> dict[str, ShardedTensor]:
    """Return the adapters' sharded tensors by their parameters' names in a part of the model, not wrapped."""
    return {
        f"{module}.{name}": sharded
        for module, adapter in chunk.named_modules()
        if isinstance(adapter, Adapter)
        for name, sharded in adapter.sharded()
    }


def adapter_values(chunks: Sequence[Module]) -> dict[str, Callable[[], Tensor]]:
    """Return functions that give this rank's part of each A and B, by the names of `lora_entries`."""
    return {name: read for adapter, _ in _adapters(chunks) for name, read in adapter.factors_by_name()}


@torch.no_grad()
def shift_factors(chunks: Sequence[Module], factor: str, amount: float) -> None:
    """Add a number to every element of each A, or of each B."""
    for adapter, _ in _adapters(chunks):
        for name, parameter in adapter.named_parameters():
            if name.startswith(factor):
                parameter.add_(amount)


def merged_values(chunks: Sequence[Module]) -> Mapping[str, Callable[[], Tensor]]:
    """Return functions that give this rank's part of each matrix as the model computes with it, by global
    name: the sum with the adapters' part, rounded once to the matrix's dtype."""
    values = {}
    for adapter, linear in _adapters(chunks):
        for place, entry in enumerate(adapter.entries):
            weight = getattr(linear, "weight" if entry.expert is None else f"weight{place}")
            values[entry.name] = partial(_merged, weight, adapter, place)
    return values


def _merged(weight: Tensor, adapter: Adapter, place: int) -> Tensor:
    return (weight.detach() + adapter.added(place)).to(weight.dtype)


def offered_adapters(chunks: list[Any], shape: ModelShape, model: ModelConfig) -> Adapters | None:
    """Return the adapters of all ranks, for saving; None if there are none. Collective."""
    lora = chosen_lora(model, shape)
    if lora is None:
        return None
    export = HFExport(chunks, shape, values=adapter_values(chunks), entries=list(lora_entries(shape, lora)))
    return Adapters(export, shape, lora, model.hf_dir)


def _adapters(chunks: Sequence[Module]) -> Iterator[tuple[Adapter, Module]]:
    """Yield each adapter with its layer."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(adapter := getattr(module, "lora", None), Adapter):
                yield adapter, module
