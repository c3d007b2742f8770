"""Implementations of GSPO's loss that tools/bench_loss.py compares: this project's and those of other
projects.

Each takes the same batch of equally long sequences and prepares the input of its own interface outside the
measured time; the function it returns is the measured forward pass. Implementations that only give log-probs
are completed by `eager_gspo`. A package that is not installed is named as the reason.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "CONTESTANTS",
    "EPSILONS",
    "SET_SIZE",
    "Batch",
    "Contestant",
    "Prepared",
    "make_batch",
    "ours_variant",
    "set_ids",
]

EPSILONS = {"eps_low": 0.2, "eps_high": 0.2}
SET_SIZE = 64
"""Ids to which top-k and top-p restrict a row, where they do."""


@dataclass(frozen=True)
class Batch:
    """S sequences of L rows: a prompt, which is masked, and a response."""

    logits_SLV: Tensor | None
    hidden_SLH: Tensor | None
    weight_VH: Tensor | None
    targets_SL: Tensor
    old_logprobs_SL: Tensor
    mask_SL: Tensor
    advantages_S: Tensor


@dataclass(frozen=True)
class Prepared:
    """A contestant's forward pass, the leaves that get gradients, and a function that undoes a run."""

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    restore: Callable[[], None]
    """Restore logits that backward has overwritten."""
    gradients: Callable[[], tuple[Tensor, ...]]
    """Gradients of the logits [S·L, V], or of hidden states and weight."""


@dataclass(frozen=True)
class Contestant:
    prepare: Callable[[Batch], Prepared]
    fused_head: bool
    """True if it takes hidden states and the LM head's weight instead of logits."""
    on_cpu: bool
    """True if it runs on a CPU, if necessary under Triton's interpreter."""
    has_sets: bool = False
    """True if rows are restricted to `set_ids`."""
    variant: str = "gspo"
    """Of the loss."""


def make_batch(
    sequences: int,
    length: int,
    vocab: int,
    hidden: int,
    masked: float,
    dtype: torch.dtype,
    device: torch.device,
    fused_head: bool,
    seed: int = 0,
) -> Batch:
    """Return random logits or hidden states; old log-probs are uniform around those of a flat distribution,
    so ratios vary and some are clipped. A share `masked` of every sequence is prompt."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype, device=device)

    mask_SL = torch.ones(sequences, length, device=device)
    mask_SL[:, : int(length * masked)] = 0
    targets_SL = torch.randint(vocab, (sequences, length), generator=generator, device=device)
    logits = None if fused_head else normal(sequences, length, vocab)
    states, weight = (
        (normal(sequences, length, hidden), normal(vocab, hidden)) if fused_head else (None, None)
    )
    if weight is not None:
        weight.mul_(hidden**-0.5)
    noise_SL = torch.randn(sequences, length, generator=generator, device=device)
    old_SL = -torch.log(torch.tensor(float(vocab))).item() - 0.5 + noise_SL
    signs_S = torch.where(torch.arange(sequences, device=device) % 2 == 0, 1.0, -1.0)
    return Batch(logits, states, weight, targets_SL, old_SL, mask_SL, signs_S)


def eager_gspo(logprobs_SL: Tensor, batch: Batch) -> Tensor:
    """Compute GSPO in a few lines of torch, as trainers write it beside a fused cross entropy."""
    mask_SL = batch.mask_SL.to(logprobs_SL.dtype)
    counts_S = mask_SL.sum(1)
    mean_S = ((logprobs_SL - batch.old_logprobs_SL) * mask_SL).sum(1) / counts_S
    ratio_S = mean_S.exp()
    bounded_S = ratio_S.clamp(1 - EPSILONS["eps_low"], 1 + EPSILONS["eps_high"])
    return -torch.minimum(ratio_S * batch.advantages_S, bounded_S * batch.advantages_S).mean()


def set_ids(batch: Batch, vocab: int) -> Tensor:
    """Return SET_SIZE ids per row [S·L, SET_SIZE], spread over the vocabulary, the target first."""
    spread_K = torch.arange(SET_SIZE, device=batch.targets_SL.device) * (vocab // SET_SIZE)
    return (batch.targets_SL.flatten()[:, None] + spread_K) % vocab


# ------------------------------------------------------------------------------------------ from logits


def _from_logits(batch: Batch, logits: Tensor, loss: Callable[[Tensor], Tensor]) -> Prepared:
    """Prepare a loss of logits: `logits` is a leaf that backward may overwrite; `loss` is a function of
    it."""
    given_SLV = batch.logits_SLV
    assert given_SLV is not None
    sequences, length, vocab = given_SLV.shape
    leaf = logits.detach().requires_grad_()

    def restore() -> None:
        leaf.grad = None
        with torch.no_grad():
            if leaf.ndim == 3:  # Liger's has one more row per sequence
                leaf[:, :length].copy_(given_SLV)
            else:
                leaf.copy_(given_SLV.view(-1, vocab))

    def gradients() -> tuple[Tensor, ...]:
        assert leaf.grad is not None
        return (leaf.grad.reshape(sequences, -1, vocab)[:, :length].reshape(-1, vocab),)

    return Prepared(lambda: loss(leaf), (leaf,), restore, gradients)


def _rows(batch: Batch) -> Tensor:
    assert batch.logits_SLV is not None
    return batch.logits_SLV.view(-1, batch.logits_SLV.shape[-1]).clone()


def _gspo(batch: Batch, backend: Any) -> dict[str, Any]:
    """Return the rows and the objective as this project's entry points take them."""
    from megatron_ibpo.loss import LossRows, make_objective

    sequences, length = batch.targets_SL.shape
    step = torch.arange(sequences + 1, dtype=torch.int32, device=batch.targets_SL.device)
    rows = LossRows(
        targets_N=batch.targets_SL.flatten(),
        response_mask_N=batch.mask_SL.flatten(),
        cu_seqlens=step * length,
        advantages=batch.advantages_S,
        old_logprobs_N=batch.old_logprobs_SL.flatten(),
    )
    return {"rows": rows, "objective": make_objective("gspo", EPSILONS, backend=backend)}


