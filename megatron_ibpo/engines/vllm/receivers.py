"""The workers' sides of the transports, as vLLM's transfer engines: parts of tensors over gloo, whole ones
over NCCL. (Memory handles are received by vLLM's own.) An update is recorded, so that missing weights are
known before the engine samples, and the drafter gets its share."""

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
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
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from megatron_ibpo.engines.vllm.fixes import repack_tied_heads
from megatron_ibpo.weights.layout.regions import Need
from megatron_ibpo.weights.transfer.gloo import GlooReceiver, join_group
from megatron_ibpo.weights.transfer.nccl_group import abort, ends_when_lost, run_join
from megatron_ibpo.weights.transfer.wire import Answer, Rehearsal, checksum


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
    """A worker's side of `megatron_ibpo.weights.transfer.gloo`. It first answers which parts of tensors it
    needs, then joins the trainers' group, and from then on receives these parts."""

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
        if update_info.rehearse is None:
            assert self._receiver is not None, "the trainers have not been met"
            self.model.load_weights(self._receiver.tensors(self.receipt))  # type: ignore[operator]
            return
        rehearsal = Rehearsal(pickle.loads(update_info.rehearse))
        try:  # to load zeros: its weights are lost until the next update
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


Weights = Iterable[tuple[str, torch.Tensor]]
DRAFTED = "mtp."
"""Prefix of the layer's tensors."""


class Drafter:
    """The model that drafts: vLLM's second one, with the target's own embedding and head. It takes its
    tensors from the stream that the target's loader reads, which has no place for them. (vLLM would update it
    in a session and a pass over the weights of its own.)"""

    def __init__(self, model: Any, model_config: Any) -> None:
        self._model, self._config = model, model_config
        self._absent: set[str] | None = None
        """Tensors still to come; None until an update brings the first: the engine then keeps its weights."""

    def fed(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights as they come, and load those of the drafter into its model on the way."""
        for name, tensor in weights:
            if name.startswith(DRAFTED):
                if self._absent is None:
                    initialize_layerwise_reload(self._model)
                    # embedding and head are the target's, and come as its
                    names = _owned(self._model)
                    self._absent = {n for n in names if "embed_tokens" not in n and "lm_head" not in n}
                self._absent -= self._model.load_weights([(name, tensor)])
            yield name, tensor

    def missing(self) -> list[str]:
        if self._absent is None:
            return []
        return [f"the drafter's {name}" for name in sorted(self._absent)] + _cut_short(self._model)

    def close(self) -> None:
        """Let the drafter use what has come."""
        if self._absent is not None:
            finalize_layerwise_reload(self._model, self._config)
            self._absent = None


class Loading:
    """One update of a worker's model, from the moment that vLLM is ready for weights to its end. vLLM itself
    only warns of a layer that no weight reached, and says nothing of a partly loaded one."""

    def __init__(self, model: Any, sums: dict[str, int] | None, drafter: Drafter | None) -> None:
        """A drafting model takes its part. `sums` get a checksum of each whole tensor that arrives."""
        self._model = model
        self._sums = sums
        self._drafter = drafter
        self._absent = set(_owned(model))
        self._load_weights: Callable[[Weights], set[str] | None] = model.load_weights
        model.load_weights = self._load

    def missing(self) -> list[str]:
        """Return what has not come so far: parameters, and layers that were loaded in part."""
        drafters = self._drafter.missing() if self._drafter is not None else []
        return sorted(self._absent) + _cut_short(self._model) + drafters

    def close(self) -> None:
        """Stop recording."""
        if self._drafter is not None:
            self._drafter.close()
        del self._model.load_weights  # the instance's; the class has its own

    def _load(self, weights: Weights) -> set[str]:
        if self._drafter is not None:
            weights = self._drafter.fed(weights)
        loaded = self._load_weights(weights if self._sums is None else self._summed(weights, self._sums))
        if loaded is None:
            raise TypeError(
                f"{type(self._model).__name__}.load_weights of this vLLM does not report what it loaded, "
                "so a weight update cannot be checked"
            )
        self._absent -= loaded
        return loaded

    def _summed(self, weights: Weights, sums: dict[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            sums[name] = checksum(tensor)
            yield name, tensor


def _owned(model: torch.nn.Module) -> Iterator[str]:
    """Yield the parameters that must come, once each even if layers share them. Scales of a quantized KV
    cache have defaults."""
    yielded = set()
    for prefix, layer in model.named_modules():
        if is_deferred_attention_layer(layer):
            continue
        present, _ = get_layerwise_info(layer).kernel_tensors or ({}, {})
        for name, parameter in layer.named_parameters(recurse=False):
            tensor_id = id(present.get(name, parameter))  # sharing is undone while weights come
            if tensor_id not in yielded:
                yielded.add(tensor_id)
                yield f"{prefix}.{name}" if prefix else name


def _cut_short(model: torch.nn.Module) -> list[str]:
    """Return the layers that were loaded in part."""
    progress = ((name, *_progress(layer)) for name, layer in model.named_modules())
    return [
        f"a part of {name} ({loaded:,} of {owned:,} numbers came)"
        for name, loaded, owned in progress
        if 0 < loaded < owned
    ]


def _progress(layer: torch.nn.Module) -> tuple[int, int]:
    """Return (numbers that came, numbers that must come) of a layer's own parameters, while vLLM waits for
    more; (0, 0) otherwise."""
    info = get_layerwise_info(layer)
    if not info.can_load() or is_deferred_attention_layer(layer):
        return 0, 0
    parameters = list(layer.parameters(recurse=False))
    owned = sum(get_tensor_load_numel(parameter) for parameter in parameters)
    if isinstance(layer, VocabParallelEmbedding):  # rows that pad the vocabulary never come
        shard = layer.shard_indices
        padding = layer.num_embeddings_per_partition - shard.num_org_elements
        owned -= sum(padding * parameter[0].numel() for parameter in parameters)
    return info.load_numel, owned
