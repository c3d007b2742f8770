"""The parts of the model that each rank holds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_ibpo.config import ParallelConfig
from megatron_ibpo.models import ModelShape, padded_vocab_size, pipeline_layers
from megatron_ibpo.models.lora import is_adapter
from megatron_ibpo.models.weight_map import EXPERT_BIAS, Entry, global_name


@dataclass(frozen=True)
class Holding:
    """The part of the model that a rank holds."""

    tp_rank: int
    tp_size: int
    etp_rank: int
    etp_size: int
    layers: tuple[range, ...]
    """Layers of each model chunk; several only in an interleaved pipeline."""
    first_expert: int
    experts: int
    is_first_stage: bool
    is_last_stage: bool
    vocab_rows: int
    """Rows of embedding and head over all tensor-parallel ranks, padding included."""

    def holds(self, entry: Entry) -> bool:
        if entry.expert is not None and not 0 <= entry.expert - self.first_expert < self.experts:
            return False
        if entry.layer is None:
            wanted_first = entry.name.startswith("embedding.")
            return self.is_first_stage if wanted_first else self.is_last_stage
        return any(entry.layer in layers for layers in self.layers)

    def shard(self, entry: Entry) -> tuple[int, int]:
        """Return (rank, size) of the group that divides this entry's tensors."""
        if entry.expert is None:
            return self.tp_rank, self.tp_size
        return self.etp_rank, self.etp_size


def my_holding(shape: ModelShape, chunks: Sequence[Any]) -> Holding:
    """Return this rank's part, from Megatron's groups and the rank's model chunks, wrapped by DDP or not."""
    from megatron.core import parallel_state as groups

    models = [unwrapped(chunk) for chunk in chunks]
    numbers = [[layer.layer_number for layer in model.decoder.layers] for model in models]
    experts = shape.num_experts // groups.get_expert_model_parallel_world_size()
    return Holding(
        tp_rank=groups.get_tensor_model_parallel_rank(),
        tp_size=groups.get_tensor_model_parallel_world_size(),
        etp_rank=groups.get_expert_tensor_parallel_rank(),
        etp_size=groups.get_expert_tensor_parallel_world_size(),
        layers=tuple(range(of_chunk[0] - 1, of_chunk[-1]) for of_chunk in numbers),  # Megatron counts from 1
        first_expert=groups.get_expert_model_parallel_rank() * experts,
        experts=experts,
        is_first_stage=groups.is_pipeline_first_stage(),
        is_last_stage=groups.is_pipeline_last_stage(),
        vocab_rows=models[0].vocab_size,
    )


def holdings_of(shape: ModelShape, parallel: ParallelConfig, virtual_stages: int = 1) -> list[Holding]:
    """Return the holdings of one replica's ranks: tensor parallel first, then expert parallel, then pipeline.

    If expert parallelism is wider than tensor parallelism, the ranks beyond the first TP repeat its dense
    weights; if it is narrower, experts are repeated.
    """
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    experts = shape.num_experts // ep
    return [
        Holding(
            tp_rank=rank % tp,
            tp_size=tp,
            etp_rank=rank % etp,
            etp_size=etp,
            layers=layers,
            first_expert=rank // etp % ep * experts,
            experts=experts,
            is_first_stage=stage == 0,
            is_last_stage=stage == pp - 1,
            vocab_rows=padded_vocab_size(shape, parallel),
        )
        for stage, layers in enumerate(pipeline_layers(shape.num_layers, parallel, virtual_stages))
        for rank in range(max(tp, ep * etp))
    ]


def unwrapped(chunk: Any) -> Any:
    """Return the chunk without its DDP wrapper, if it has one."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def weights_by_global_name(chunks: Sequence[Any], holding: Holding) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's parameters, and buffers that are weights, under their names in the whole model;
    adapters are not among them."""
    for chunk, layers in zip(chunks, holding.layers, strict=True):
        yield from named_globally(chunk, layers.start, holding)


def named_globally(model: Any, first_layer: int, holding: Holding) -> Iterator[tuple[str, Tensor]]:
    """Yield the same for one model chunk whose layers start at `first_layer`, or for the multi-token
    prediction layer, which is outside that count."""
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            yield global_name(name, first_layer, holding.first_expert), parameter
    for name, buffer in model.named_buffers():
        if name.endswith(EXPERT_BIAS):
            yield global_name(name, first_layer, holding.first_expert), buffer


def shard_holders(entries: Sequence[Entry], holdings: Sequence[Holding]) -> list[tuple[tuple[int, ...], ...]]:
    """Return, for each entry and in shard order, the ranks with the shard when rank r holds `holdings[r]`."""
    holders_by_key: dict[tuple[object, ...], tuple[tuple[int, ...], ...]] = {}
    holders = []
    for entry in entries:
        # on which alone it depends; a large model has tens of thousands of entries
        key = entry.layer, entry.expert, entry.layer is None and entry.name.startswith("embedding.")
        if key not in holders_by_key:
            holders_by_key[key] = _holders(entry, holdings)
        holders.append(holders_by_key[key])
    return holders


def _holders(entry: Entry, holdings: Sequence[Holding]) -> tuple[tuple[int, ...], ...]:
    by_shard: dict[int, list[int]] = {}
    for rank, holding in enumerate(holdings):
        if holding.holds(entry):
            by_shard.setdefault(holding.shard(entry)[0], []).append(rank)
    return tuple(tuple(by_shard[shard]) for shard in sorted(by_shard))
