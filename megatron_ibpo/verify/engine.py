"""Log-probs of sampled tokens: the engine's beside the trainer's. They also show whether weights arrive: each
kind of tensor is changed alone, sent, and seen in what the engine samples."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_ibpo.basics.records import Floats, Group, Sample, SampleRequest, TokenIds, TrainSequence
from megatron_ibpo.engines.probe import TIMEOUT_S
from megatron_ibpo.engines.registry import sampling_precision
from megatron_ibpo.run import steps as loop
from megatron_ibpo.run.saving import sleep_engines, wake_engines
from megatron_ibpo.run.state import Run
from megatron_ibpo.verify.batch import Subject, weights_in
from megatron_ibpo.verify.rows import Row, largest, measured, not_checked
from megatron_ibpo.verify.trainer import Array, loaded, logprobs_of, mean_of, spreads, token_gaps
from megatron_ibpo.weights.formats.hugging_face import copy_all_but_weights

FLOOR, SPREADS = 5e-5, 4.0
"""Least bound in nats, and how many times the spread of the engine's precision is right."""
BIN, FEWEST = 8, 24
"""Tokens of a stretch of a response whose mean difference is looked at, and fewest tokens in such a mean."""
OTHER_TEMPERATURES = (0.5, 0.8, 1.25, 2.0)
"""Factors of the temperature at which samples could have been drawn instead."""
SURE = 13.8
"""Logarithm of a million: chances below its inverse are none."""
CHANCE = "chance of 1 in a million"
PROMPTS, LONGEST, BLOCK = 6, 24, 300
"""Prompts to sample after each change of weights, tokens of a response, and tokens of a prompt that fills a
block of every cache: those of delta nets have 256."""
SHIFT = 0.05
"""What is added to the factors of adapters, and changes tensors of zeros."""
VISIBLE = 3.0
"""Bounds by which a change must move the trainer's log-probs to be seen."""

Sent = tuple[list[TrainSequence], list[Floats], float]
"""Samples from the engine after a change was sent, the trainer's log-probs of them under the same weights,
and their mean difference from the engine's."""


def engine_rows(when: str, run: Run, groups: Sequence[Group], hf_dir: Path) -> Iterator[Row]:
    """Compare the log-probs of a step's samples under the weights in `hf_dir`, over all tokens and by their
    place in the response; then the samples with their own probabilities."""
    samples = [sample for group in groups for sample in group.samples if sample.loss_mask.any()]
    sequences = [as_trained(sample) for sample in samples]
    trainer = run.policy.logprobs(sequences)
    gaps = token_gaps([sample.logprobs for sample in samples], trainer, sequences)
    model = loaded(hf_dir, torch.float64)
    exact = logprobs_of(model, sequences)
    precision = sampling_precision(run.config.rollout).dtype
    rounding = spreads(hf_dir, precision, exact, sequences)
    spread = mean_of(rounding)
    bound, source = max(FLOOR, SPREADS * spread), f"{SPREADS:.0f} x transformers' spread in {precision}"
    yield measured(
        f"engine: {when}", mean_of(gaps), bound, source,
        f"mean |difference| in nats over {sum(map(len, gaps))} tokens of {len(samples)} samples, largest "
        f"{max(gap.max() for gap in gaps):.1e}",
    )  # fmt: skip
    gap, part = furthest_part(gaps)
    of_a_part = max(furthest_part(rounding)[0], spread)
    reason = f"largest mean over {part}: a wrong position, an old cache, a state that is not reset"
    yield measured(f"engine: {when}, by place", gap, 2 * max(FLOOR, SPREADS * of_a_part), source, reason)
    if any(sample.sampling_mask is not None for sample in samples):
        yield not_checked(
            f"reference: written {when}", "the reference has no distribution cut by top-p or top-k"
        )
    else:
        written = mean_of(token_gaps(trainer, exact, sequences))
        reason = "mean |difference| in nats between the trainer and transformers on the weights that it wrote"
        yield measured(f"reference: written {when}", written, bound, source, reason)
    yield drawn_row(f"engine: {when}, the draw", model, sequences)


