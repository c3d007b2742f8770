"""The policy under training: log-probs and optimizer steps. It sees tokens, advantages, weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_ibpo.config import Config
from megatron_ibpo.loss import (
    LossRows,
    LossStats,
    Objective,
    linear_packed_logprobs,
    linear_packed_sequence_loss,
    packed_logprobs,
    packed_sequence_loss,
    resolve_variant,
)
from megatron_ibpo.policy.forward_backward import (
    Passes,
    gather_found,
    is_reporting_rank,
    make_trainable,
    micro_batches,
    per_token,
    run_batches,
)
from megatron_ibpo.policy.fused_head import head_weight, whole_hidden_states
from megatron_ibpo.policy.objective import aggregation, backend_in_use, check_loss, run_objective
from megatron_ibpo.policy.packing import PackedBatch, split_minibatches
from megatron_ibpo.records import TrainSequence
from megatron_ibpo.world import World

__all__ = ["Trainer"]


class Trainer:
    """This rank's part of the policy, its optimizer and schedule."""

    def __init__(self, chunks: list[Any], vocab_size: int, config: Config, world: World, total_updates: int):
        """
        Args:
            chunks: what `build_model` made for this rank.
            vocab_size: true vocabulary; logits beyond it are padding.
            total_updates: optimizer steps of the whole run, for the learning-rate schedule.

        Raises:
            ValueError: a loss that is unknown, or that its flags do not fit.
        """
        self.config, self.world, self.vocab_size = config, world, vocab_size
        check_loss(config.loss)
        self.loss_backend = backend_in_use(config, world.device)
        trainable = make_trainable(chunks, config, config.optimizer.lr, total_updates)
        self.chunks, self.optimizer, self.scheduler = (
            trainable.chunks,
            trainable.optimizer,
            trainable.scheduler,
        )
        self._passes = Passes()

    def update(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """One rollout's optimizer steps over the same sequences, given on every rank.

        Sequences of advantage 0 have no gradient and are not computed, only counted.

        Returns:
            metrics, the same on every rank. `updates_skipped` counts optimizer steps that were not taken
            because the loss or the gradient was not finite.
        """
        started = time.perf_counter()
        loss_config = self.config.loss
        minibatches = split_minibatches(sequences, loss_config.num_steps_per_rollout)
        divisors = [aggregation(self.config, part) for part in minibatches]
        live = [[s for s in part if s.has_advantage] for part in minibatches]
        # the first mini-batch's own forward gives its old log-probs, unless a weight depends on them
        for part in live if loss_config.use_tis else live[1:]:
            self._fill_old_logprobs(part)
        seconds_logprobs = time.perf_counter() - started
        tis_weights = [self._apply_tis(part) for part in live] if loss_config.use_tis else []
        totals = _Totals()
        for number, part in enumerate(live):
            own_old = number == 0 and not loss_config.use_tis
            totals.merge(self._optimizer_step(part, own_old, divisors[number]))
        metrics = totals.metrics()
        metrics["loss"] /= len(live)
        metrics["sequences_trained"] = sum(len(part) for part in live)
        metrics["sequences_without_advantage"] = len(sequences) - metrics["sequences_trained"]
        trained = [s for part in live for s in part]
        metrics["tokens_trained"] = sum(s.num_tokens for s in trained)
        metrics["tokens_trained_corrections"] = sum(s.num_tokens for s in trained if s.kind == "correction")
        metrics["seconds_old_logprobs"] = seconds_logprobs
        if tis_weights and any(tis_weights):
            weights = [w for part in tis_weights for w in part]
            metrics["tis_weight_mean"] = sum(weights) / len(weights)
        return metrics

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[tuple[float, ...]]:
        """Log-prob of every response token under the present weights, on every rank, in order."""
        if not sequences:
            return []
        self._passes.forward += [s.num_tokens for s in sequences]
        batches = self._micro_batches(sequences, own_old_logprobs=True)
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            stored = self._run(batches, self._logprob_output, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        parts = self.world.all_gather(stored if is_reporting_rank() else [])
        return gather_found(parts, len(sequences))

    def take_passes(self) -> Passes:
        """What was computed since the last take."""
        taken, self._passes = self._passes, Passes()
        return taken

    def _fill_old_logprobs(self, sequences: list[TrainSequence]) -> None:
        for sequence, logprobs in zip(sequences, self.logprobs(sequences), strict=True):
            sequence.old_logprobs = logprobs

    def _apply_tis(self, sequences: list[TrainSequence]) -> list[float]:
        """Truncated importance weights of trainer over rollout (ibpo step 14): on the sequence's weight for
        sequence-level variants, on each token's weight for token-level ones. Returns the weights."""
        cap = self.config.loss.tis_clip
        variant, _ = resolve_variant(self.config.loss.loss_variant)
        token_level = variant.sequence_term is None and not variant.sequence_ratio
        weights: list[float] = []
        for s in sequences:
            if s.rollout_logprobs is None or s.old_logprobs is None:
                raise ValueError("--use-tis needs the rollout's log-probs with every sequence")
            gaps = [old - rollout for old, rollout in zip(s.old_logprobs, s.rollout_logprobs, strict=True)]
            if token_level:
                truncated = [min(math.exp(min(gap, 50.0)), cap) for gap in gaps]
                before = s.token_weights or (1.0,) * len(gaps)
                s.token_weights = tuple(w * b for w, b in zip(truncated, before, strict=True))
                weights.append(sum(truncated) / len(truncated))
            else:
                weights.append(min(math.exp(min(sum(gaps) / len(gaps), 50.0)), cap))
                s.weight *= weights[-1]
        return weights

    def _optimizer_step(
        self, sequences: list[TrainSequence], own_old_logprobs: bool, divisor: str | float
    ) -> _Totals:
        totals = _Totals()
        self.scheduler.step(1)
        if not sequences:
            totals.add("updates_empty", 1)
            return totals
        self._passes.updates += [s.num_tokens for s in sequences]
        pieces = self.accumulate_gradients(
            sequences, self.objective(divisor), own_old_logprobs=own_old_logprobs
        )
        for piece in pieces:
            totals.merge(piece)
        norm = self.gradient_norm()
        totals.add("learning_rate", self.scheduler.get_lr(self.optimizer.param_groups[0]), average=True)
        if math.isfinite(norm) and math.isfinite(totals.sums["loss"]):
            totals.add("grad_norm", norm, average=True)
            self.optimizer.step()
        else:
            totals.add("updates_skipped", 1)
            totals.sums["loss"] = 0.0
        return totals

    def objective(self, divisor: str | float) -> Objective:
        """The run's loss, with the divisor of a mini-batch (`aggregation`)."""
        return run_objective(self.config, divisor, self.loss_backend)

    def accumulate_gradients(
        self, sequences: Sequence[TrainSequence], objective: Objective, *, own_old_logprobs: bool
    ) -> list[_Totals]:
        """Fill the gradient buffers with the gradient of Σ weight x loss over `sequences`, which must not be
        empty, reduced over the ranks; what was in them is gone. Returns what was observed on the way, the
        same on every rank."""
        batches = self._micro_batches(sequences, own_old_logprobs)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        # Megatron divides by the micro-batches and averages over data-parallel ranks; the loss is a sum
        scale = len(batches) * parallel_state.get_data_parallel_world_size()
        stored = self._run(batches, partial(self._loss_output, scale, objective), forward_only=False)
        parts = self.world.all_gather(stored if is_reporting_rank() else [])
        return [piece for part in parts for piece in part]

    def gradient_norm(self) -> float:
        """Norm of what the gradient buffers hold, each parameter of the whole model counted once."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def gradient_buffers(self) -> list[Tensor]:
        """This rank's gradients, as flat fp32 tensors that may be read and written. With the distributed
        optimizer only this rank's shard of them is meaningful."""
        return [
            buffer.grad_data
            for chunk in self.chunks
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
        ]

    def weighted(self, sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
        """Copies of `sequences` with the weights that an update over all of them would give them: truncated
        importance weights included."""
        (copies,) = split_minibatches(sequences, 1)
        if self.config.loss.use_tis:
            live = [s for s in copies if s.has_advantage]
            self._fill_old_logprobs(live)
            self._apply_tis(live)
        return copies

    def _micro_batches(self, sequences: Sequence[TrainSequence], own_old_logprobs: bool) -> list[PackedBatch]:
        max_tokens = self.config.model.max_tokens_per_gpu
        return micro_batches(sequences, max_tokens, self.world.device, own_old_logprobs=own_old_logprobs)

    def _run(self, batches: list[PackedBatch], output: Callable, *, forward_only: bool) -> list[Any]:
        processor = whole_hidden_states if self.config.loss.fuse_lm_head else None
        return run_batches(
            self.chunks, batches, output, forward_only=forward_only, output_processor=processor
        )

    def _loss_output(
        self, scale: float, objective: Objective, batch: PackedBatch, output: Tensor
    ) -> tuple[Tensor, _Totals]:
        rows = LossRows(
            targets_N=batch.targets_N,
            response_mask_N=batch.response_mask_N,
            cu_seqlens=batch.cu_seqlens,
            advantages=batch.advantages,
            old_logprobs_N=batch.old_logprobs_N,
            token_weights_N=batch.token_weights_N,
            sequence_weights_S=batch.weights_S,
            temperature=batch.temperature_S,
        )
        if self.config.loss.fuse_lm_head:
            weight = head_weight(self.chunks[-1].module)
            loss, stats = linear_packed_sequence_loss(
                output[0], weight, rows, objective, into_main_grad=True, **self._vocabulary(len(weight))
            )
        else:
            vocabulary = self._vocabulary(output.shape[-1])
            loss, stats = packed_sequence_loss(output[0], rows, objective, inplace=True, **vocabulary)
        return loss * scale, _observed(batch, loss, stats)

    def _logprob_output(self, batch: PackedBatch, output: Tensor) -> tuple[Tensor, dict]:
        lengths = batch.cu_seqlens.diff().long()
        mask_N = batch.response_mask_N.bool()
        rows: dict[str, Any] = {
            "targets_N": batch.targets_N,
            "response_mask_N": mask_N,
            "temperature_N": batch.temperature_S.repeat_interleave(lengths),
            "backend": self.loss_backend.name,
        }
        if self.config.loss.fuse_lm_head:
            weight = head_weight(self.chunks[-1].module)
            logprobs_N = linear_packed_logprobs(output[0], weight, **rows, **self._vocabulary(len(weight)))
        else:
            vocabulary = self._vocabulary(output.shape[-1])
            logprobs_N, _ = packed_logprobs(output[0], entropy=False, **rows, **vocabulary)
        return output.new_zeros(()), per_token(batch, logprobs_N)

    def _vocabulary(self, width: int) -> dict[str, Any]:
        """This rank's columns of the vocabulary, of which there are `width` with padding."""
        start = parallel_state.get_tensor_model_parallel_rank() * width
        return {
            "tp_group": parallel_state.get_tensor_model_parallel_group(),
            "vocab_range": (start, min(start + width, self.vocab_size)),
        }


@dataclass
class _Totals:
    """Sums, maxima and averages that add up over micro-batches, ranks and mini-batches."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    averages: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, name: str, value: float, *, average: bool = False) -> None:
        if average:
            total, count = self.averages.get(name, (0.0, 0))
            self.averages[name] = (total + value, count + 1)
        else:
            self.sums[name] = self.sums.get(name, 0.0) + value

    def merge(self, other: _Totals) -> None:
        for name, value in other.sums.items():
            self.add(name, value)
        for name, value in other.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, -math.inf), value)
        for name, (total, count) in other.averages.items():
            before, times = self.averages.get(name, (0.0, 0))
            self.averages[name] = (before + total, times + count)

    def metrics(self) -> dict[str, float]:
        sums = dict(self.sums)
        out = {name: total / count for name, (total, count) in self.averages.items()}
        out["updates_skipped"] = sums.pop("updates_skipped", 0.0)
        out["updates_empty"] = sums.pop("updates_empty", 0.0)
        out["loss"] = sums.pop("loss", 0.0)
        tokens = max(1.0, sums.pop("tokens", 0.0))
        terms = max(1.0, sums.pop("clip_terms", 0.0))
        sequences = max(1.0, sums.pop("sequences", 0.0))
        compared = sums.pop("compared_tokens", 0.0)
        out["clip_fraction"] = sums.pop("clipped", 0.0) / terms
        out["ratio_mean"] = sums.pop("ratio", 0.0) / sequences
        out["entropy"] = sums.pop("entropy", 0.0) / tokens
        if "kl" in sums:
            out["kl"] = sums.pop("kl") / tokens
        if compared:
            out["logprob_diff_abs_mean"] = sums.pop("logprob_diff_abs") / compared
            out["logprob_diff_mean"] = sums.pop("logprob_diff") / compared
            out["logprob_diff_k3"] = sums.pop("logprob_diff_k3") / compared
        return {**out, **self.maxima}


def _observed(batch: PackedBatch, loss: Tensor, stats: LossStats) -> _Totals:
    """Plain numbers of one micro-batch; the padding sequence is left out."""
    count = len(batch.members)
    totals = _Totals()
    totals.add("loss", loss.item())
    if count == 0:
        return totals
    mask_N = batch.response_mask_N.bool()
    ratio_S = stats.mean_log_ratio_S[:count].exp()
    totals.add("sequences", count)
    totals.add("tokens", mask_N.sum().item())
    totals.add("clip_terms", count if len(stats.clipped) != len(mask_N) else mask_N.sum().item())
    totals.add("clipped", stats.clipped.sum().item())
    totals.add("ratio", ratio_S.sum().item())
    totals.add("entropy", stats.entropy_N.sum().item())
    totals.maxima["ratio_max"] = ratio_S.max().item()
    if stats.kl_N is not None:
        totals.add("kl", stats.kl_N.sum().item())
    if batch.rollout_logprobs_N is not None:
        trainer_N = stats.logprobs_N if batch.old_logprobs_N is None else batch.old_logprobs_N
        gap = (trainer_N - batch.rollout_logprobs_N)[mask_N]
        totals.add("compared_tokens", len(gap))
        totals.add("logprob_diff", gap.sum().item())
        totals.add("logprob_diff_abs", gap.abs().sum().item())
        totals.add("logprob_diff_k3", (gap.exp() - 1 - gap).sum().item())
        totals.maxima["logprob_diff_abs_max"] = gap.abs().max().item()
    return totals
