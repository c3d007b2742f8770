"""The loss and gradient of the run's first step, taken again in this process: they do not depend on how the
batch is cut or on what is masked, and are those of transformers in float64."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_ibpo.basics.records import Floats, Group, TrainSequence
from megatron_ibpo.config import Config
from megatron_ibpo.credit import assign_credit
from megatron_ibpo.engines.registry import samples_in_trainer
from megatron_ibpo.loss import choose_backend, policy_loss
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.policy import logits_check
from megatron_ibpo.policy.loss_objective import aggregation, run_objective
from megatron_ibpo.policy.packing import lay_out, pack
from megatron_ibpo.policy.planning import MicroBatch, has_gradient, weighted_mean_length
from megatron_ibpo.run.in_one_process import own_policy
from megatron_ibpo.run.state import Run, context
from megatron_ibpo.verify.rows import NotCheckedError, Row, attempted, exact, largest, measured

CLIPS = (-3.0, -0.4, 0.4, 3.0)
"""Distances of the engine's log-probs from the policy's, in clips: the loss clips half of the sequences."""
READ_OFF, SMALL_LR, NO_LR = 1000.0, 1e-2, 1e-12
"""Learning rates with which a step's change of the weights shows its gradient, log-probs change in proportion
to it, and nothing moves."""
ROUNDING, NO_KL = 2.0**-21, 1e-6
"""Rounding of a float32 weight of size up to 4, twice; and of a KL of 0 in nats."""
RESOLUTION = 2e-6
"""Share of the largest gradient that float32 loses in another, whose terms cancel, such as a delta net's
decay: 1.2e-6 was measured (tiny Qwen3-Next, A_log)."""
BOUND, RECURRENT_BOUND = 2e-4, 1e-3
"""Largest relative difference of a gradient in float32; delta nets sum long products."""
FLOOR, SPREADS = 5e-5, 4
"""Least bound of a mean of log-probs in nats, and how many times the spread of a precision is right."""
METRICS = ("grad_norm", "entropy", "ratio_mean", "clip_fraction")
PLAIN: dict[str, dict[str, Any]] = {
    "loss": {"use_tis": False, "icepop": None, "sequence_rejection": None, "use_routing_replay": False,
             "kl_coef": 0.0},
    "model": {"lora_rank": None, "lora_alpha": None, "lora_targets": ("all",), "moe_aux_loss_coeff": 0.0},
}  # fmt: skip
"""Settings without what the reference does not have."""
ABSURD = {"rollout_logprobs": -30.0, "token_weights": 50.0, "token_advantages": 50.0}
"""Values that would change a gradient if they had a part in it."""

Tensors = Mapping[str, Tensor]
LogProbs = Sequence[Floats]


@dataclass(frozen=True)
class FirstStep:
    """The first step of the small run, to be taken again in this process in other ways."""

    config: Config
    groups: list[Group]
    credited: list[TrainSequence]
    """Sequences that the run trained on."""
    initial: Path
    updated: Path
    """Directories of the weights before and after it."""
    metrics: Mapping[str, float]

    @cached_property
    def sequences(self) -> list[TrainSequence]:
        """The sequences with log-probs near the policy's, and with an advantage where they have none. In each
        third one every fourth token is read and not trained on, like a tool's."""
        holed = [
            replace(
                s, sampling_mask=None, routed_experts=None, advantage=s.advantage or (-1.0) ** i,
                loss_mask=s.loss_mask & ((np.arange(len(s.loss_mask)) % 4 != 1) | (i % 3 != 2)),
            )
            for i, s in enumerate(self.credited)
        ]  # fmt: skip
        with own_policy(self.config) as (policy, _):
            logprobs = policy.logprobs(holed)
        distances = (self.config.loss.eps_clip or 0.05) * np.resize(CLIPS, len(holed))
        return [
            replace(s, rollout_logprobs=np.where(s.loss_mask, near + far, 0).astype(np.float32))
            for s, near, far in zip(holed, logprobs, distances, strict=True)
        ]

    @cached_property
    def uncut(self) -> "Update":
        """One update with all sequences in one micro-batch."""
        return self.update(self.sequences)

    @property
    def bound(self) -> float:
        """Largest relative difference that float32 explains."""
        return RECURRENT_BOUND if read_hf_config(self.config.model.hf_dir).is_recurrent else BOUND

    def update(self, sequences: list[TrainSequence], most_tokens: int = 10**9, **optimizer: Any) -> "Update":
        """Take one update in micro-batches of so many tokens, from the initial weights."""
        config = one_step(self.config, **optimizer)
        cut = replace(config.model, max_tokens_per_gpu=most_tokens, log_probs_max_tokens_per_gpu=None)
        return own_update(replace(config, model=cut), sequences)


