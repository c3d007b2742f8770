"""Replay of routing: routers repeat their earlier choices, from the engine that sampled or from an earlier
pass.

Only *which* experts is replayed; their weights are the trainer's own, so that gradients flow through them
(R3, arXiv 2510.11370). Megatron's RouterReplay keeps all routers and choices of a process in lists by the
order of calls; this one knows the micro-batch of each call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_ibpo.basics.records import ExpertIds, expert_ids, no_expert
from megatron_ibpo.policy.packing import PackedBatch

CHANGED, LIVE, CHOICES = "routing_changed", "routing_live", "routing_choices"
"""Counts of choices (one per token and layer) in passes that train: choices in which the router itself would
have differed from the replay, choices without a record, and all."""


class RoutingReplay:
    """The routers of this rank's part of a model."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        """`chunks` are the model's parts on this rank. Raises ValueError if the model has no routers."""
        config = chunks[0].config
        if config.num_moe_experts is None:
            raise ValueError("replay of routing: the model has no routers")
        routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
        self.layers = [_place(router.layer_number - 1, config.moe_layer_freq) for router in routers]
        """Index of each router here among all routers of the model."""
        self.num_experts: int = config.num_moe_experts
        self._chosen: int = config.moe_router_topk
        self._routers = [_Router(self, column) for column in range(len(routers))]
        for router, replay in zip(routers, self._routers, strict=True):
            router.router_replay = replay
        self.trains = False
        self.records = False
        self.replayed_NLK: Tensor | None = None
        """int32 of the rows that routers of this rank see; negative: nothing to replay."""
        self.is_real_N = torch.empty(0, dtype=torch.bool)
        """True for rows that are not padding."""
        self.real_rows = 0
        self.in_forward = False
        self._changed: Tensor | float = 0.0
        self._live: Tensor | float = 0.0
        self._choices = 0.0

    def of_own_layers(self, choices: ExpertIds) -> ExpertIds:
        """Return [.., routers of the model, K] → [.., routers here, K]."""
        return choices[:, self.layers]

    @contextmanager
    def schedule(self, *, trains: bool, records: bool) -> Iterator[None]:
        """Prepare the routers for all micro-batches of one pass, within the context.

        Args:
            trains: there is a backward pass, which may recompute parts of the forward pass; RuntimeError if
                that was another part than the forward pass announced.
            records: keep the routers' choices for `recorded`.
        """
        self.trains, self.records = trains, records
        for router in self._routers:
            router.chosen.clear()
        try:
            yield
        finally:
            self.trains = self.records = False
            num_pending = [len(router.to_recompute) for router in self._routers]
            for router in self._routers:
                router.to_recompute.clear()
        if any(num_pending):
            raise RuntimeError(
                f"{sum(num_pending)} micro-batches under recomputation never ran their routers again"
            )

    @contextmanager
    def forward(self, batch: PackedBatch) -> Iterator[None]:
        """Prepare the routers for one micro-batch's forward pass through one chunk, within the context."""
        rows = _own_rows(batch.input_ids_1N.shape[1])
        self.replayed_NLK = None
        if batch.routed_experts_NLK is not None:
            ids = batch.routed_experts_NLK[rows]
            wide = np.where(ids == no_expert(ids), -1, ids.astype(np.int32))
            self.replayed_NLK = torch.from_numpy(wide).to(batch.input_ids_1N.device)
        is_real_N = batch.is_real_N[rows]
        self.is_real_N = torch.from_numpy(is_real_N).to(batch.input_ids_1N.device)
        self.real_rows = int(is_real_N.sum())
        self.in_forward = True
        try:
            yield
        finally:
            self.in_forward = False
            self.replayed_NLK = None

    def count(self, changed: Tensor | float, live: Tensor | float, choices: int) -> None:
        """Add to the result of `take_counts`; nothing waits for the device."""
        self._changed = self._changed + changed
        self._live = self._live + live
        self._choices += choices

    def take_counts(self) -> dict[str, float]:
        """Return this rank's counts since the last call, which add up over all ranks."""
        counts = {CHANGED: float(self._changed), LIVE: float(self._live), CHOICES: self._choices}
        self._changed = self._live = self._choices = 0.0
        return counts

    def recorded(self, batches: Sequence[PackedBatch]) -> list[ExpertIds]:
        """Return [input tokens, routers here, K] for each micro-batch of the preceding recording pass; the
        same on all tensor- and context-parallel ranks, and collective among these."""
        if not self._routers:
            empty = [np.empty((len(batch.places_T), 0, self._chosen), np.int32) for batch in batches]
            return [expert_ids(ids, self.num_experts) for ids in empty]
        choices = []
        for number, batch in enumerate(batches):
            own_NLK = torch.stack([router.chosen[number] for router in self._routers], 1)
            ids = _all_rows(own_NLK).cpu().numpy()[batch.places_T]
            choices.append(expert_ids(ids, self.num_experts))
        for router in self._routers:
            router.chosen.clear()
        return choices


