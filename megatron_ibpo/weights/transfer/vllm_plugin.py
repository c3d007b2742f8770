"""Loaded into vLLM's workers (`worker_extension_cls`): receives weights over gloo, keeps receipts of what
arrives, and mends the update of experts on CPUs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from megatron_ibpo.weights.source import TensorMeta
from megatron_ibpo.weights.transfer.checksum import checksum
from megatron_ibpo.weights.transfer.gloo import join_group, receive

__all__ = ["GlooWeightTransferEngine", "WorkerExtension"]


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    address: str
    port: int
    size: int


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    bucket_bytes: int


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """A worker's side of `megatron_ibpo.weights.transfer.gloo`: trainer rank 0 is the group's rank 0."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        rank = 1 + self.parallel_config.rank
        self._group = join_group(init_info.address, init_info.port, rank, init_info.size)

    def start_weight_update(self) -> None:
        self._missing = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        metas = [
            TensorMeta(name, getattr(torch, dtype_name), tuple(shape))
            for name, dtype_name, shape in zip(
                update_info.names, update_info.dtype_names, update_info.shapes, strict=True
            )
        ]
        model: Any = self.model
        self._missing -= model.load_weights(receive(self._group, metas, update_info.bucket_bytes))

    def finish_weight_update(self) -> None:
        if self._missing:
            raise ValueError(f"the weight update did not bring {', '.join(sorted(self._missing))}")
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self._group = None


class WorkerExtension:
    """Methods that vLLM adds to its worker; `SamplingEngine` calls them on all workers by name."""

    model_runner: Any

    def record_receipt(self) -> None:
        """From now on keep a checksum of every tensor that the model is given to load."""
        model = self.model_runner.get_model()
        load_weights = type(model).load_weights
        self._receipt: dict[str, int] = {}

        def recorded(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                self._receipt[name] = checksum(tensor)
                yield name, tensor

        model.load_weights = lambda weights: load_weights(model, recorded(weights))

    def take_receipt(self) -> dict[str, int]:
        """The checksums since `record_receipt`, which ends; empty where it was not called."""
        receipt, self._receipt = getattr(self, "_receipt", {}), {}
        vars(self.model_runner.get_model()).pop("load_weights", None)
        return receipt


def _repack_experts_on_update() -> None:
    """Let vLLM 0.32 (and 0.33) pack experts for its CPU kernels on weight updates, not only at the first
    load: `_setup_kernel` skips it, and the kernels then read plain weights as packed ones, silently."""
    method: Any = UnquantizedFusedMoEMethod
    setup_kernel = method._setup_kernel

    def setup_and_pack(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        is_update = self.moe_kernel is not None
        setup_kernel(self, layer, w13, w2)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    method._setup_kernel = setup_and_pack


def _say_less() -> None:
    """Warnings of every update are expected: float32 weights are cast as they load,
    and vLLM takes layers without weights for layers that were forgotten (what is forgotten is an error
    above)."""
    for module in ("models.utils", "model_loader.reload.layerwise"):
        logging.getLogger(f"vllm.model_executor.{module}").setLevel(logging.ERROR)


WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)
_say_less()
if current_platform.is_cpu():
    _repack_experts_on_update()