def ours(batch: Batch, backend: Any) -> Prepared:
    from megatron_ibpo.loss import policy_loss

    inputs = _gspo(batch, backend)
    return _from_logits(batch, _rows(batch), lambda x: policy_loss(x, **inputs, inplace=True)[0])


def ours_sets(batch: Batch, backend: Any) -> Prepared:
    """Compute GSPO of rows that top-k and top-p restricted to a few ids."""
    from megatron_ibpo.loss import SamplingSets, policy_loss

    assert batch.logits_SLV is not None
    inputs, (rows, size) = _gspo(batch, backend), (batch.targets_SL.numel(), SET_SIZE)
    ids_K = set_ids(batch, batch.logits_SLV.shape[-1]).sort(1).values.flatten().int()
    starts_N = torch.arange(rows, device=ids_K.device) * size
    inputs["rows"] = replace(inputs["rows"], sampling_sets=SamplingSets(ids_K, starts_N, starts_N + size))
    return _from_logits(batch, _rows(batch), lambda x: policy_loss(x, **inputs, inplace=True)[0])


def ours_variant(batch: Batch, variant: str, backend: Any = "triton") -> Prepared:
    """Compute another variant of the loss, with its published parameters."""
    from megatron_ibpo.loss import make_objective, policy_loss

    inputs = _gspo(batch, backend) | {"objective": make_objective(variant, backend=backend)}
    return _from_logits(batch, _rows(batch), lambda x: policy_loss(x, **inputs, inplace=True)[0])


def _with_logprobs(batch: Batch, logprobs: Callable[[Tensor, Tensor], Tensor]) -> Prepared:
    targets_N, shape = batch.targets_SL.flatten(), batch.targets_SL.shape
    return _from_logits(batch, _rows(batch), lambda x: eager_gspo(logprobs(x, targets_N).view(shape), batch))


