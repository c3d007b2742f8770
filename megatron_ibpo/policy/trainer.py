"""The policy under training: log-probs and optimizer steps. It sees tokens, advantages and weights."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megatron.core import parallel_state
from torch import Tensor

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.basics.records import ExpertIds, Floats
from megatron_ibpo.config import Config
from megatron_ibpo.loss import (
    LossStats,
    Objective,
    head_logprobs,
    head_policy_loss,
    linear_packed_logprobs,
    linear_policy_loss,
    weighted_value,
)
from megatron_ibpo.policy import forward_backward
from megatron_ibpo.policy.forward_backward import Loss, Observed
from megatron_ibpo.policy.importance_correction import Corrected, correct, correction_metrics
from megatron_ibpo.policy.loss_objective import aggregation, backend_in_use, check_loss, run_objective
from megatron_ibpo.policy.model import head_weight, own_vocabulary, whole_hidden_states
from megatron_ibpo.policy.mtp import Mtp, MtpModel, mtp_metrics
from megatron_ibpo.policy.packing import PackedArrays, PackedBatch, packed, packed_values, with_choices
from megatron_ibpo.policy.planning import Cut, MicroBatch, MiniBatch, RankForward, RankUpdate
from megatron_ibpo.policy.residence import Reference
from megatron_ibpo.policy.routing_replay import CHANGED, CHOICES, LIVE, RoutingReplay
from megatron_ibpo.policy.sampling_masks import check_ids


def _as_it_is(loss: Loss) -> Loss:
    return loss


class Trainer:
    """This rank's part of the policy, its optimizer and schedule."""

    def __init__(
        self,
        chunks: list[Any],
        vocab_size: int,
        config: Config,
        world: World,
        total_updates: int,
        reference: Reference | None = None,
        mtp: MtpModel | None = None,
    ):
        """
        Args:
            chunks: result of `build_model` on this rank.
            vocab_size: true size of the vocabulary; logits beyond it are padding.
            total_updates: optimizer steps of the whole run, for the learning-rate schedule.
            reference: policy whose log-probs go into the loss; None without a KL penalty.
            mtp: the multi-token prediction layer to train beside it, with weights; None to train none.

        Raises ValueError for an unknown loss, flags that do not fit it, or replay of routing without routers.
        """
        self.config, self.world, self.vocab_size = config, world, vocab_size
        self.reference = reference
        check_loss(config.loss)
        self.loss_backend = backend_in_use(config, world.device)
        lr = config.optimizer.lr
        self.chunks, self.optimizer, self.scheduler = forward_backward.make_trainable(
            chunks, config, lr, total_updates
        )
        self.routing = RoutingReplay(self.chunks) if config.replays_routing else None
        self.mtp: Mtp | None = None
        if mtp is not None:
            policy, backend = self.chunks[-1].module, self.loss_backend.name
            self.mtp = Mtp(mtp, policy, vocab_size, config, total_updates, backend)

    def update(self, share: RankUpdate) -> dict[str, float]:
        """Take one rollout's optimizer steps. Collective. Returns metrics, the same on every rank;
        `updates_skipped` counts steps that were not taken because loss or gradient was not finite."""
        started = time.perf_counter()
        if self.routing is not None:
            self.routing.take_counts()  # drop the counts of passes that measured the gradient
        # all before the first step, when the weights are still those of the ratios' denominator
        prepared = [self._prepared(part) for part in share]
        seconds_logprobs = time.perf_counter() - started
        corrected: list[Corrected] = []
        inputs = []
        for part, packs in zip(share, prepared, strict=True):
            if self.config.loss.corrections:
                packs, outcomes = self._corrected(packs)
                corrected += self._in_order(outcomes)
            inputs.append((self._with_reference(packs, part.cut), part.mean_length))
        epochs = [self._epoch(inputs) for _ in range(self.config.loss.num_epochs_per_rollout)]
        forward_backward.finish_gathers(self.chunks)
        metrics = _update_metrics(epochs, len(share)) | {"seconds_old_logprobs": seconds_logprobs}
        return metrics | correction_metrics(corrected) | self._routing_metrics()

    def logprobs(self, share: RankForward) -> list[tuple[int, Floats]]:
        """Return log-probs of the response tokens under the present weights, as `infer` does; empty on ranks
        that do not report. Collective."""
        logprobs = self._logprobs(share)
        return logprobs if forward_backward.is_reporting_rank() else []

    def as_trained(self, cut: Cut) -> list[PackedArrays]:
        """Return the micro-batches as the first optimizer step of an update trains on them, with importance
        corrections. Old log-probs are the engine's, or absent at ratio 1. Collective."""
        loss = self.config.loss
        packs = self._packed(cut.micro_batches)
        if loss.old_logprobs == "engine":
            packs = _with_engine_logprobs(packs)
        elif loss.corrections:
            corrected, _ = self._corrected(self._with_old_logprobs(packs, cut))
            packs = [replace(arrays, old_logprobs_R=None) for arrays in corrected]
        return self._with_reference(packs, cut)

    def _prepared(self, part: MiniBatch) -> list[PackedArrays]:
        packs = self._packed(part.cut.micro_batches)
        if self.config.loss.old_logprobs == "engine":
            return _with_engine_logprobs(packs)
        return self._with_old_logprobs(packs, part.cut) if part.needs_old_logprobs else packs

    def _packed(self, micro_batches: Sequence[MicroBatch]) -> list[PackedArrays]:
        """Return the packed micro-batches, with the experts that this rank's routers must choose."""
        packs = self._checked(micro_batches)
        if self.routing is None:
            return packs
        return [
            arrays
            if arrays.routed_experts is None
            else replace(arrays, routed_experts=self.routing.of_own_layers(arrays.routed_experts))
            for arrays in packs
        ]

    def _checked(self, micro_batches: Sequence[MicroBatch]) -> list[PackedArrays]:
        """Return the packed micro-batches, whose sampling masks hold only ids that the model has."""
        packs = packed(micro_batches)
        for arrays in packs:
            check_ids(arrays.sampling_mask_R, self.vocab_size)
        return packs

    def _logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[int, Floats]]:
        """Return log-probs as `infer` does; routers choose freely."""
        packs = self._checked(micro_batches)
        return forward_backward.infer(
            self.chunks, packs, self._logprob_output, self.world.device, whole_hidden_states
        )

    def _with_old_logprobs(self, packs: Sequence[PackedArrays], cut: Cut) -> list[PackedArrays]:
        """Return the packs with old log-probs and, under --use-routing-replay, the routers' choices then."""
        chosen: list[tuple[int, ExpertIds]] | None = [] if self.config.loss.use_routing_replay else None
        logprobs = forward_backward.infer(
            self.chunks,
            self._packed(cut.forward_batches),
            self._logprob_output,
            self.world.device,
            whole_hidden_states,
            self.routing,
            records=chosen,
        )
        logprobs_by_pack = packed_values(packs, logprobs)
        packs = [replace(a, old_logprobs_R=values) for a, values in zip(packs, logprobs_by_pack, strict=True)]
        return packs if chosen is None else with_choices(packs, chosen)

    def _with_reference(self, packs: Sequence[PackedArrays], cut: Cut) -> list[PackedArrays]:
        if self.reference is None or not packs:
            return list(packs)
        forward_backward.finish_gathers(self.chunks)
        with self.reference.swapped_in(self.chunks):
            logprobs_by_pack = packed_values(packs, self._logprobs(cut.forward_batches))
        return [
            replace(a, ref_logprobs_R=logprobs_R)
            for a, logprobs_R in zip(packs, logprobs_by_pack, strict=True)
        ]

    def _corrected(self, packs: Sequence[PackedArrays]) -> tuple[list[PackedArrays], list[Corrected]]:
        """Return the packs with importance corrections, and the outcome for each sequence. Only the last
        stage has log-probs; on others packs stay unchanged."""
        if not parallel_state.is_pipeline_last_stage():
            return list(packs), []
        pairs = [correct(arrays, self.config.loss) for arrays in packs]
        return [arrays for arrays, _ in pairs], [sequence for _, outcomes in pairs for sequence in outcomes]

    def _in_order(self, corrected: list[Corrected]) -> list[Corrected]:
        """Return the outcomes of all ranks, in the order of the sequences."""
        parts = self.world.all_gather(corrected if forward_backward.is_reporting_rank() else [])
        return sorted(sequence for part in parts for sequence in part)

    def _epoch(self, inputs: Sequence[tuple[list[PackedArrays], float]]) -> _Totals:
        """Take the optimizer steps of one pass over the mini-batches."""
        totals = _Totals()
        for packs, mean_length in inputs:
            totals.merge(self._optimizer_step(packs, mean_length))
        return totals

    def _optimizer_step(self, packs: Sequence[PackedArrays], mean_length: float) -> _Totals:
        totals = _Totals()
        self.scheduler.step(1)
        if self.mtp:
            self.mtp.scheduler.step(1)
        if not packs:
            totals.sums["updates_empty"] += 1
            return totals
        objective = self.objective(aggregation(self.config, mean_length))
        with self.mtp.listening() if self.mtp else nullcontext(_as_it_is) as wrap_loss:
            for observed in self.accumulate_gradients(packs, objective, wrap_loss):
                totals.see(observed)
        if self.mtp:
            totals.see(self.mtp.step(totals.sums))
        norm = self.gradient_norm()
        totals.sums["updates_computed"] += 1
        totals.sums["learning_rate"] += self.scheduler.get_lr(self.optimizer.param_groups[0])
        if math.isfinite(norm) and math.isfinite(totals.sums["loss"]):
            totals.sums["updates_taken"] += 1
            totals.sums["grad_norm"] += norm
            forward_backward.take_step(self.optimizer, norm)
        else:
            totals.sums["updates_skipped"] += 1
            totals.sums["loss"] = 0.0
        return totals

    def objective(self, divisor: str | float) -> Objective:
        """Return the run's loss, with the divisor of a mini-batch (`aggregation`)."""
        return run_objective(self.config, divisor, self.loss_backend)

    def accumulate_gradients(
        self,
        packs: Sequence[PackedArrays],
        objective: Objective,
        wrap_loss: Callable[[Loss], Loss] = _as_it_is,
    ) -> list[dict[str, float]]:
        """Fill the gradient buffers with the gradient of Σ weight x loss over all ranks' micro-batches, as
        `forward_backward.accumulate_gradients` does, whose result is that of `_observed`. Collective.
        `wrap_loss` wraps the loss to do something more."""
        output = wrap_loss(partial(self._loss_output, objective))
        return forward_backward.accumulate_gradients(
            self.chunks, self.optimizer, packs, output, self.world, whole_hidden_states, self.routing
        )

    def _routing_metrics(self) -> dict[str, float]:
        """Return the shares of replayed choices that the router itself would have made differently, and of
        choices that it made itself for lack of a record, in an update on all ranks."""
        if self.routing is None:
            return {}
        counts = self.world.all_gather(self.routing.take_counts())
        changed, live, choices = (
            sum(rank_counts[name] for rank_counts in counts) for name in (CHANGED, LIVE, CHOICES)
        )
        return {CHANGED: changed / max(1.0, choices - live), LIVE: live / max(1.0, choices)}

    def gradient_norm(self) -> float:
        """Return the norm of the gradient buffers, with each parameter of the whole model counted once."""
        return forward_backward.gradient_norm(self.optimizer)

    def gradient_buffers(self) -> list[Tensor]:
        """Return this rank's gradients, flat fp32 tensors to read and write; of the distributed optimizer's
        only this rank's shard is meaningful."""
        return [
            buffer.grad_data
            for chunk in self.chunks
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
        ]

    def _loss_output(
        self, objective: Objective, scale: float, batch: PackedBatch, output: Tensor
    ) -> tuple[Tensor, Observed]:
        weight = head_weight(self.chunks[-1].module)
        vocabulary = own_vocabulary(len(weight), self.vocab_size)
        of_head = (output[0], weight, batch.rows, objective)
        if self.config.loss.fuse_lm_head:
            into_main_grad = weight.requires_grad  # false for weights frozen beside adapters
            loss, stats = linear_policy_loss(*of_head, into_main_grad=into_main_grad, **vocabulary)
        else:
            loss, stats = head_policy_loss(*of_head, **vocabulary)
        # the engine's log-probs would not differ from themselves
        recomputed = self.config.loss.old_logprobs == "recompute"
        trainer_N = batch.rows.old_logprobs_N if recomputed else None
        reported = loss
        if batch.importance_weights_N is not None:
            weights_N = batch.importance_weights_N
            reported = weighted_value(stats.logprobs_N, batch.rows, objective, weights_N, stats.entropy_N)
        return loss * scale, _observed(batch, reported, stats, trainer_N)

    def _logprob_output(self, batch: PackedBatch, output: Tensor) -> Tensor:
        weight = head_weight(self.chunks[-1].module)
        vocabulary = own_vocabulary(len(weight), self.vocab_size)
        if not self.config.loss.fuse_lm_head:
            backend = self.loss_backend.name
            return head_logprobs(output[0], weight, batch.rows, backend=backend, **vocabulary)
        return linear_packed_logprobs(
            output[0],
            weight,
            batch.rows.targets_N,
            response_mask_N=batch.rows.response_mask_N.bool(),
            response_rows_R=batch.loss_rows(),
            temperature_N=batch.rows.temperature_of_row(),
            sampling_sets=batch.rows.sampling_sets,
            backend=self.loss_backend.name,
            **vocabulary,
        )


