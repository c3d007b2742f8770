"""Weights arrive: each kind of tensor is changed alone, sent, and seen in what the engine samples."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_ibpo.basics.records import Floats, Group, SampleRequest, TokenIds, TrainSequence
from megatron_ibpo.run import steps as loop
from megatron_ibpo.run.saving import sleep_engines
from megatron_ibpo.run.state import Run
from megatron_ibpo.verify.batch import Subject
from megatron_ibpo.verify.engine import (
    FLOOR,
    SPREADS,
    SURE,
    as_trained,
    drawn_row,
    engine_dtype,
    engine_samples,
)
from megatron_ibpo.verify.one_rank import weights_in
from megatron_ibpo.verify.reference import loaded, logprobs_of, mean_difference
from megatron_ibpo.verify.rows import NotCheckedError, Row, measured
from megatron_ibpo.weights.formats.hugging_face import copy_all_but_weights

PROMPTS, LONGEST = 6, 24
BLOCK = 300
"""Tokens of a prompt that fills a block of every cache: those of delta nets have 256."""
SHARE = 1.0
"""Size of the change, as a share of a tensor's root mean square."""
SHIFT = 0.05
"""What is added to the factors of adapters."""
VISIBLE = 3.0
"""Bounds by which a change must move the trainer's log-probs to be seen."""


@dataclass(frozen=True)
class _Sent:
    """Samples from the engine after one kind of tensor was changed and sent."""

    sequences: list[TrainSequence]
    engine: list[Floats]
    """The engine's log-probs."""
    trainer: list[Floats]
    """The trainer's log-probs under the weights that were sent."""


def check_arrival(subject: Subject, run: Run, export: Callable[[str], Path]) -> Iterator[Row]:
    """Change all tensors, and then each kind of tensor alone; send each change, and compare what the engine
    samples."""
    if run.engines is None:
        raise NotCheckedError("recorded rollouts are replayed, so there is no engine")
    origin = export("arrival")
    tensors = weights_in(origin)
    kinds = {"all tensors": list(tensors)}
    if not subject.full:
        for name in tensors:
            kinds.setdefault(kind_of(name), []).append(name)
    sent = {}
    for number, (kind, names) in enumerate(kinds.items()):
        changed = _changed(origin, tensors, names, seed=number)
        run.policy.load_weights(changed)
        sent[kind] = _send_and_sample(subject, run)
        if number == 0:  # a policy so random that its samples tell much
            yield drawn_row("arrival: the draw", loaded(changed, torch.float64), sent[kind].sequences)
            yield _seeds_row(loop.sample(run))
            sleep_engines(run)
    run.policy.load_weights(origin)
    if subject.small.model.lora_rank is not None:
        for factor in ("A", "B"):
            run.policy.shift_adapters(factor, SHIFT)
            sent[f"adapters' {factor}"] = _send_and_sample(subject, run)
            run.policy.shift_adapters(factor, -SHIFT)
    sequences = [s for samples in sent.values() for s in samples.sequences]
    exact, rounded = (
        logprobs_of(loaded(origin, dtype), sequences) for dtype in (torch.float64, engine_dtype(run))
    )
    bound = max(FLOOR, SPREADS * mean_difference(exact, rounded, sequences))
    for kind, samples in sent.items():
        yield _row(f"arrival: {kind}", samples, run.policy.logprobs(samples.sequences), bound)


def _seeds_row(groups: Sequence[Group]) -> Row:
    """Responses to a prompt are drawn independently, and so are not all the same unless that is likely."""
    equal = [g.responses for g in groups if len({r.token_ids.tobytes() for r in g.responses}) == 1]
    unlikely = -sum(float(response.logprobs.sum()) for responses in equal for response in responses[1:])
    return measured(
        "arrival: seeds", unlikely if len(equal) == len(groups) else 0.0, SURE, "chance of 1 in a million",
        "nats by which it is unlikely that all responses to a prompt are the same, as they are for "
        f"{len(equal)} of {len(groups)} prompts", "seeds of requests",
    )  # fmt: skip


def kind_of(name: str) -> str:
    """Return a tensor's name without the numbers of its layer and its expert."""
    return re.sub(r"\.\d+(?=\.)", ".*", name).removeprefix("model.").removesuffix(".weight")


def _row(check: str, sent: _Sent, unchanged: Sequence[Floats], bound: float) -> Row:
    gap = mean_difference(sent.trainer, sent.engine, sent.sequences)
    moved = mean_difference(sent.trainer, unchanged, sent.sequences)
    source = f"{SPREADS:.0f} x the spread of the engine's precision"
    reason = f"mean |difference| in nats after an update that moves the trainer's by {moved:.2g}"
    if gap <= bound and moved < VISIBLE * bound:
        reason += ", too little to be seen beside the bound"
        return Row(check, "not checked", gap, bound, source, reason)
    next_step = "--check-weight-update-equal, the engine's name and layout of this tensor"
    return measured(check, gap, bound, source, reason, next_step)


def _changed(origin: Path, tensors: Mapping[str, Tensor], names: Sequence[str], seed: int) -> Path:
    """Write a checkpoint in which the tensors `names` differ from those of `origin`."""
    target = origin.parent / "changed"
    target.mkdir(exist_ok=True)
    copy_all_but_weights(origin, target, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    changed = dict(tensors)
    for name in names:
        size = tensors[name].square().mean().sqrt().item() * SHARE or SHIFT
        changed[name] = tensors[name] + torch.randn(tensors[name].shape, generator=generator) * size
    save_file(changed, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _send_and_sample(subject: Subject, run: Run) -> _Sent:
    """Send the trainers' weights, and sample the same prompts from the engine as before."""
    assert run.engines is not None
    rollout = subject.small.rollout
    run.engines.update_weights(run.engines.version + 1)
    length, cut = min(LONGEST, rollout.rollout_max_response_len), rollout.top_p_and_k(0)
    samples = engine_samples(run, [
        SampleRequest(ids, seed, length, rollout.rollout_temperature, *cut)
        for seed, ids in enumerate(_prompts(subject))
    ])  # fmt: skip
    sequences = [as_trained(sample) for sample in samples]
    return _Sent(sequences, [sample.logprobs for sample in samples], run.policy.logprobs(sequences))


def _prompts(subject: Subject) -> list[TokenIds]:
    """Return the run's first prompts, and twice a long one made of many, as caches keep whole blocks only."""
    room = subject.foundation.max_context - LONGEST - 1
    prompts = subject.prompt_ids(8 * PROMPTS)
    long_prompt = np.concatenate(prompts)[: min(BLOCK + PROMPTS, room)]
    return [*prompts[:PROMPTS], long_prompt, long_prompt]