class Update:
    """The effect of one update of all its sequences on the weights, named as in a checkpoint."""

    def __init__(self, initial: Tensors, updated: Tensors, metrics: Mapping[str, float]) -> None:
        if not metrics.get("grad_norm"):
            raise NotCheckedError("the sequences have no gradient")
        self.norm, lr = metrics["grad_norm"], metrics["learning_rate"]
        self.change = {name: (initial[name] - updated[name]) / lr for name in initial}
        """How far each weight moved against its gradient g, over the learning rate: g / (|g| + 1)."""
        self.metrics = as_tensors(metrics)
        self.rounding = ROUNDING / lr
        """Rounding error of `change`, from that of the weights."""


def as_tensors(metrics: Mapping[str, float]) -> Tensors:
    """Return the metrics that are compared."""
    return {f"metric {name}": torch.tensor(metrics[name]) for name in METRICS}


def one_step(config: Config, lr: float = READ_OFF, **optimizer: Any) -> Config:
    """Return the settings of one optimizer step per rollout at a constant learning rate, with ratios to the
    engine's log-probs, so that the clip acts in a first update; importance corrections read those already."""
    reads_engine = config.loss.corrections or config.loss.use_routing_replay
    old = config.loss.old_logprobs if reads_engine else "engine"
    return replace(
        config,
        optimizer=replace(config.optimizer, lr=lr, lr_decay_style="constant", **optimizer),
        loss=replace(config.loss, num_steps_per_rollout=1, num_epochs_per_rollout=1, old_logprobs=old),
    )


def own_update(config: Config, sequences: list[TrainSequence]) -> Update:
    """Take one update of the sequences on one rank in this process, from the initial weights."""
    with own_policy(config) as (policy, rank):
        initial = {name: tensor.detach().float().cpu().clone() for name, tensor in rank.export}
        metrics = policy.update(sequences)
        return Update(initial, {name: tensor.detach().float().cpu() for name, tensor in rank.export}, metrics)


def weights_in(directory: Path) -> Tensors:
    """Return all tensors of a checkpoint in float32."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor.float() for file in files for name, tensor in load_file(file).items()}


def tensor_gaps(tensors: Tensors, expected: Tensors, rounding: float = 0.0) -> dict[str, float]:
    """Return the largest difference of each tensor in `expected` relative to its own largest value. Tensors
    within a hundred roundings of 0 in both are not compared; raises NotCheckedError if none is."""
    relative = {}
    for name, reference in expected.items():
        scale = torch.stack([reference, tensors[name]]).abs().max().item()
        if not scale <= 100 * rounding:  # NaN too
            gap = (tensors[name] - reference).abs().max().item() - rounding
            relative[name] = max(gap, 0.0) / scale  # in this order, max keeps a NaN
    if not relative:
        raise NotCheckedError("all tensors are 0, but for rounding")
    return relative


def furthest_row(check: str, gaps: Mapping[str, float], bound: float, what: str) -> Row:
    """Return the row of the largest of relative differences, which are named by what differs."""
    gap, name = largest(gaps)
    reason = f"relative difference of {len(gaps)} {what}; furthest: {name}"
    return measured(check, gap, bound, "float32, relative to the largest of a tensor", reason)


def compared(check: str, update: Update, expected: Update, bound: float) -> Row:
    """Return the row of two updates that should be the same."""
    gaps = tensor_gaps(update.change, expected.change, max(update.rounding, expected.rounding))
    gaps |= tensor_gaps(update.metrics, expected.metrics)
    return furthest_row(check, gaps, bound, "gradients and metrics")


def check_split(step: FirstStep) -> Iterator[Row]:
    """Compare one micro-batch of everything with other cuts, other orders and other neighbours."""
    sequences, config = step.sequences, step.config
    yield from attempted("split: the run's layout", lambda: _check_layout(step))
    cut = step.update(sequences, most_tokens=1)
    yield compared("split: a micro-batch for each sequence", cut, step.uncut, step.bound)
    cut = step.update(sequences[::-1], sum(s.num_tokens for s in sequences) // 3)
    yield compared("split: thirds in the reverse order", cut, step.uncut, step.bound)
    yield from attempted("split: clipping", lambda: _check_clipping(step))
    with own_policy(one_step(config, NO_LR)) as (policy, _):
        first, second = (as_tensors(policy.update(sequences)) for _ in range(2))
    yield furthest_row("split: the same step twice", tensor_gaps(second, first), step.bound, "metrics")
    yield from attempted("split: direction", lambda: _check_small_steps(step))


def check_credit(run: Run, groups: Sequence[Group]) -> Iterator[Row]:
    """A response whose verifier failed has no advantage, and credit is the same when groups come in the
    reverse order."""
    failure: dict[str, Any] = {"reward": None, "correct": False, "reward_error": "made up for this check"}
    failing = [Group(g.prompt, [*g.responses[:-1], replace(g.responses[-1], **failure)]) for g in groups]
    credits = list[Tensors]()
    for order in (failing, failing[::-1]):
        sequences = assign_credit(order, context(run), run.foundation.method).sequences
        values = [s.advantage if s.token_advantages is None else s.token_advantages for s in sequences]
        names = [f"response {s.index} of prompt {s.prompt_index}" for s in sequences]
        pairs = zip(sequences, values, strict=True)
        credit = [torch.from_numpy(np.hstack([s.weight, value])) for s, value in pairs]
        credits.append(dict(zip(names, credit, strict=True)))
    first, second = credits
    failed = {f"response {g.responses[-1].index} of prompt {g.prompt.index}" for g in failing}
    gaps = tensor_gaps(second, first)
    gaps |= {f"{name}, which has no reward": 1.0 for name in failed & first.keys() if first[name][1:].any()}
    yield furthest_row("split: credit", gaps, 1e-6, "credits of groups in either order")


def _check_layout(step: FirstStep) -> Iterator[Row]:
    """The run's own step is that of one rank."""
    if not samples_in_trainer(step.config.rollout.rollout_backend):
        update = Update(weights_in(step.initial), weights_in(step.updated), step.metrics)
        check = f"split: the run's layout, {step.config.cluster.num_trainers} ranks"
        yield compared(check, update, own_update(step.config, step.credited), step.bound)