def drawn_row(check: str, model: Any, sequences: Sequence[TrainSequence]) -> Row:
    """Check that tokens are drawn from the distribution that is reported. The ratio of their probability at
    another temperature to that at their own has the mean 1, so a ratio of x or more has a chance of at most
    1/x.

    Args:
        model: transformers' model with the weights that they were sampled with.
    """
    if any(s.sampling_mask is not None for s in sequences):
        return not_checked(check, "top-p or top-k cuts what is drawn from, which only the engine has")

    def total_logprob(factor: float) -> float:
        scaled = [replace(s, temperature=s.temperature * factor) for s in sequences]
        pairs = zip(logprobs_of(model, scaled), sequences, strict=True)
        return sum(float(logprobs[s.loss_mask].sum()) for logprobs, s in pairs)

    total = total_logprob(1.0)
    gain, factor = largest({f"{factor:g}": total_logprob(factor) - total for factor in OTHER_TEMPERATURES})
    reason = f"nats by which the samples are likelier at {factor} times their temperature"
    return measured(check, gain, SURE, CHANCE, reason)


def engine_samples(run: Run, requests: Sequence[SampleRequest]) -> list[Sample]:
    """Return what the first engine samples for the requests under its present weights."""
    assert run.engines is not None
    wake_engines(run)
    samples = run.engines.idle(0).generate(requests, version=run.engines.version, timeout=TIMEOUT_S)
    sleep_engines(run)
    return samples


def as_trained(sample: Sample) -> TrainSequence:
    """Return the sample as a sequence for which trainers compute log-probs."""
    return TrainSequence(
        sample.prompt_token_ids, sample.token_ids, sample.loss_mask, 0.0, 0.0, 0, 0, 0,
        temperature=sample.temperature, rollout_logprobs=sample.logprobs, sampling_mask=sample.sampling_mask,
    )  # fmt: skip


