"""The parts of the model that each rank holds, and Megatron parameters under Hugging Face names: the parts of
each tensor and the ranks that hold them.

Names are those of Hugging Face checkpoints with one tensor per expert, which both transformers and vLLM's
`load_weights` take. If a family's checkpoints hold all experts of a layer in one tensor only, its name is
used, and each rank has the part of its experts."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ibpo.config import ParallelConfig
from megatron_ibpo.models import ModelShape, padded_vocab_size, pipeline_layers
from megatron_ibpo.models.lora import is_adapter
from megatron_ibpo.models.weight_map import EXPERT_BIAS, Entry, Piece, global_name, weight_map
from megatron_ibpo.weights.layout.regions import Box, Gather, Region, TensorMeta, full_box


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
    weights; if it is narrower, experts are repeated."""
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
    holders: dict[tuple[object, ...], tuple[tuple[int, ...], ...]] = {}
    # on which alone it depends; a large model has tens of thousands of entries
    keys = [(e.layer, e.expert, e.layer is None and e.name.startswith("embedding.")) for e in entries]
    for key, entry in zip(keys, entries, strict=True):
        if key not in holders:
            by_shard: dict[int, list[int]] = defaultdict(list)
            for rank, holding in enumerate(holdings):
                if holding.holds(entry):
                    by_shard[holding.shard(entry)[0]].append(rank)
            holders[key] = tuple(tuple(by_shard[shard]) for shard in sorted(by_shard))
    return [holders[key] for key in keys]


# ----------------------------------------------------------------------------------------------------- export


@dataclass(frozen=True)
class _Task:
    """An entry and the ranks that hold its shards."""

    entry: Entry
    holders: tuple[tuple[int, ...], ...]
    """Ranks that hold each shard, in order."""

    def boxes(self, number: int, shard: int) -> list[Box]:
        """Return the boxes of piece `number` in shard number `shard` of the entry, in the order of its rows
        or columns."""
        piece = self.entry.pieces[number]
        bounds, dim = full_box(piece.shape), piece.cut.dim if piece.cut else 0
        return [
            _in_stored(piece, (*bounds[:dim], (start, start + length), *bounds[dim + 1 :]))
            for start, length in self.entry.ranges(number, shard, len(self.holders))
        ]

    def regions(self, number: int) -> tuple[Region, ...]:
        """Return the regions of piece `number` with the ranks that hold them."""
        piece = self.entry.pieces[number]
        if piece.cut is None:
            everyone = tuple(sorted(rank for ranks in self.holders for rank in ranks))
            return (Region(_in_stored(piece, full_box(piece.shape)), everyone),)
        return tuple(
            Region(box, ranks)
            for shard, ranks in enumerate(self.holders)
            for box in self.boxes(number, shard)
        )


class HFExport:
    """The model's weights as a `WeightSource`; iterating gathers them whole on global rank 0 (`Gather`), on
    the parameters' device and in their dtype or their entry's own."""

    def __init__(
        self,
        chunks: list[Any],
        shape: ModelShape,
        *,
        mtp: Any = None,
        values: Mapping[str, Callable[[], Tensor]] | None = None,
        entries: Sequence[Entry] | None = None,
        bucket_bytes: int = 512 * 1024**2,
    ):
        """Plan the export. Collective. `chunks` come from `build_model`, wrapped by DDP or not.

        Args:
            mtp: from `build_mtp`: its weights follow the policy's; None: without them.
            values: functions by global name whose result replaces a parameter's content on this rank.
            entries: entries to offer, in this order; None: all weights of the model.
            bucket_bytes: as in `Gather`.
        """
        holding = my_holding(shape, chunks)
        self._rank = dist.get_rank()
        self._weights = dict(weights_by_global_name(chunks, holding))
        if mtp is not None:
            self._weights |= named_globally(mtp, 0, holding)
        self._values = values or {}
        first = next(iter(self._weights.values()))
        self.dtype: torch.dtype = first.dtype
        self.device: torch.device = first.device
        holdings: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(holdings, holding)
        layers = int(mtp is not None)
        offered = checkpoint_entries(shape, layers, holding.vocab_rows) if entries is None else entries
        placed = zip(offered, shard_holders(offered, holdings), strict=True)
        self._tasks = [_Task(*task) for task in placed]
        self._metadata = metadata_of(offered, self.dtype)
        self._regions = _regions(self._tasks)
        self._gather = Gather(self, to=0, bucket_bytes=bucket_bytes, device=self.device)

    def metadata(self) -> list[TensorMeta]:
        return self._metadata

    def regions(self) -> list[tuple[Region, ...]]:
        return self._regions

    def local(self) -> Iterator[dict[Box, Tensor]]:
        stored_boxes: dict[Box, Tensor] = {}
        for task in self._tasks:
            for piece, boxes in zip(task.entry.pieces, self._local_boxes(task), strict=True):
                stored_boxes |= boxes
                if piece.ends_stored:
                    yield stored_boxes
                    stored_boxes = {}

    def _local_boxes(self, task: _Task) -> list[dict[Box, Tensor]]:
        """Return, for each piece, this rank's part of the tensor that it is stored in."""
        shard = next((shard for shard, ranks in enumerate(task.holders) if self._rank in ranks), None)
        if shard is None:
            return [{} for _ in task.entry.pieces]
        name = task.entry.name
        read = self._values.get(name)
        weight = self._weights[name].detach() if read is None else read()
        padding = task.entry.padding(shard, len(task.holders))
        parts = task.entry.take_apart(weight[: len(weight) - padding], shard, len(task.holders))
        return [
            _by_box(task.entry.pieces[number], part, task.boxes(number, shard))
            for number, part in enumerate(parts)
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor | None]]:
        return iter(self._gather)


def metadata_of(entries: Sequence[Entry], dtype: torch.dtype) -> list[TensorMeta]:
    """Return the tensors of these entries in order, as a trainer of `dtype` offers them."""
    return [
        TensorMeta(name, entry.dtype or dtype, size)
        for entry in entries
        for name, size in (piece.stored for piece in entry.pieces if piece.ends_stored)
    ]


def _regions(tasks: list[_Task]) -> list[tuple[Region, ...]]:
    regions, parts = [], list[Region]()
    for task in tasks:
        for number, piece in enumerate(task.entry.pieces):
            parts += task.regions(number)
            if piece.ends_stored:
                regions.append(tuple(parts))
                parts = []
    return regions


def _in_stored(piece: Piece, box: Box) -> Box:
    """Return a box of a piece as a box of the tensor that it is stored in."""
    if piece.fused is None or not piece.fused.always:
        return box
    return ((piece.fused.expert, piece.fused.expert + 1), *box)


def _by_box(piece: Piece, part: Tensor, boxes: list[Box]) -> dict[Box, Tensor]:
    """Return a shard of a piece, cut at the borders of its boxes."""
    dim = piece.cut.dim if piece.cut else 0
    if not boxes:
        return {}
    if piece.fused is not None and piece.fused.always:
        return {boxes[0]: part[None]}
    sizes = [box[dim][1] - box[dim][0] for box in boxes]
    return dict(zip(boxes, part.split(sizes, dim), strict=True))


def checkpoint_entries(shape: ModelShape, mtp_layers: int, vocab_rows: int | None = None) -> list[Entry]:
    """Return all entries in checkpoint order; every HF tensor once."""
    entries = []
    names: set[str] = set()
    for entry in weight_map(shape, mtp_layers, vocab_rows).values():
        if entry.pieces[0].name not in names:  # the head of tied embeddings
            entries.append(entry)
        names.update(piece.name for piece in entry.pieces)
    return entries