def _check_clipping(step: FirstStep) -> Iterator[Row]:
    """The norm is that of the gradient that a step's change shows, and half of it as --clip-grad halves the
    gradient."""
    if step.config.model.lora_rank is not None:
        raise NotCheckedError("adapters' gradient is not that of the weights")
    norm, change = step.uncut.norm, step.uncut.change
    # the routers' bias has a rule of its own
    change = {n: moved for n, moved in change.items() if not n.endswith("e_score_correction_bias")}
    clipped = step.update(step.sequences, clip_grad=norm / 2).change
    expected = {n: moved / (2 - moved.abs()) for n, moved in change.items()}  # g / (|g| + 2)
    gaps = tensor_gaps(clipped, expected, step.uncut.rounding)
    norms = [(moved / (1 - moved.abs())).double().norm() for moved in change.values()]
    shown = torch.stack(norms).norm().item()
    gaps[f"the norm, {norm:.4g} in place of {shown:.4g}"] = abs(shown - norm) / norm
    yield furthest_row("split: clipping", gaps, 5 * step.bound, f"gradients clipped to {norm / 2:.3g}")


def _check_small_steps(step: FirstStep) -> Iterator[Row]:
    """Check that what earns more has the larger advantage, and that an update makes it likelier; and that the
    reference policy is the initial one and stays it: a first step has a KL of 0, and a second has not."""
    sequences = [s for s in step.credited if s.has_advantage and s.loss_mask.any()]
    if not sequences:
        raise NotCheckedError("no sequence of the first step has an advantage")
    with own_policy(one_step(step.config, SMALL_LR)) as (policy, _):
        initial = policy.logprobs(sequences)
        batch = [replace(s, rollout_logprobs=old) for s, old in zip(sequences, initial, strict=True)]
        first, updated, second = policy.update(batch), policy.logprobs(sequences), policy.update(batch)
    products = [
        ((s.advantage if s.token_advantages is None else s.token_advantages) * (new - old))[s.loss_mask]
        for s, old, new in zip(sequences, initial, updated, strict=True)
    ]
    # a sum over tokens, and one over sequences: --loss-aggregation decides which of them an update raises
    rise = max(float(sum(p.sum() for p in products)), float(sum(p.mean() for p in products)))
    is_right = {(g.prompt.index, r.index): r.correct for g in step.groups for r in g.responses}
    # where it comes from comparing rewards and is one number
    plain = [s for s in sequences if s.kind == "response" and s.token_advantages is None]
    right, wrong = (
        np.mean([s.advantage for s in plain if is_right[s.prompt_index, s.index] == correct] or [0])
        for correct in (True, False)
    )
    faults = [] if rise > 0 and right >= wrong else ["they should rise, and right ones have more of it"]
    reason = f"log-probs times advantage rise by {rise:.2g}; right have {right:.3g} of it, wrong {wrong:.3g}"
    yield exact("split: direction", faults, reason)
    if step.config.loss.kl_coef:
        faults = [] if abs(first["kl"]) < NO_KL < abs(second["kl"]) else ["it should be 0, and then not"]
        reason = f"{first['kl']:.2g} nats to the initial policy in a first step, {second['kl']:.2g} after"
        yield exact("split: KL", faults, reason)


