"""A vLLM worker that records the experts chosen for each token of each request, with the first model runner.

vLLM has such a record itself (`enable_return_routed_experts`) for its second one (`model_runner`).
This module is imported in vLLM's process alone.
"""

from functools import partial

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from megatron_ibpo.engines.vllm.routing_record import Choices, RoutingRecord
from megatron_ibpo.engines.vllm.worker import WorkerExtension


class RecordingWorker(WorkerExtension):
    """`WorkerExtension` with a `RoutingRecord`, since vLLM takes only one class of methods for its
    workers."""

    def record_routing(self, num_experts: int) -> None:
        """Start recording.

        Raises:
            RuntimeError: the model has no routers, or routes inside a kernel that does not reveal it.
        """
        runners = [m for m in self.model_runner.get_model().modules() if isinstance(m, MoERunner)]
        if not runners or any(
            not isinstance(m.router, BaseRouter) or m._quant_method.is_monolithic for m in runners
        ):
            raise RuntimeError("this model's routers cannot be watched: drop --use-rollout-routing-replay")
        self._record = RoutingRecord(num_experts)
        self._step: list[Choices] = []
        for place, module in enumerate(sorted(runners, key=lambda m: m.layer_id)):
            module.router.set_capture_fn(partial(self._routed, place, len(runners)))

    def take_routing(self, requests: list[tuple[str, int]]) -> list[tuple[str, list[int], bytes] | None]:
        """Return `RoutingRecord.take` of requests, by the names under which they were submitted, as (dtype,
        shape, bytes): what vLLM sends between processes."""
        full = self._full_names()
        records = [self._record.take(full.get(name, name), tokens) for name, tokens in requests]
        return [None if ids is None else (ids.dtype.str, list(ids.shape), ids.tobytes()) for ids in records]

    def forget_routing(self, names: list[str]) -> None:
        """Forget requests that were dropped."""
        full = self._full_names()
        for name in names:
            self._record.forget(full.get(name, name))

    def _full_names(self) -> dict[str, str]:
        """Return the full names of requests: vLLM appends a random part."""
        return {full.rpartition("-")[0]: full for full in self._record.names()}

    def _routed(self, place: int, layers: int, topk_ids: torch.Tensor) -> None:
        """Receive a router's answer in the forward pass of a step; layers come in order."""
        if place == 0:
            self._step = []
        self._step.append(topk_ids.to(torch.int32).numpy().copy())
        if place == layers - 1:
            self._note(np.stack(self._step, 1))

    def _note(self, choices: Choices) -> None:
        """Assign the rows of a step to requests; rows past the last request's are padding."""
        batch = self.model_runner.input_batch
        starts = self.model_runner.query_start_loc.np
        for row, request in enumerate(batch.req_ids):
            first = int(batch.num_computed_tokens_cpu[row])
            self._record.add(request, first, choices[starts[row] : starts[row + 1]])