def _with_engine_logprobs(packs: Sequence[PackedArrays]) -> list[PackedArrays]:
    return [replace(arrays, old_logprobs_R=arrays.rollout_logprobs_R) for arrays in packs]


_MAXIMA = ("ratio_max", "logprob_diff_abs_max")
"""Metrics reduced by maximum; all others are sums."""
_MEANS = (
    ("learning_rate", "learning_rate", "updates_computed"),
    ("grad_norm", "grad_norm", "updates_taken"),
    ("clip_fraction", "clipped", "clip_terms"),
    ("ratio_mean", "ratio", "sequences"),
    ("entropy", "entropy", "tokens"),
    ("kl", "kl", "tokens"),
    ("logprob_diff_abs_mean", "logprob_diff_abs", "compared_tokens"),
    ("logprob_diff_mean", "logprob_diff", "compared_tokens"),
    ("logprob_diff_k3", "logprob_diff_k3", "compared_tokens"),
)
"""Metrics that are means: the sum and the count that make each."""


_OF_EPOCHS = ("loss", "grad_norm", "clip_fraction", "ratio_mean", "ratio_max", "entropy", "kl")
"""Metrics that each of several epochs reports as well, as `NAME_epoch_1` and so on."""


@dataclass
class _Totals:
    """Sums and maxima that add up over micro-batches, ranks and mini-batches."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    maxima: dict[str, float] = field(default_factory=dict)

    def see(self, observed: Mapping[str, float]) -> None:
        for name, value in observed.items():
            if name in _MAXIMA:
                self.maxima[name] = max(self.maxima.get(name, -math.inf), value)
            else:
                self.sums[name] += value

    def merge(self, totals: _Totals) -> None:
        self.see(totals.sums)
        self.see(totals.maxima)

    def metrics(self) -> dict[str, float]:
        sums = self.sums
        metrics = {name: sums[name] for name in ("updates_skipped", "updates_empty", "loss")}
        # a mean over nothing is absent: an entropy of 0 would look like a collapse
        for mean, total, count in _MEANS:
            if total in sums and sums[count]:
                metrics[mean] = sums[total] / sums[count]
        return metrics | mtp_metrics(sums) | self.maxima


def _update_metrics(epochs: Sequence[_Totals], num_minibatches: int) -> dict[str, float]:
    """Return the metrics over all epochs of an update and, of several, those of each."""
    totals = _Totals()
    for epoch in epochs:
        totals.merge(epoch)
    metrics = totals.metrics()
    metrics["loss"] /= num_minibatches * len(epochs)
    if len(epochs) == 1:
        return metrics
    for number, epoch in enumerate(epochs, 1):
        epoch_metrics = _update_metrics([epoch], num_minibatches)
        metrics |= {
            f"{name}_epoch_{number}": epoch_metrics[name] for name in _OF_EPOCHS if name in epoch_metrics
        }
    return metrics


def _observed(batch: PackedBatch, loss: Tensor, stats: LossStats, trainer_N: Tensor | None) -> Observed:
    """Return sums and `_MAXIMA` of one micro-batch, without padding; the first of ranks that share sequences
    reports on whole ones. Engine log-probs are compared with `trainer_N`, or with the present ones."""
    count, is_first = batch.num_sequences, batch.context.rank == 0
    observed: dict[str, Tensor | float] = {"loss": loss.detach()} if is_first else {}
    if count == 0:
        return observed
    if is_first:
        ratio_S = stats.mean_log_ratio_S[:count].exp()
        observed |= {"sequences": count, "ratio": ratio_S.sum(), "ratio_max": ratio_S.max()}
    rows = batch.loss_rows()
    by_token = len(stats.clipped) == len(batch.rows.targets_N)
    if by_token or is_first:
        clip_terms = len(rows) if by_token else count
        observed |= {"clip_terms": clip_terms, "clipped": stats.clipped.sum()}
    observed |= {"tokens": len(rows), "entropy": stats.entropy_N.sum()}
    if stats.kl_N is not None:
        observed["kl"] = stats.kl_N.sum()
    if batch.rollout_logprobs_N is not None:
        trainer_N = stats.logprobs_N if trainer_N is None else trainer_N
        compared = batch.compared_rows_R
        if not len(compared):
            return observed
        gap = (trainer_N - batch.rollout_logprobs_N)[compared]
        observed |= {
            "compared_tokens": len(compared),
            "logprob_diff": gap.sum(),
            "logprob_diff_abs": gap.abs().sum(),
            "logprob_diff_k3": (gap.exp() - 1 - gap).sum(),
            "logprob_diff_abs_max": gap.abs().max(),
        }
    return observed
