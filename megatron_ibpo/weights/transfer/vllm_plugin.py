"""The extension of vLLM's workers (`worker_extension_cls`). It receives weights, over gloo or
nccl, and keeps receipts.

It also fixes vLLM's updates of gpt-oss and, on CPUs, of experts and tied heads, prompts of one token, seeded
requests whose prompt is read in parts, and the prefix cache of models with delta nets.
"""

import logging
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from megatron_ibpo.weights.layout.regions import Need, TensorMeta
from megatron_ibpo.weights.transfer.gloo import GlooReceiver, join_group
from megatron_ibpo.weights.transfer.gpt_oss_updates import take_updates_whole
from megatron_ibpo.weights.transfer.loading import Drafter, Loading
from megatron_ibpo.weights.transfer.nccl_group import abort, ends_when_lost, joined
from megatron_ibpo.weights.transfer.rehearsal import Rehearsal
from megatron_ibpo.weights.transfer.update_order import NCCL_BACKEND
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
        _repack_tied_heads(self.model)

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
        joined(lambda: join(init_info), self.device.index or 0, self._store, init_info.timeout)

    def start_weight_update(self) -> None:
        self.lost = False
        super().start_weight_update()

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        with ends_when_lost(self._store, self.model_update_group, self._timeout) as lost:
            super().receive_weights(update_info)
        self.lost = lost.is_set()


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
        in_parts = isinstance(engine, GlooWeightTransferEngine)
        if isinstance(engine, GlooWeightTransferEngine):
            engine.receipt = self._sums if check else None
        sums = self._sums if check and not in_parts else None
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

    def missing_weights(self) -> list[str]:
        """Return the tensors that this update has not brought; see `Loading.missing`.

        Raises:
            RuntimeError: the update was cut off on the way.
        """
        engine = self.weight_transfer_engine
        if isinstance(engine, NcclWorker) and engine.lost:
            raise RuntimeError("the weight update was cut off: another member of its group was lost")
        return self._loading.missing()

    def end_loading(self) -> dict[str, int]:
        """Return the checksums since `watch_loading`; empty if none were requested."""
        self._loading.close()
        sums, self._sums = self._sums, {}
        return sums


def _repack_experts_on_update() -> None:
    """Make vLLM 0.32 (and 0.33) pack experts for its CPU kernels on weight updates, not only at the first
    load: `_setup_kernel` skips it, and the kernels then silently read plain weights as packed ones."""
    method: Any = UnquantizedFusedMoEMethod
    setup_kernel = method._setup_kernel

    def setup_and_pack(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        is_update = self.moe_kernel is not None
        setup_kernel(self, layer, w13, w2)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    method._setup_kernel = setup_and_pack


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Pack a tied head again. It has the embedding's weight and gets none of its own, so on CPUs vLLM 0.32
    keeps using the packing of the first load."""
    layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    embeddings = {id(layer.weight) for layer in layers if not isinstance(layer, ParallelLMHead)}
    for layer in layers:
        if isinstance(layer, ParallelLMHead) and id(layer.weight) in embeddings:
            layer.quant_method.process_weights_after_loading(layer)


def _close_up_single_rows() -> None:
    """Make vLLM 0.32 read a prompt of one token with Qwen3.5, whose queries, keys and values are a slice of a
    wider row: torch counts a single row as contiguous whatever its stride, and the convolution for CPUs
    refuses the stride."""
    convolve = gdn_attention._causal_conv1d_fwd_cpu

    def convolve_closed(*, x: torch.Tensor, **others: Any) -> torch.Tensor:
        if x.shape[1] == 1:
            x = x.T.clone(memory_format=torch.contiguous_format).T
        return convolve(x=x, **others)

    gdn_attention._causal_conv1d_fwd_cpu = convolve_closed


def _hold_generators_of_discarded_tokens() -> None:
    """Let vLLM 0.32 read a prompt in parts on CPUs. It samples a token after each part, discards it unless
    the part was the last, and then rewinds the request's generator by `set_offset`, which a CPU generator
    lacks. Here such a token is drawn from the generator of requests without a seed. This is the first model
    runner; the second one has no generators."""
    runner: Any = CPUModelRunner
    sample_tokens = runner.sample_tokens

    def sample_holding(self: Any, *arguments: Any) -> Any:
        generators = self.input_batch.generators
        discarded = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])
        held = {row: generators.pop(row) for row in discarded.tolist() if row in generators}
        try:
            return sample_tokens(self, *arguments)
        finally:
            generators.update(held)

    runner.sample_tokens = sample_holding


def _cache_prompts_alone() -> None:
    """Have vLLM 0.32 cache what a model with delta nets read as a prompt, and not what it wrote. Keys and
    values that were computed token by token differ in their last bits, and would take the place of those of
    the next turn's prompt. No hit is lost: delta nets keep states of prompts alone. Blocks are counted in the
    engine's core, which with one worker is this process."""
    coordinator: Any = HybridKVCacheCoordinator
    cache_blocks = coordinator.cache_blocks

    def cache_prompt(self: Any, request: Any, num_computed_tokens: int) -> None:
        if self.kv_cache_config.has_mamba_layers:
            num_computed_tokens = min(num_computed_tokens, request.num_prompt_tokens)
        cache_blocks(self, request, num_computed_tokens)

    coordinator.cache_blocks = cache_prompt


def _read_single_tokens_as_prompts() -> None:
    """Have vLLM 0.32 read the last token of a prompt by the kernels for prompts, if it is alone. For the
    cache of delta nets a prompt is cut at a multiple of 64, and a rest of one token would go to the kernels
    that sample, whose last bits are not those of a prompt that is read whole."""
    builder: Any = GDNAttentionMetadataBuilder
    build = builder.build

    def build_prompts(self: Any, prefix: int, batch: Any, *arguments: Any, **more: Any) -> Any:
        if batch.is_prefilling is not None:  # a part is taken for a prompt if nothing was read before it
            read, whole = batch.query_start_loc_cpu.diff(), batch.seq_lens_cpu_upper_bound
            single = batch.is_prefilling & (read == 1)
            batch = batch.replace(seq_lens_cpu_upper_bound=torch.where(single, read, whole))
        return build(self, prefix, batch, *arguments, **more)

    builder.build = build_prompts


def _say_less() -> None:
    """Silence warnings that are expected in every update: float32 weights are cast as they load, and vLLM
    takes layers without weights for forgotten layers (truly forgotten ones are an error above)."""
    for module in ("models.utils", "model_loader.reload.layerwise"):
        logging.getLogger(f"vllm.model_executor.{module}").setLevel(logging.ERROR)


WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)
WeightTransferEngineFactory.register_engine(NCCL_BACKEND, NcclWorker)
_say_less()
take_updates_whole()
if current_platform.is_cpu():
    _repack_experts_on_update()
    _close_up_single_rows()
    _hold_generators_of_discarded_tokens()
    _cache_prompts_alone()
    _read_single_tokens_as_prompts()
