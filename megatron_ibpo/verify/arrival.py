"""Weights arrive: each kind of tensor is changed alone, sent, and seen in what the engine samples."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_ibpo.basics.records import Floats, Sample, SampleRequest, TokenIds, token_ids
from megatron_ibpo.run.state import Run
from megatron_ibpo.verify.batch import Subject
from megatron_ibpo.verify.engine import (
    FLOOR,
    SPREADS,
    as_trained,
    differences,
    engine_dtype,
    engine_samples,
    loaded,
    logprobs_of,
)
from megatron_ibpo.verify.own_policy import weights_in
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
class _Seen:
    samples: list[Sample]
    trainer: list[Floats]
    """The trainer's log-probs of them under the weights that were sent."""


def check_arrival(subject: Subject, run: Run, export: Callable[[str], Path]) -> Iterator[Row]:
    """Change each kind of tensor alone; then all of them."""
    if run.engines is None:
        raise NotCheckedError("recorded rollouts are replayed, so there is no engine")
    origin = export("arrival")
    tensors = weights_in(origin)
    by_kind: dict[str, list[str]] = {}
    for name in tensors:
        by_kind.setdefault(kind_of(name), []).append(name)
    kinds = {"all tensors": list(tensors)} | ({} if subject.full else by_kind)
    seen: dict[str, _Seen] = {}
    for number, (kind, names) in enumerate(kinds.items()):
        changed = _written(origin, origin.parent / "changed", tensors, names, seed=number)
        run.policy.load_weights(changed)
        seen[kind] = _sent_and_sampled(subject, run)
    run.policy.load_weights(origin)
    if subject.small.model.lora_rank is not None:
        for factor in ("A", "B"):
            run.policy.shift_adapters(factor, SHIFT)
            seen[f"adapters' {factor}"] = _sent_and_sampled(subject, run)
            run.policy.shift_adapters(factor, -SHIFT)
    everything = [as_trained(s) for own in seen.values() for s in own.samples]
    exact, rounded = (
        logprobs_of(loaded(origin, dtype), everything) for dtype in (torch.float64, engine_dtype(run))
    )
    spread = float(np.concatenate(differences(exact, rounded, everything)).mean())
    unchanged = run.policy.logprobs(everything)
    yield from _rows(seen, unchanged, max(FLOOR, SPREADS * spread))


def kind_of(name: str) -> str:
    """Return a tensor's name without the numbers of its layer and its expert."""
    return re.sub(r"\.\d+(?=\.)", ".*", name).removeprefix("model.").removesuffix(".weight")


def _rows(seen: Mapping[str, _Seen], unchanged: Sequence[Floats], bound: float) -> Iterator[Row]:
    start = 0
    for kind, own in seen.items():
        before = unchanged[start : start + len(own.samples)]
        start += len(own.samples)
        sequences = [as_trained(sample) for sample in own.samples]
        engine = [sample.logprobs for sample in own.samples]
        gap, moved = (
            float(np.concatenate(differences(own.trainer, other, sequences)).mean())
            for other in (engine, before)
        )
        reason = f"mean |difference| in nats after an update that moves the trainer's by {moved:.2g}"
        if gap <= bound and moved < VISIBLE * bound:
            reason += ", too little to be seen beside the bound"
            yield Row(f"arrival: {kind}", "not checked", gap, bound, "precision of the engine", reason)
        else:
            yield measured(
                f"arrival: {kind}", gap, bound,
                f"{SPREADS:.0f} x the spread of the engine's precision", reason,
                "--check-weight-update-equal, the engine's name and layout of this tensor",
            )  # fmt: skip


def _written(
    origin: Path, target: Path, tensors: Mapping[str, Tensor], names: Sequence[str], seed: int
) -> Path:
    """Write a checkpoint in which the tensors `names` differ from those of `origin`."""
    target.mkdir(exist_ok=True)
    copy_all_but_weights(origin, target, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    changed = dict(tensors)
    for name in names:
        size = tensors[name].float().square().mean().sqrt().item() * SHARE or SHIFT
        noise = torch.randn(tensors[name].shape, generator=generator) * size
        changed[name] = (tensors[name] + noise).to(tensors[name].dtype)
    save_file(changed, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _sent_and_sampled(subject: Subject, run: Run) -> _Seen:
    """Send the trainers' weights, and sample the same prompts from the engine as before."""
    assert run.engines is not None
    rollout = subject.small.rollout
    run.engines.update_weights(run.engines.version + 1)
    requests = [
        SampleRequest(
            ids,
            number,
            min(LONGEST, rollout.rollout_max_response_len),
            rollout.rollout_temperature,
            *rollout.top_p_and_k(0),
        )
        for number, ids in enumerate(_prompts(subject))
    ]
    samples = engine_samples(run, requests)
    return _Seen(samples, run.policy.logprobs([as_trained(sample) for sample in samples]))


def _prompts(subject: Subject) -> list[TokenIds]:
    """Return the run's first prompts, and twice a long one made of many, as caches keep whole blocks only."""
    assert subject.data.prompts is not None
    room = subject.foundation.max_context - LONGEST - 1
    ids = [prompt.token_ids for prompt in subject.data.prompts.batch(0, 8 * PROMPTS)]
    ids = [own if len(own) else token_ids([1, 2, 3]) for own in ids]  # an environment writes its own
    joined = np.concatenate(ids)[: min(BLOCK + PROMPTS, room)]
    return [*ids[:PROMPTS], joined, joined]