def check_masked(step: FirstStep) -> Iterator[Row]:
    """Check that values at masked places have no part in a gradient."""

    def loud(s: TrainSequence) -> TrainSequence:
        arrays: dict[str, Any] = {name: getattr(s, name) for name in ABSURD if getattr(s, name) is not None}
        for name, values in arrays.items():
            arrays[name] = np.where(s.loss_mask, values, ABSURD[name]).astype(values.dtype)
        return replace(s, **arrays)

    update = step.update([loud(s) for s in step.sequences])
    yield compared("tokens: masked", update, step.uncut, 0.0)


def check_reference(step: FirstStep) -> Iterator[Row]:
    """Compare log-probs of every response token, then the gradient of the whole batch. Left out is what the
    reference does not have: adapters, importance corrections, a router's own loss."""
    small, sequences = step.config, step.sequences
    plain: Any = {part: replace(getattr(small, part), **settings) for part, settings in PLAIN.items()}
    config = one_step(replace(small, **plain))
    model, logprobs, spread = reference_of(small.model.hf_dir, sequences, "float32")
    with own_policy(config) as (policy, _):
        gap = mean_gap(policy.logprobs(sequences), sequences, logprobs)
    yield logprob_row("reference: log-probs", gap, spread, f"{len(sequences)} sequences in float32")
    if small.model.lora_rank is not None:
        raise NotCheckedError("the gradient of adapters has no reference here")
    update = own_update(config, sequences)
    backend = choose_backend("torch", torch.device("cpu"), torch.float32)
    objective = run_objective(config, aggregation(config, weighted_mean_length(sequences)), backend)
    for s in [s for s in sequences if has_gradient(s, config)]:
        arrays = replace(pack(MicroBatch((0,), (s,))), old_logprobs_R=s.rollout_logprobs)
        rows = lay_out(arrays, multiple=1, device=torch.device("cpu")).rows
        policy_loss(logits_check.transformers_rows(model, s)[0], rows, objective)[0].backward()
    prefix = read_hf_config(small.model.hf_dir).hf_prefix
    gradients = {
        name.replace("model.", prefix, 1): torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    pairs = [(n, g) for n, g in logits_check.tensor_per_expert(gradients) if n in update.change]
    expected = {name: (g / (g.abs() + 1)).float() for name, g in pairs}
    rounding = max(update.rounding, RESOLUTION * max(step.abs().max().item() for step in expected.values()))
    gaps = tensor_gaps(update.change, expected, rounding)
    yield furthest_row("reference: gradient", gaps, 5 * step.bound, "tensors from plain autograd")


def reference_of(hf_dir: Path, sequences: list[TrainSequence], precision: str) -> tuple[Any, LogProbs, float]:
    """Return (transformers' model of a checkpoint in float64, its log-probs, their mean difference from its
    own in a precision). Raises NotCheckedError if transformers has none."""
    dtypes = torch.float64, getattr(torch, precision)
    try:
        model, rounded = (logits_check.transformers_model(hf_dir, dtype) for dtype in dtypes)
    except (ValueError, ImportError) as error:
        raise NotCheckedError(f"transformers cannot load the model: {error}") from error
    logprobs, near = (logits_check.transformers_logprobs(m, sequences) for m in (model, rounded))
    return model, logprobs, mean_gap(near, sequences, logprobs)


def mean_gap(
    logprobs: LogProbs, sequences: Sequence[TrainSequence], expected: LogProbs | None = None
) -> float:
    """Return the mean |difference| from expected log-probs, or from the engine's, over all tokens that the
    policy wrote."""
    others: Sequence[Any] = [s.rollout_logprobs for s in sequences] if expected is None else expected
    triples = zip(logprobs, others, sequences, strict=True)
    gaps = [np.abs(np.subtract(a, b, dtype=float))[s.loss_mask] for a, b, s in triples]
    return float(np.concatenate(gaps).mean())


def logprob_row(check: str, gap: float, spread: float, what: str) -> Row:
    """Return the row of a mean difference of log-probs, beside that of transformers in another precision."""
    source = f"{SPREADS} x transformers' own spread, at least {FLOOR:.0e}"
    return measured(check, gap, max(FLOOR, SPREADS * spread), source, f"mean |difference| in nats: {what}")
