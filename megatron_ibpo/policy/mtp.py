"""Training of the multi-token prediction layer, so that it keeps drafting for the present policy.

A row of the policy's last hidden states and the embedding of the next token predict the token after that,
where both are the policy's own, as an engine would draft it. The layer is a model of its own beside the
policy's: no gradient passes between them, and the policy is the same bit for bit whether the layer is trained
or not.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_ibpo.config import Config
from megatron_ibpo.loss import packed_logprobs
from megatron_ibpo.models import ModelShape
from megatron_ibpo.models.backends import Backends
from megatron_ibpo.models.families import family_module
from megatron_ibpo.models.spec import make_backend
from megatron_ibpo.policy import forward_backward
from megatron_ibpo.policy.forward_backward import Loss, Observed
from megatron_ibpo.policy.model import (
    current_device,
    device_config,
    head_weight,
    own_vocabulary,
    whole_hidden_states,
)
from megatron_ibpo.policy.packing import PackedBatch

Embedding = Callable[..., Tensor]
"""GPTModel's embedding: input_ids [1, N], position_ids [1, N] → [N, 1, H], with sequence parallelism [N / TP,
1, H]."""


class MtpModel(MegatronModule):
    """One multi-token prediction layer with one attention layer (DeepSeek-AI, "DeepSeek-V3 Technical Report",
    2024, section 2.2). Parameters and checkpoint use the same names as in a GPTModel."""

    def __init__(self, config: Any, layer: ModuleSpec):
        super().__init__(config=config)
        self.mtp = MultiTokenPredictionBlock(
            config,
            MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )

    def forward(
        self,
        hidden_states: Tensor,
        next_ids: Tensor,
        position_ids: Tensor,
        embedding: Embedding,
        rotary: Tensor,
        packed: PackedSeqParams,
    ) -> Tensor:
        """Return the hidden states from which the policy's head computes logits for the tokens after
        `next_ids`, shaped like `hidden_states`.

        Args:
            hidden_states: [N, 1, H], [N / TP, 1, H] with sequence parallelism, after the policy's final norm.
            next_ids, position_ids: [1, N], the token after each row's, and the row's position.
            rotary: as GPTModel's `rotary_pos_emb` gives it.
        """
        # the only path through it that rolls no tokens; they are known here
        return self.mtp.layers[0].forward_single_position(
            hidden_states, next_ids, position_ids, embedding, rotary_pos_emb=rotary, packed_seq_params=packed
        )


def build_mtp(
    shape: ModelShape, config: Config, *, device: Literal["cpu", "cuda", "meta"], libraries: Backends
) -> MtpModel:
    """Build this rank's part of the layer that --mtp-num-layers asks for, in the dtype of the policy;
    `load_mtp` fills its weights. It has no loss that balances its experts, since it only predicts what the
    policy samples, and is never recomputed as a whole: it is one layer."""
    core = device_config(shape, config, device, libraries)
    core.moe_router_load_balancing_type, core.moe_aux_loss_coeff = "none", 0.0
    core.mtp_num_layers = config.model.mtp_num_layers
    backend = make_backend(libraries)
    layer = MultiTokenPredictionLayerSubmodules(
        enorm=backend.norm,
        hnorm=backend.norm,
        eh_proj=backend.column_linear,
        mtp_model_layer=family_module(shape.family).mtp_layer_spec(shape, backend),
        layer_norm=backend.norm,
    )
    with torch.device(device), current_device(device):
        model = MtpModel(core, ModuleSpec(module=MultiTokenPredictionLayer, submodules=layer))
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # as `build_model`
    return model.to(device)


HEAD_ROWS = 1024
"""Rows whose logits are held at once; they are recomputed for the backward pass."""


class Mtp:
    """This rank's part of the layer, its optimizer and schedule."""

    def __init__(
        self, model: MtpModel, policy: Any, vocab_size: int, config: Config, total_updates: int, backend: Any
    ):
        """
        Args:
            model: result of `build_mtp` on this rank, with its weights.
            policy: the GPTModel that it drafts for, divided only by tensor and expert parallelism.
            total_updates: optimizer steps of the whole run, for the policy's learning-rate schedule.
            backend: computes log-probs, see `megatron_ibpo.loss`.
        """
        self._policy, self._vocab_size, self._backend = policy, vocab_size, backend
        self._factor = config.model.mtp_loss_scaling_factor
        # no other computation runs during its passes that could hide a reduction or a gather
        parallel = replace(config.parallel, overlap_grad_reduce=False, overlap_param_gather=False)
        self.chunks, self.optimizer, self.scheduler = forward_backward.make_trainable(
            [model], replace(config, parallel=parallel), config.optimizer.lr, total_updates
        )
        self._hidden: Tensor | None = None

    @contextmanager
    def listening(self) -> Iterator[Callable[[Loss], Loss]]:
        """Record the hidden states of the policy's passes within the context. Yields a function that wraps
        the policy's loss: the result also fills this layer's gradients, from 0, and observes its own."""
        self.chunks[0].zero_grad_buffer()
        self.optimizer.zero_grad()
        # Transformer Engine quantizes weights for fp8 at the first micro-batch alone, and only Megatron's
        # schedules announce it by themselves
        self.chunks[0].set_is_first_microbatch()
        hook = self._policy.decoder.register_forward_hook(self._hear)
        try:
            yield self._add_mtp_loss
        finally:
            hook.remove()
            self._hidden = None

    def step(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Take an optimizer step on the gradients of all micro-batches. Collective. `sums` are those of the
        observations over all ranks. Returns sums from which `mtp_metrics` makes metrics."""
        tokens = sums.get("mtp_tokens", 0.0)
        if not tokens:
            return {}
        finalize_model_grads(self.chunks)
        for buffer in [*self.chunks[0].buffers, *self.chunks[0].expert_parallel_buffers]:
            buffer.grad_data.mul_(self._factor / tokens)
        norm = forward_backward.gradient_norm(self.optimizer)
        if not math.isfinite(norm):
            return {"mtp_updates_skipped": 1.0}
        forward_backward.take_step(self.optimizer, norm)
        return {"mtp_updates": 1.0, "mtp_grad_norm": norm}

    def _hear(self, _module: Any, _inputs: Any, hidden_states: Tensor) -> None:
        self._hidden = hidden_states.detach()

    def _add_mtp_loss(self, loss: Loss) -> Loss:
        def with_mtp(scale: float, batch: PackedBatch, output: Tensor) -> tuple[Tensor, Observed]:
            value, observed = loss(scale, batch, output)
            return value, {**observed, **self._learn(batch)}

        return with_mtp

    def _learn(self, batch: PackedBatch) -> Observed:
        """Add the gradient of the sum of losses over a micro-batch."""
        hidden, self._hidden = self._hidden, None
        assert hidden is not None, "the policy's pass comes first"
        output = self.chunks[0](
            hidden,
            batch.rows.targets_N[None],
            batch.position_ids_1N,
            self._embed,
            self._policy.rotary_pos_emb(batch.sequences.max_seqlen_q, packed_seq=True),
            batch.sequences,
        )
        whole_NH = whole_hidden_states(hidden_states=output, output_layer=self._policy.output_layer)[0]
        rows_R, labels_R, drafted_R = _drafts(batch)
        weight = head_weight(self._policy).detach()
        sums = [torch.zeros(2, device=whole_NH.device)]
        # even without rows the graph has this part, so that every rank has the same collectives
        total = whole_NH.float().sum() * 0.0
        for rows, labels, drafted in zip(
            rows_R.split(HEAD_ROWS), labels_R.split(HEAD_ROWS), drafted_R.split(HEAD_ROWS), strict=True
        ):
            part, accepted = checkpoint(
                self._loss_of_rows,
                whole_NH[rows],
                weight,
                labels,
                drafted,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            total = total + part
            sums.append(torch.stack([part.detach(), accepted]))
        # data parallelism averages over its ranks, and this is a sum
        (total * parallel_state.get_data_parallel_world_size()).backward()
        loss, accepted = torch.stack(sums).sum(0)
        return {"mtp_loss": loss, "mtp_accepted": accepted, "mtp_tokens": drafted_R.sum()}

    @torch.no_grad()
    def _embed(self, *, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self._policy.embedding(input_ids=input_ids, position_ids=position_ids)

    def _loss_of_rows(
        self, hidden_RH: Tensor, weight_VH: Tensor, labels_R: Tensor, drafted_R: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (Σ -log p of the labels, labels that are the likeliest token) over the drafted rows."""
        logits_RV = F.linear(hidden_RH, weight_VH)
        vocabulary = own_vocabulary(len(weight_VH), self._vocab_size)
        logprobs_R, _ = packed_logprobs(
            logits_RV, labels_R, response_mask_N=drafted_R, entropy=False, backend=self._backend, **vocabulary
        )
        likeliest_R = _argmax(logits_RV.detach(), **vocabulary)
        return -logprobs_R.sum(), ((likeliest_R == labels_R) & drafted_R).sum().float()


def mtp_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return metrics from the sums of the observations and of `Mtp.step`; empty without the layer.
    `mtp_acceptance` is the share of drafted tokens that the policy sampled; an engine that drafts one token
    at a time accepts as many."""
    if "mtp_tokens" not in sums:
        return {}
    tokens = max(1.0, sums["mtp_tokens"])
    metrics = {
        "mtp_loss": sums["mtp_loss"] / tokens,
        "mtp_acceptance": sums["mtp_accepted"] / tokens,
        "mtp_updates_skipped": sums.get("mtp_updates_skipped", 0.0),
    }
    if updates := sums.get("mtp_updates"):
        metrics["mtp_grad_norm"] = sums["mtp_grad_norm"] / updates
    return metrics


def _drafts(batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return [R] each: rows whose next token is in the loss, the token after that one, and whether that is in
    the loss too."""
    rows_R = batch.loss_rows()
    positions_N, mask_N = batch.position_ids_1N[0], batch.rows.response_mask_N
    after_R = (rows_R + 1).clamp(max=len(mask_N) - 1)
    within_R = positions_N[after_R] == positions_N[rows_R] + 1  # otherwise it is the next sequence's
    return rows_R, batch.rows.targets_N[after_R], within_R & mask_N[after_R].bool()


def _argmax(logits_RV: Tensor, *, tp_group: Any, vocab_range: tuple[int, int]) -> Tensor:
    """Return [R], the likeliest token of each row over all ranks' columns; the first on a tie."""
    start, stop = vocab_range
    best_R, column_R = logits_RV[:, : stop - start].max(dim=1)
    own_2R = torch.stack([best_R.double(), (column_R + start).double()])
    parts = [torch.empty_like(own_2R) for _ in range(dist.get_world_size(tp_group))]
    dist.all_gather(parts, own_2R, group=tp_group)
    values_2TR = torch.stack(parts, dim=1)
    rank_1R = values_2TR[0].argmax(dim=0, keepdim=True)
    return values_2TR[1].gather(0, rank_1R)[0].long()
