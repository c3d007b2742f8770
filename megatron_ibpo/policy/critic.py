"""The critic of PPO: the policy's model with one output, trained on returns by a clipped squared error."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.basics.records import Floats
from megatron_ibpo.config import Config
from megatron_ibpo.policy import forward_backward
from megatron_ibpo.policy.forward_backward import Observed
from megatron_ibpo.policy.packing import PackedBatch, packed
from megatron_ibpo.policy.planning import MiniBatch, RankForward, RankUpdate


class ValueHead(torch.nn.Module):
    """A head with one number per hidden state, in place of GPTModel's output layer. Starts at 0. It and its
    gradient are the same on every tensor-parallel rank, since each sees all rows."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device, sequence_parallel: bool):
        super().__init__()
        self.sequence_parallel = sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=dtype, device=device))

    def forward(self, hidden_NBH: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Return (values [N, B, 1] in fp32, None for the bias, as Megatron's linear layers do)."""
        if self.sequence_parallel:
            hidden_NBH = gather_from_sequence_parallel_region(hidden_NBH, tensor_parallel_output_grad=False)
        return F.linear(hidden_NBH.float(), self.weight.float(), self.bias.float()), None


def value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Return ½ max((v - R)², (clip(v, v_old ± ε) - R)²) of each row, and where the clipped term is the larger
    (as in PPO's reference implementation; arXiv 2005.12729, section 3)."""
    move_N = values_N - old_values_N
    bounded_N = torch.where(move_N.abs() > clip, old_values_N + move_N.clamp(-clip, clip), values_N)
    plain_N, clipped_N = (values_N - returns_N).square(), (bounded_N - returns_N).square()
    return 0.5 * torch.maximum(plain_N, clipped_N), clipped_N > plain_N


class Critic:
    """This rank's part of the value model, its optimizer and schedule."""

    def __init__(self, chunks: list[Any], config: Config, world: World, total_updates: int):
        """`chunks` are the result of `build_value_model` on this rank."""
        self.config, self.world = config, world
        lr = config.optimizer.critic_lr
        self.chunks, self.optimizer, self.scheduler = forward_backward.make_trainable(
            chunks, config, lr, total_updates
        )

    def values(self, share: RankForward) -> list[tuple[int, Floats]]:
        """Return (index in the planned list, values before each response token) of each sequence of this
        rank; empty on ranks that do not report. Collective."""
        values = forward_backward.infer(
            self.chunks, packed(share), lambda _, values_1N1: values_1N1[0, :, 0], self.world.device
        )
        return values if forward_backward.is_reporting_rank() else []

    def update(self, share: RankUpdate) -> dict[str, float]:
        """Take one rollout's optimizer steps towards the sequences' `returns`; every trained token of a
        mini-batch counts the same. Collective. Returns metrics, the same on every rank;
        `critic_updates_skipped` counts steps that were not taken because loss or gradient was not finite."""
        epochs = range(self.config.loss.num_epochs_per_rollout)
        steps = [self._optimizer_step(part) for _ in epochs for part in share]
        forward_backward.finish_gathers(self.chunks)
        taken_steps = [step for step in steps if step["critic_updates_skipped"] == 0]
        metrics = {"critic_updates_skipped": float(len(steps) - len(taken_steps))}
        for name in ("critic_loss", "critic_error", "critic_clip_fraction", "critic_grad_norm"):
            if taken_steps:
                metrics[name] = sum(step[name] for step in taken_steps) / len(taken_steps)
        return metrics

    def _optimizer_step(self, minibatch: MiniBatch) -> dict[str, float]:
        self.scheduler.step(1)
        packs = packed(minibatch.cut.micro_batches)
        tokens = max(1, minibatch.trained_tokens)
        output = partial(_loss_output, tokens, self.config.loss.value_clip)
        pieces = forward_backward.accumulate_gradients(self.chunks, self.optimizer, packs, output, self.world)
        loss, error, clipped = (
            sum(piece[name] for piece in pieces) / tokens for name in ("loss", "error", "clipped")
        )
        norm = forward_backward.gradient_norm(self.optimizer)
        finite = math.isfinite(norm) and math.isfinite(loss)
        if finite:
            forward_backward.take_step(self.optimizer, norm)
        return {
            "critic_loss": loss,
            "critic_error": error,
            "critic_clip_fraction": clipped,
            "critic_grad_norm": norm,
            "critic_updates_skipped": float(not finite),
        }


def _loss_output(
    tokens: int, clip: float, scale: float, batch: PackedBatch, values_1N1: Tensor
) -> tuple[Tensor, Observed]:
    """Return (scaled loss, sums over trained rows of loss, |v - R| and clipped rows)."""
    if batch.returns_N is None or batch.values_N is None:  # nothing but padding: `plan_value_update` checked
        return values_1N1.sum() * 0.0, {"loss": 0.0, "error": 0.0, "clipped": 0.0}
    mask_N, values_N = batch.rows.response_mask_N, values_1N1[0, :, 0]
    loss_N, clipped_N = value_loss(values_N, batch.values_N, batch.returns_N, clip)
    loss = (loss_N * mask_N).sum()
    error = ((values_N.detach() - batch.returns_N).abs() * mask_N).sum()
    observed = {"loss": loss.detach(), "error": error, "clipped": (clipped_N * mask_N).sum()}
    return loss * (scale / tokens), observed