def _eager_logprobs(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    return logits_NV.float().log_softmax(-1).gather(1, targets_N[:, None]).squeeze(1)


def eager(batch: Batch) -> Prepared:
    return _with_logprobs(batch, _eager_logprobs)


def compiled(batch: Batch) -> Prepared:
    return _with_logprobs(batch, torch.compile(_eager_logprobs))


def trl_eager(batch: Batch) -> Prepared:
    from trl.trainer.utils import selective_log_softmax

    return _with_logprobs(batch, selective_log_softmax)


def quack(batch: Batch) -> Prepared:
    from quack.cross_entropy import cross_entropy

    return _with_logprobs(batch, lambda x, y: -cross_entropy(x, y, reduction="none", inplace_backward=True))


def flash_attn(batch: Batch) -> Prepared:
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    return _with_logprobs(batch, lambda x, y: -cross_entropy_loss(x, y, inplace_backward=True)[0])


def megatron_core(batch: Batch) -> Prepared:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    group = _group_of_one()
    return _with_logprobs(
        batch, lambda x, y: -fused_vocab_parallel_cross_entropy(x[:, None], y[:, None], group).squeeze(1)
    )


def liger(batch: Batch) -> Prepared:
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    assert batch.logits_SLV is not None
    sequences, _, vocab = batch.logits_SLV.shape
    longer = torch.cat([batch.logits_SLV, batch.logits_SLV.new_zeros(sequences, 1, vocab)], 1)

    def loss(logits: Tensor) -> Tensor:
        return triton_grpo_loss(
            logits,
            batch.old_logprobs_SL,
            None,
            batch.targets_SL,
            batch.advantages_S,
            batch.mask_SL,
            temperature=1.0,
            beta=0.0,
            **EPSILONS,
            inplace=True,
            loss_type="grpo",
            importance_sampling_level="sequence",
            reduce=True,
        )[0]

    return _from_logits(batch, longer, loss)


# -------------------------------------------------------------------------------- with the LM head fused


def _from_hidden(batch: Batch, loss: Callable[[Tensor, Tensor], Tensor]) -> Prepared:
    """Prepare a loss with the head: `loss` is a function of hidden states [S, L, H] and weight [V, H]."""
    assert batch.hidden_SLH is not None
    assert batch.weight_VH is not None
    leaves = (batch.hidden_SLH.clone().requires_grad_(), batch.weight_VH.clone().requires_grad_())

    def restore() -> None:
        for leaf in leaves:
            leaf.grad = None

    def gradients() -> tuple[Tensor, ...]:
        return tuple(leaf.grad for leaf in leaves if leaf.grad is not None)

    return Prepared(lambda: loss(*leaves), leaves, restore, gradients)


def ours_head(batch: Batch, backend: Any) -> Prepared:
    from megatron_ibpo.loss import linear_policy_loss

    inputs = _gspo(batch, backend)
    return _from_hidden(batch, lambda x, w: linear_policy_loss(x.flatten(0, 1), w, **inputs)[0])


def ours_logits_head(batch: Batch, backend: Any) -> Prepared:
    """Compute the head as a separate product, and this project's loss of its logits: they are held whole."""
    from megatron_ibpo.loss import policy_loss

    inputs = _gspo(batch, backend)
    return _from_hidden(batch, lambda x, w: policy_loss(x.flatten(0, 1) @ w.t(), **inputs, inplace=True)[0])


def verl_head(batch: Batch) -> Prepared:
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    def loss(states: Tensor, weight: Tensor) -> Tensor:
        logprobs_1SL, _ = linear_cross_entropy(states, weight, batch.targets_SL, 1.0, "none", None)
        return eager_gspo(logprobs_1SL.view(batch.targets_SL.shape), batch)

    return _from_hidden(batch, loss)


def cce_head(batch: Batch) -> Prepared:
    from cut_cross_entropy import linear_cross_entropy

    def loss(states: Tensor, weight: Tensor) -> Tensor:
        nll_SL = linear_cross_entropy(states, weight, batch.targets_SL, reduction="none")
        return eager_gspo(-nll_SL, batch)

    return _from_hidden(batch, loss)


def liger_head(batch: Batch) -> Prepared:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    module = LigerFusedLinearGRPOLoss(
        beta=0.0,
        use_ref_model=False,
        compiled=batch.targets_SL.is_cuda,
        epsilon_low=EPSILONS["eps_low"],
        epsilon_high=EPSILONS["eps_high"],
        loss_type="grpo",
        importance_sampling_level="sequence",
    )

    def loss(states: Tensor, weight: Tensor) -> Tensor:
        return module(
            states,
            weight,
            batch.targets_SL,
            batch.mask_SL,
            batch.advantages_S,
            old_per_token_logps=batch.old_logprobs_SL,
        )[0]

    return _from_hidden(batch, loss)


def _group_of_one() -> Any:
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        store = dist.FileStore(tempfile.mktemp(), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return dist.group.WORLD


CONTESTANTS = {
    "ours": Contestant(partial(ours, backend="triton"), fused_head=False, on_cpu=True),
    "ours, torch": Contestant(partial(ours, backend="torch"), fused_head=False, on_cpu=True),
    "ours, sampling sets": Contestant(
        partial(ours_sets, backend="triton"), fused_head=False, on_cpu=True, has_sets=True
    ),
    **{
        f"ours, {variant}": Contestant(
            partial(ours_variant, variant=variant), fused_head=False, on_cpu=True, variant=variant
        )
        for variant in ("gspo-token", "grpo", "cispo", "sapo", "gmpo")
    },
    "eager fp32": Contestant(eager, fused_head=False, on_cpu=True),
    "torch.compile fp32": Contestant(compiled, fused_head=False, on_cpu=False),
    "TRL eager": Contestant(trl_eager, fused_head=False, on_cpu=True),
    "Liger sequence level": Contestant(liger, fused_head=False, on_cpu=True),
    "megatron-core + eager": Contestant(megatron_core, fused_head=False, on_cpu=False),
    "flash-attn + eager": Contestant(flash_attn, fused_head=False, on_cpu=False),
    "quack + eager": Contestant(quack, fused_head=False, on_cpu=False),
    "ours, head fused": Contestant(partial(ours_head, backend="triton"), fused_head=True, on_cpu=True),
    "ours, head fused, torch": Contestant(partial(ours_head, backend="torch"), fused_head=True, on_cpu=True),
    "ours, head apart": Contestant(partial(ours_logits_head, backend="triton"), fused_head=True, on_cpu=True),
    "verl head fused + eager": Contestant(verl_head, fused_head=True, on_cpu=False),
    "cut-cross-entropy + eager": Contestant(cce_head, fused_head=True, on_cpu=False),
    "Liger head fused": Contestant(liger_head, fused_head=True, on_cpu=True),  # compiles longest
}
