"""A worker's side of the nccl transport: vLLM's own, in a group that ends when a member is lost."""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)

from megatron_ibpo.weights.transfer.nccl_group import abort, ends_when_lost, joined


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
        joined(lambda: join(init_info), self.device.index or 0, self._store, init_info.timeout)

    def start_weight_update(self) -> None:
        self.lost = False
        super().start_weight_update()

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        with ends_when_lost(self._store, self.model_update_group, self._timeout) as lost:
            super().receive_weights(update_info)
        self.lost = lost.is_set()