class _Router:
    """A router's stand-in for Megatron's RouterReplay."""

    def __init__(self, replay: RoutingReplay, column: int) -> None:
        self._replay, self._column = replay, column
        self.chosen: list[Tensor] = []
        """int32 [rows, K] of each micro-batch of a pass that records."""
        self.to_recompute: deque[Tensor | None] = deque()
        """Choices given in forward passes that a checkpoint will recompute, in order: a chunk's backward
        passes take the micro-batches in the order of its forward passes, under every schedule."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return what RouterReplay returns: (scores [rows, K] of the chosen, their ids int64 [rows, K])."""
        assert default_compute_topk is not None
        replay = self._replay
        replayed = self._replayed_ids()
        if replayed is None:
            values, ids = default_compute_topk(scores, topk, num_groups, group_topk)
        else:
            with torch.no_grad():
                _, live = default_compute_topk(scores, topk, num_groups, group_topk)
            ids = torch.where(replayed[:, :1] < 0, live, replayed.long())
            values = scores.gather(1, ids)
            if replay.trains and replay.in_forward:
                self._count(replayed, live, ids)
        if replay.records and replay.in_forward:
            self.chosen.append(ids.int())
        elif replayed is None and replay.trains and replay.in_forward:
            replay.count(0.0, float(replay.real_rows), replay.real_rows)
        return values, ids

    def _replayed_ids(self) -> Tensor | None:
        replay = self._replay
        if not replay.in_forward:
            if not replay.trains:
                return None
            if not self.to_recompute:
                raise RuntimeError(
                    "a router ran again in a backward pass that its forward pass did not announce: "
                    "replay of routing supports only Megatron's own recomputation"
                )
            return self.to_recompute.popleft()
        ids = None if replay.replayed_NLK is None else replay.replayed_NLK[:, self._column]
        if replay.trains and not torch.is_grad_enabled():  # Megatron's checkpoints run forward without
            self.to_recompute.append(ids)
        return ids

    def _count(self, replayed: Tensor, live: Tensor, ids: Tensor) -> None:
        replay = self._replay
        absent = (replayed[:, 0] < 0) & replay.is_real_N
        differs = (live.sort(1).values != ids.sort(1).values).any(1) & replay.is_real_N
        replay.count(differs.sum(), absent.sum(), replay.real_rows)


def _place(layer: int, frequency: int | list[int]) -> int:
    """Return a layer's place among those with experts, by Megatron's `moe_layer_freq`."""
    return layer if isinstance(frequency, int) else sum(frequency[:layer])


def _own_rows(rows: int) -> slice:
    """Return the rows that routers of this rank see: its part under sequence parallelism, which mixtures
    always have under tensor parallelism."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    return slice(rows // size * rank, rows // size * (rank + 1))


def _all_rows(own_NLK: Tensor) -> Tensor:
    """Return the rows of all ranks that share the sequences, in order."""
    groups = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_context_parallel_group()
    for group in groups:
        if group.size() > 1:
            whole_NLK = own_NLK.new_empty(group.size() * own_NLK.shape[0], *own_NLK.shape[1:])
            dist.all_gather_into_tensor(whole_NLK, own_NLK.contiguous(), group=group)
            own_NLK = whole_NLK
    return own_NLK