def furthest_part(gaps: Sequence[Array]) -> tuple[float, str]:
    """Return the largest mean over a part, and that part: positions, or responses of a length."""
    parts = {
        f"tokens {start} to {start + BIN - 1}": [gap[start : start + BIN] for gap in gaps]
        for start in range(0, max(map(len, gaps)), BIN)
    }
    by_length, size = sorted(gaps, key=len), len(gaps)
    quarters = [by_length[size * i // 4 : size * (i + 1) // 4] for i in range(4)]
    parts |= {f"responses of {len(q[0])} to {len(q[-1])} tokens": q for q in quarters if q}
    long_parts = {name: part for name, part in parts.items() if sum(map(len, part)) >= FEWEST}
    return largest({name: mean_of(part) for name, part in (long_parts or {"all tokens": [*gaps]}).items()})


def check_arrival(subject: Subject, run: Run, export: Callable[[str], Path]) -> Iterator[Row]:
    """Change all tensors, and then each kind of tensor alone; send each change, and compare what the engine
    samples. What differs is changed once more in another way before it is called wrong."""
    origin = export("arrival")
    tensors = weights_in(origin)
    precision = sampling_precision(run.config.rollout).dtype
    kinds = {"all tensors": list(tensors)}
    for name in () if subject.full else tensors:
        kinds.setdefault(_kind_of(name), []).append(name)
    sent: dict[str, Sent] = {}
    for number, (kind, names) in enumerate(kinds.items()):
        changed = _changed(origin, tensors, names, seed=number)
        run.policy.load_weights(changed)
        sent[kind] = _send_and_sample(subject, run)
        if number == 0:  # a policy so random that its samples tell much, and that rounding moves it more
            model, sequences = loaded(changed, torch.float64), sent[kind][0]
            yield drawn_row("arrival: the draw", model, sequences)
            of_random = mean_of(spreads(changed, precision, logprobs_of(model, sequences), sequences))
            yield _seeds_row(loop.sample(run))
            sleep_engines(run)
    run.policy.load_weights(origin)
    for factor in () if subject.small.model.lora_rank is None else ("A", "B"):
        run.policy.shift_adapters(factor, SHIFT)
        sent[f"adapters' {factor}"] = _send_and_sample(subject, run)
        run.policy.shift_adapters(factor, -SHIFT)
    all_sent = [s for of_kind, _, _ in sent.values() for s in of_kind]
    exact = logprobs_of(loaded(origin, torch.float64), all_sent)
    of_origin = mean_of(spreads(origin, precision, exact, all_sent))
    for number, kind in enumerate(sent):
        sequences, trainer, gap = sent[kind]
        bound = max(FLOOR, SPREADS * (max(of_origin, of_random) if number == 0 else of_origin))
        if gap > bound and kind in kinds:  # a router's tie falls either way by chance, and a fault does not
            run.policy.load_weights(_changed(origin, tensors, kinds[kind], seed=len(kinds) + number))
            again = _send_and_sample(subject, run)
            run.policy.load_weights(origin)
            sequences, trainer, gap = min((sent[kind], again), key=itemgetter(2))
        moved = mean_of(token_gaps(trainer, run.policy.logprobs(sequences), sequences))
        reason = f"mean |difference| in nats after an update that moves the trainer's by {moved:.2g}"
        source = f"{SPREADS:.0f} x transformers' spread in {precision}"
        row = measured(f"arrival: {kind}", gap, bound, source, reason)
        if gap <= bound and moved < VISIBLE * bound:
            unseen = f"{reason}, too little to be seen beside the bound"
            row = replace(row, verdict="not checked", reason=unseen)
        yield row


def _kind_of(name: str) -> str:
    """Return a tensor's name without the numbers of its layer and its expert."""
    return re.sub(r"\.\d+(?=\.)", ".*", name).removeprefix("model.").removesuffix(".weight")


def _changed(origin: Path, tensors: Mapping[str, Tensor], names: Sequence[str], seed: int) -> Path:
    """Write a checkpoint in which the tensors `names` differ from those of `origin`, by as much as their root
    mean square."""
    target = origin.parent / "changed"
    target.mkdir(exist_ok=True)
    copy_all_but_weights(origin, target, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    changed = dict(tensors)
    for name in names:
        size = tensors[name].square().mean().sqrt().item() or SHIFT
        changed[name] = tensors[name] + torch.randn(tensors[name].shape, generator=generator) * size
    save_file(changed, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _send_and_sample(subject: Subject, run: Run) -> Sent:
    """Send the trainers' weights, and sample the same prompts from the engine as before."""
    assert run.engines is not None
    run.engines.update_weights(run.engines.version + 1)
    rollout = subject.small.rollout
    length = min(LONGEST, rollout.rollout_max_response_len)
    settings = length, rollout.rollout_temperature, *rollout.top_p_and_k(0)
    requests = [SampleRequest(ids, seed, *settings) for seed, ids in enumerate(_prompts(subject))]
    samples = engine_samples(run, requests)
    sequences = [as_trained(sample) for sample in samples]
    trainer = run.policy.logprobs(sequences)
    return sequences, trainer, mean_of(token_gaps(trainer, [s.logprobs for s in samples], sequences))


def _prompts(subject: Subject) -> list[TokenIds]:
    """Return the run's first prompts, and twice a long one made of many, as caches keep whole blocks only."""
    room = subject.foundation.max_context - LONGEST - 1
    prompts = [prompt.token_ids for prompt in subject.first_prompts(8 * PROMPTS)]
    long_prompt = np.concatenate(prompts)[: min(BLOCK + PROMPTS, room)]
    return [*prompts[:PROMPTS], long_prompt, long_prompt]


def _seeds_row(groups: Sequence[Group]) -> Row:
    """Responses to a prompt are drawn independently, and so are not all the same unless that is likely."""
    if all(len(group.responses) < 2 for group in groups):
        return not_checked("arrival: seeds", "no prompt has two responses")
    equal = [g.responses for g in groups if len({r.token_ids.tobytes() for r in g.responses}) == 1]
    unlikely = -sum(float(response.logprobs.sum()) for responses in equal for response in responses[1:])
    reason = (
        "nats by which it is unlikely that all responses to a prompt are the same, as they are for "
        f"{len(equal)} of {len(groups)} prompts"
    )
    return measured("arrival: seeds", unlikely if len(equal) == len(groups) else 0.0, SURE, CHANCE, reason)
