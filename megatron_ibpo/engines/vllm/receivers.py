"""The workers' sides of the transports, as vLLM's transfer engines: parts of tensors over gloo, whole ones
over NCCL. (Memory handles are received by vLLM's own.)"""

import pickle
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from megatron_ibpo.engines.vllm.fixes import repack_tied_heads
from megatron_ibpo.weights.layout.regions import Need, TensorMeta
from megatron_ibpo.weights.transfer.gloo import GlooReceiver, join_group
from megatron_ibpo.weights.transfer.nccl_group import abort, ends_when_lost, run_join
from megatron_ibpo.weights.transfer.rehearsal import Rehearsal
from megatron_ibpo.weights.transfer.wire import Answer


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    address: str
    port: int
    first_worker: int
    """Place of the engine's first worker in the group."""
    size: int
    timeout: float
    plan: bytes
    """A pickled `WirePlan`."""


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    rehearse: bytes | None = None
    """If given, receive nothing, but find out what the model takes of these tensors: pickled
    `TensorMeta`s."""


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """A worker's side of `megatron_ibpo.weights.transfer.gloo`. It first answers what it needs, then joins
    the trainers' group, and from then on receives that."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    receipt: dict[str, int] | None = None
    """Checksums of what arrives; None: none are kept."""
    _needs: list[Need | None] | None = None
    _receiver: GlooReceiver | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        assert self._needs is not None, "a rehearsal comes first"
        rank = init_info.first_worker + self.parallel_config.rank
        group = join_group(init_info.address, init_info.port, rank, init_info.size)
        self._receiver = GlooReceiver(group, pickle.loads(init_info.plan), self._needs, init_info.timeout)

    def start_weight_update(self) -> None:
        self._error: str | None = None
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if update_info.rehearse is not None:
            self._rehearse(pickle.loads(update_info.rehearse))
            return
        assert self._receiver is not None, "the trainers have not been met"
        self.model.load_weights(self._receiver.tensors(self.receipt))  # type: ignore[operator]

    def _rehearse(self, metas: list[TensorMeta]) -> None:
        """Load zeros, and record what the model takes of them. Its weights are lost until the next update."""
        rehearsal = Rehearsal(metas)
        try:
            self.model.load_weights(rehearsal.tensors())  # type: ignore[operator]
        except Exception as error:  # a model may raise anything at a name or shape that it does not know
            self._error = f"{type(error).__name__}: {error}"
        self._needs = rehearsal.needs()

    def answer(self, forgotten: list[str]) -> bytes:
        """Return the answer to the rehearsal, in which no tensor reached `forgotten`."""
        assert self._needs is not None
        return pickle.dumps(Answer(self._needs, forgotten, self._error))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_heads(self.model)

    def shutdown(self) -> None:
        self._receiver = None


@dataclass(kw_only=True)
class GroupInfo(NCCLWeightTransferInitInfo):
    """Address of the group, in vLLM's form, and of the store that reports lost members."""

    lost_port: int
    """Port of that store, on the master's address."""
    timeout: float
    """Seconds that a pass over the weights may take."""


class NcclWorker(NCCLWeightTransferEngine):
    """The worker class that vLLM uses for `--no-colocate` on GPUs. Not run on GPUs."""

    init_info_cls = GroupInfo  # type: ignore[assignment]
    lost = False
    """True if the present update was cut off: the model has undefined weights."""

    def init_transfer_engine(self, init_info: GroupInfo) -> None:  # type: ignore[override]
        if self.model_update_group is not None:
            abort(self.model_update_group)
            self.model_update_group = None
        assert init_info.master_address is not None
        self._timeout = init_info.timeout
        meeting = timedelta(seconds=init_info.timeout)
        self._store = dist.TCPStore(init_info.master_address, init_info.lost_port, timeout=meeting)
        # the trainers do not wait for a worker that does not join in time: they form another group
        join = super().init_transfer_engine
        run_join(lambda: join(init_info), self.device.index or 0, self._store, init_info.timeout)

    def start_weight_update(self) -> None:
        self.lost = False
        super().start_weight_update()

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        with ends_when_lost(self._store, self.model_update_group, self._timeout) as lost:
            super().receive_weights(update_info)
        self.lost = lost.is_set()
