"""Parameters of every pipeline stage's ranks, counted by the weight map."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from megatron_ibpo.config import Config, ParallelConfig
from megatron_ibpo.models import ModelShape, padded_vocab_size, pipeline_layers
from megatron_ibpo.models.lora import Lora, chosen_lora, lora_entries
from megatron_ibpo.models.weight_map import Entry, weight_map
from megatron_ibpo.policy.overrides import read_overrides

BEGINNING, END = -1, -2
"""Places, beside the layers' numbers, of the embedding, and of the final norm, the head and what follows."""
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class StagePart:
    """The parameters of each rank of a pipeline stage. All its ranks have the same: layouts divide evenly."""

    pipeline: int
    """Index of the stage."""
    dense: int
    """Parameters outside the experts; each has DP copies."""
    experts: int
    """Parameters of experts; each has expert-DP copies."""
    frozen_dense: int
    """Parameters of `dense` that are not trained."""
    frozen_experts: int
    """Parameters of `experts` that are not trained."""
    layers: int
    largest: int
    """Elements of the largest single parameter."""

    @property
    def parameters(self) -> int:
        return self.dense + self.experts

    @property
    def trained_dense(self) -> int:
        return self.dense - self.frozen_dense

    @property
    def trained_experts(self) -> int:
        return self.experts - self.frozen_experts

    @property
    def trained(self) -> int:
        """Parameters that have gradients and optimizer state."""
        return self.trained_dense + self.trained_experts


@dataclass(frozen=True)
class Place:
    """One rank's place in the layout: its index in each of its groups; data and context parallel are one."""

    rank: int
    tensor: int
    pipeline: int
    data: int
    expert: int
    expert_data: int


@dataclass(frozen=True)
class Census:
    """Parameter counts of the whole model and of its parts."""

    total: int
    """Parameters of the model, each counted once, without adapters."""
    trained: int
    """Trained parameters: the model's, or those of its adapters."""
    largest: int
    """Elements of the largest tensor of the whole model."""
    stages: list[StagePart]
    parallel: ParallelConfig
    world_size: int

    @property
    def data_parallel(self) -> int:
        """Number of ranks with the same dense parameters: data parallel times context parallel."""
        return self._stage_size // self.parallel.tensor_model_parallel_size

    @property
    def expert_data_parallel(self) -> int:
        parallel = self.parallel
        return self._stage_size // (
            parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
        )

    @property
    def _stage_size(self) -> int:
        return self.world_size // len(self.stages)

    def ranks(self, stage: int) -> range:
        """Return the ranks of a pipeline stage."""
        return range(stage * self._stage_size, (stage + 1) * self._stage_size)

    def place(self, rank: int) -> Place:
        """Return Megatron's placement of a rank: tensor-parallel first, then expert, data and pipeline
        parallel."""
        stage, inner = divmod(rank, self._stage_size)
        data, tensor = divmod(inner, self.parallel.tensor_model_parallel_size)
        expert_data, expert = divmod(
            inner // self.parallel.expert_tensor_parallel_size, self.parallel.expert_model_parallel_size
        )
        return Place(rank, tensor, stage, data, expert, expert_data)


@dataclass(frozen=True)
class _Parameters:
    """The parameters of one place that ranks divide in the same way."""

    place: int
    """Number of the layer, or `BEGINNING` or `END`."""
    is_expert: bool
    is_divided: bool
    """True if tensor-parallel ranks divide them; otherwise each holds all."""
    elements: int
    largest: int
    """Elements of the largest of them."""

    def on_rank(self, parallel: ParallelConfig) -> int:
        """Return the elements of one rank."""
        experts = parallel.expert_model_parallel_size if self.is_expert else 1
        return self.elements // (self.ranks(parallel) * experts)

    def ranks(self, parallel: ParallelConfig) -> int:
        """Return the number of ranks that divide each of them."""
        if not self.is_divided:
            return 1
        tensor, expert_tensor = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
        return expert_tensor if self.is_expert else tensor


def take_census(shape: ModelShape, config: Config, world_size: int) -> Census:
    """Count the parameters. The layout must have passed `check_layout`."""
    parallel, mtp = config.parallel, config.model.mtp_num_layers
    last = parallel.pipeline_model_parallel_size - 1
    lora = chosen_lora(config.model, shape)
    model = _model(shape, mtp, padded_vocab_size(shape, parallel))
    adapters = () if lora is None else _adapters(shape, lora)
    parts = []
    for stage, pieces in enumerate(
        pipeline_layers(shape.num_layers, parallel, read_overrides(config).chunks)
    ):
        layers = [layer for piece in pieces for layer in piece]
        places = {*layers, *([BEGINNING] if stage == 0 else []), *([END] if stage == last else [])}
        if stage == last and shape.tie_word_embeddings:
            places.add(BEGINNING)  # the last stage has a copy of the embedding as its head
        stage_groups = [group for group in model if group.place in places]
        base = _on_rank(stage_groups, parallel)
        added = _on_rank([a for a in adapters if a.place in places], parallel)
        parts.append(
            StagePart(
                pipeline=stage,
                dense=base[False] + added[False],
                experts=base[True] + added[True],
                frozen_dense=0 if lora is None else base[False],
                frozen_experts=0 if lora is None else base[True],
                layers=len(layers),
                largest=max(group.largest // group.ranks(parallel) for group in stage_groups),
            )
        )
    total, trained = count_parameters(shape, config)
    largest = max(group.largest for group in _model(shape, mtp, None))
    return Census(total, trained, largest, parts, parallel, world_size)


def count_parameters(shape: ModelShape, config: Config) -> tuple[int, int]:
    """Return (parameters of the model, each counted once, without adapters; those that are trained)."""
    total = sum(group.elements for group in _model(shape, config.model.mtp_num_layers, None))
    lora = chosen_lora(config.model, shape)
    return total, total if lora is None else sum(group.elements for group in _adapters(shape, lora))


def _on_rank(groups: Iterable[_Parameters], parallel: ParallelConfig) -> Counter[bool]:
    """Return the elements of one rank, outside the experts (False) and in them (True)."""
    elements = Counter[bool]()
    for group in groups:
        elements[group.is_expert] += group.on_rank(parallel)
    return elements


@lru_cache(maxsize=64)
def _model(shape: ModelShape, mtp_layers: int, vocab_rows: int | None) -> tuple[_Parameters, ...]:
    entries = weight_map(shape, mtp_layers, vocab_rows)
    if shape.tie_word_embeddings:
        del entries[_HEAD]
    return _grouped(entries.values())


@lru_cache(maxsize=64)
def _adapters(shape: ModelShape, lora: Lora) -> tuple[_Parameters, ...]:
    return _grouped(lora_entries(shape, lora))


def _grouped(entries: Iterable[Entry]) -> tuple[_Parameters, ...]:
    sizes: dict[tuple[int, bool, bool], list[int]] = {}
    for entry in entries:
        if entry.dtype is not None:
            continue  # a buffer
        place = entry.layer if entry.layer is not None else BEGINNING if entry.name == _EMBEDDING else END
        cut, size = entry.cut, math.prod(entry.shape)
        if cut is not None and cut.padded is not None:
            size = size // entry.shape[cut.dim] * cut.padded
        sizes.setdefault((place, entry.expert is not None, cut is not None), []).append(size)
    return tuple(_Parameters(*key, sum(of_group), max(of_group)) for key, of_group in sizes.items())
