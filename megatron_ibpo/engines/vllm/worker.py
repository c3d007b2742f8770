"""The extension of vLLM's workers (`worker_extension_cls`): it watches weight updates and keeps receipts.
Importing it makes this project's transports known to vLLM, and applies the fixes."""

import logging
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.platforms import current_platform

from megatron_ibpo.engines.vllm.direct_layers import call_directly
from megatron_ibpo.engines.vllm.emulated_bfloat16 import compute_in_float32, is_bfloat16_emulated
from megatron_ibpo.engines.vllm.engine_process import NCCL_BACKEND
from megatron_ibpo.engines.vllm.fixes import fix_cpu, fix_gpu, take_norm_kernels, take_updates_whole
from megatron_ibpo.engines.vllm.receivers import Drafter, GlooWeightTransferEngine, Loading, NcclWorker
from megatron_ibpo.engines.vllm.routing_record import Choices, RoutingRecord


class WorkerExtension:
    """Methods that vLLM adds to its worker; `SamplingEngine` calls them on all workers by name."""

    model_runner: Any
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]
    weight_transfer_engine: WeightTransferEngine[Any, Any]
    _weight_update_active: bool

    def watch_loading(self, check: bool) -> None:
        """Record what arrives until `end_loading`; call it once vLLM is ready for weights. With `check`, keep
        checksums: of the parts that gloo brings, or of the whole tensors of vLLM's own transports."""
        engine = self.weight_transfer_engine
        self._sums: dict[str, int] = {}
        sums = self._sums if check else None
        if isinstance(engine, GlooWeightTransferEngine):
            engine.receipt, sums = sums, None
        self._loading = Loading(self.model_runner.get_model(), sums, self._drafter())

    def load_update(self, update_info: dict[str, Any]) -> str | None:
        """Receive and load tensors; return the error if this fails. An exception would leave the answers of
        the engine's other workers unread: vLLM's next call would take them for its own."""
        try:
            self.update_weights(update_info)
        except Exception as error:  # a connection, a loader or a kernel may raise anything
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
        return None

    def close_update(self) -> None:
        """End an update, whole or not. After a failed `update_weights` vLLM 0.32 has closed the session
        (`Worker.update_weights`) and refuses to finish it, while the model still waits for tensors."""
        self._weight_update_active = True
        self.finish_weight_update()

    def _drafter(self) -> Drafter | None:
        """Return the model of --vllm-arg speculative-config, if it is the policy's own prediction layer."""
        speculation = self.model_runner.vllm_config.speculative_config
        if speculation is None or speculation.method != "mtp":
            return None
        return Drafter(self.model_runner.get_draft_model(), speculation.draft_model_config)

    def take_rehearsal(self) -> bytes:
        """Return this worker's needs of the trainers' tensors: a pickled `Answer`."""
        engine = self.weight_transfer_engine
        assert isinstance(engine, GlooWeightTransferEngine)
        return engine.answer(self._loading.missing())

    def missing_weights(self) -> list[str] | None:
        """Return the tensors that this update has not brought (see `Loading.missing`); None if it was cut off
        on the way. An exception would end the engine, as in `load_update`."""
        engine = self.weight_transfer_engine
        if isinstance(engine, NcclWorker) and engine.lost:
            return None
        return self._loading.missing()

    def end_loading(self) -> dict[str, int]:
        """Return the checksums since `watch_loading`; empty if none were requested."""
        self._loading.close()
        sums, self._sums = self._sums, {}
        return sums


class RecordingWorker(WorkerExtension):
    """`WorkerExtension` with a `RoutingRecord` of the experts chosen for each token of each request, with the
    first model runner; for the second, vLLM has such a record itself (`enable_return_routed_experts`). vLLM
    takes only one class of methods for its workers."""

    def record_routing(self, num_experts: int) -> None:
        """Start recording. Raises RuntimeError if the model has no routers, or routes inside a kernel that
        does not reveal it."""
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
        if place < layers - 1:
            return
        choices = np.stack(self._step, 1)
        batch, starts = self.model_runner.input_batch, self.model_runner.query_start_loc.np
        for row, request in enumerate(batch.req_ids):  # rows past the last request's are padding
            first = int(batch.num_computed_tokens_cpu[row])
            self._record.add(request, first, choices[starts[row] : starts[row + 1]])


WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)
WeightTransferEngineFactory.register_engine(NCCL_BACKEND, NcclWorker)
# warnings that are expected in every update: float32 weights are cast as they load, and vLLM takes layers
# without weights for forgotten layers (truly forgotten ones are an error above)
for module in ("models.utils", "model_loader.reload.layerwise"):
    logging.getLogger(f"vllm.model_executor.{module}").setLevel(logging.ERROR)
take_updates_whole()
if current_platform.is_cpu():
    fix_cpu()
    take_norm_kernels()
    call_directly()
    if is_bfloat16_emulated():
        compute_in_float32()
else:
    fix_gpu()
