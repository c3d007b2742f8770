"""All checks: of the run's inputs, and over one start of a small run, which is opened again to see whether it
resumes. To see whether weights arrive, each kind of tensor is changed alone."""

import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors.torch import save_file

from megatron_ibpo.basics.records import Group, Sample, SampleRequest, TokenIds, TrainSequence, token_ids
from megatron_ibpo.config import Config, rm_type_in
from megatron_ibpo.config.config_error import broken
from megatron_ibpo.engines.probe import TIMEOUT_S
from megatron_ibpo.engines.registry import sampling_precision
from megatron_ibpo.plan.feasibility import memory_on_cpus
from megatron_ibpo.plan.memory import GIB
from megatron_ibpo.plan.parameter_count import take_census
from megatron_ibpo.policy.logits_check import transformers_logprobs
from megatron_ibpo.run import saving
from megatron_ibpo.run import steps as loop
from megatron_ibpo.run.inputs import JOURNAL
from megatron_ibpo.run.open import open_run
from megatron_ibpo.run.rollouts import LiveRollouts
from megatron_ibpo.run.state import Run
from megatron_ibpo.verify import trainer
from megatron_ibpo.verify.inputs import check_data, check_prompts, check_rewards, doubled_start
from megatron_ibpo.verify.made_up_rewards import score
from megatron_ibpo.verify.rows import (
    CHECKS,
    NotCheckedError,
    Row,
    attempted,
    check_of,
    exact,
    largest,
    measured,
)
from megatron_ibpo.verify.small_run import STAND_IN, small_run
from megatron_ibpo.verify.trainer import mean_gap, reference_of, weights_in
from megatron_ibpo.weights.formats.hugging_face import copy_all_but_weights

WITHOUT_RUN: dict[str, Callable[[Config], Iterable[Row]]] = {
    "rewards": check_rewards, "data": check_data, "tokens: prompts": check_prompts,
}  # fmt: skip
"""Checks that need none of the run's processes."""
ON_GPU = 1e-3
"""Relative difference of weights on GPUs, whose kernels add in varying orders; not measured on one yet."""
MEMORY_BOUND = 2.0
"""Activations, libraries and their threads come on top of what is counted (`plan.feasibility`)."""
OTHER_TEMPERATURES = (0.5, 0.8, 1.25, 2.0)
"""Factors of the temperature at which samples could have been drawn instead."""
SURE, CHANCE = 13.8, "chance of 1 in a million"
"""Logarithm of a million: chances below its inverse are none."""
PROMPTS, LONGEST, BLOCK = 6, 24, 300
"""Prompts to sample after each change of weights, tokens of a response, and tokens of a prompt that fills a
block of every cache: those of delta nets have 256."""
SHIFT, VISIBLE = 0.05, 3.0
"""Shift of adapters and of tensors of zeros; bounds by which a change must move log-probs to be seen."""

Turns = set[tuple[bytes, bytes]]
"""Ids and log-probs of each sample that engines returned, before samples were joined to episodes."""


def run_checks(
    config: Config, *, full: bool = False, only: Collection[str] = CHECKS
) -> tuple[list[Row], dict[str, Any]]:
    """Make the checks named in `only`, and print each row as soon as it is there. Return (rows in the order
    of CHECKS, what verify.json says about the settings)."""
    rows: list[Row] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ibpo-verify-") as scratch:
        small = small_run(config, Path(scratch), full=full)
        work = {name: partial(check, config) for name, check in WITHOUT_RUN.items() if check_of(name) in only}
        of_run = [name for name in CHECKS if name in only and name not in WITHOUT_RUN]
        work |= {name: partial(check_run, small, only, full=full) for name in of_run[:1]}
        for name, check in work.items():
            for row in attempted(name, check):
                print(f"  {row.verdict}: {row.check}", file=sys.stderr, flush=True)
                rows.append(row)
    missing = {*only} - {check_of(row.check) for row in rows}
    rows += [Row(name, "not checked", reason="the run ended before it") for name in missing]
    return sorted(rows, key=lambda row: CHECKS.index(check_of(row.check))), {
        "model": str(config.model.hf_dir),
        "cut_down": small.model.hf_dir != config.model.hf_dir,
        "layout": {name: size for name, size in vars(small.parallel).items() if name.endswith("_size")},
        "trainers": small.cluster.num_trainers,
        "precision": "float32",
        "seed": small.run.seed,
        "full": full,
        "seconds": round(time.monotonic() - began, 1),
    }


def check_run(config: Config, only: Collection[str], *, full: bool) -> Iterable[Row]:
    """Open the small run, take two steps, and make the checks named in `only`."""
    turns: Turns = set()

    def rows(check: str, work: Callable[..., Iterable[Row]], *arguments: Any) -> Iterable[Row]:
        return attempted(check, partial(work, *arguments)) if check_of(check) in only else ()

    with redirect_stdout(sys.stderr), open_run(config) as run:
        assert isinstance(run.rollouts, LiveRollouts)  # the small run replays nothing
        run.rollouts.sampler.on_sample = lambda s: turns.add((s.token_ids.tobytes(), s.logprobs.tobytes()))
        initial, groups = _export(run, "initial"), loop.sample(run)
        sequences = loop.credit(run, groups).sequences
        yield from rows("engine: before", check_logprobs, "before an update", run, groups, initial)
        yield from rows("tokens: samples", check_samples, run, groups, turns)
        yield from rows("split: credit", trainer.check_credit, run, groups)
        metrics = loop.update(run, sequences)
        loop.sync(run)
        updated = _export(run, "updated")
        step = trainer.FirstStep(run.config, groups, sequences, initial, updated, metrics)
        saving.save_if_due(run)
        run.policy.saved(wait=True)
        second = loop.sample(run)
        second_sequences = loop.credit(run, second).sequences
        yield from rows("engine: after", check_logprobs, "after an update", run, second, updated)
        loop.update(run, second_sequences)
        loop.sync(run)
        yield from rows("memory", check_memory, run)
        undisturbed = _export(run, "undisturbed")
        yield from rows("arrival", check_arrival, run, undisturbed, full)
    with redirect_stdout(sys.stderr):
        yield from rows("resume", check_resume, config, second, undisturbed)
        yield from rows("split", trainer.check_split, step)
        yield from rows("tokens: masked", trainer.check_masked, step)
        yield from rows("reference", trainer.check_reference, step)


def _export(run: Run, name: str) -> Path:
    """Write the present weights; return their directory."""
    directory = run.config.run.run_dir.parent / name
    run.policy.save_hf(directory)
    return directory


def check_logprobs(when: str, run: Run, groups: Sequence[Group], hf_dir: Path) -> Iterator[Row]:
    """Compare the engine's log-probs of a step's samples with the trainer's, and these with transformers'
    under the weights in `hf_dir`."""
    sequences = [_as_trained(s) for group in groups for s in group.samples if s.loss_mask.any()]
    logprobs, precision = run.policy.logprobs(sequences), sampling_precision(run.config.rollout).dtype
    _, expected, spread = reference_of(hf_dir, sequences, precision)
    gap, what = mean_gap(logprobs, sequences), f"{len(sequences)} samples of the engine"
    yield trainer.logprob_row(f"engine: {when}", gap, spread, what)
    if not run.config.rollout.truncation:  # transformers' log-probs are those of the whole vocabulary
        what = "the trainer beside transformers on the weights that it wrote"
        gap = mean_gap(logprobs, sequences, expected)
        yield trainer.logprob_row(f"reference: written {when}", gap, spread, what)


def _first_prompts(run: Run, count: int) -> list[TokenIds]:
    """Return the ids of the run's first prompts, made-up ones for those that an environment writes."""
    assert run.data.prompts is not None  # the small run replays nothing
    prompts = run.data.prompts.batch(0, count)
    return [prompt.token_ids if len(prompt.token_ids) else token_ids([1, 2, 3]) for prompt in prompts]


def _as_trained(sample: Sample) -> TrainSequence:
    """Return the sample as a sequence for which trainers compute log-probs."""
    return TrainSequence(
        sample.prompt_token_ids, sample.token_ids, sample.loss_mask, 0.0, 0.0, 0, 0, 0,
        temperature=sample.temperature, rollout_logprobs=sample.logprobs, sampling_mask=sample.sampling_mask,
    )  # fmt: skip


def check_samples(run: Run, groups: Sequence[Group], turns: Turns) -> Iterator[Row]:
    """Compare what engines returned with what was asked; then ask for fewer tokens than responses need, so
    that some are cut whatever the policy."""
    faults = [
        f"prompt {group.prompt.index}, sample {number}: {fault}"
        for group in groups
        for number, sample in enumerate(group.samples)
        for fault in _sample_faults(run, turns, group, sample)
    ]
    temperature, prompts = run.config.rollout.rollout_temperature, _first_prompts(run, 8)
    requests = [SampleRequest(ids, i, 1 + i % 3, temperature) for i, ids in enumerate(prompts)]
    for request, sample in zip(requests, engine_samples(run, requests), strict=True):
        faults += [f"of {request.max_tokens}: {f}" for f in _end_faults(run, sample, request.max_tokens)]
    count = sum(len(group.samples) for group in groups)
    reason = f"{count} samples of {len(turns)} turns: prompt, ends, masks, log-probs and rewards fit"
    yield exact("tokens: samples", faults, reason)


def _sample_faults(run: Run, turns: Turns, group: Group, sample: Sample) -> list[str]:
    rollout, prompt, mask = run.config.rollout, group.prompt, sample.loss_mask
    has_turns = prompt.environment is not None  # which writes the prompt, and rewards the sample, too
    is_plain = not has_turns and sample in group.responses and not rollout.rollout_prompt_suffixes
    has_own_reward = not has_turns and rm_type_in(prompt.metadata, run.config.data) == STAND_IN
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2).tolist()
    tokenizer, logprobs = run.data.tokenizer, sample.logprobs
    text = tokenizer.decode(sample.token_ids)
    room = run.foundation.max_context - len(sample.prompt_token_ids)
    faults = [] if has_turns else _end_faults(run, sample, min(rollout.rollout_max_response_len, room))
    return faults + broken({
        "log-probs that are none": not np.isfinite(logprobs).all() or bool((logprobs > 1e-4).any()),
        "tokens that the policy did not write have log-probs": bool(logprobs[~mask].any()),
        "what counts as the policy's is no turn of an engine":
            any((sample.token_ids[a:b].tobytes(), logprobs[a:b].tobytes()) not in turns for a, b in edges),
        "begins with the same special token twice": doubled_start(sample.prompt_token_ids, tokenizer),
        "sampled from other ids than the prompt's":
            is_plain and not np.array_equal(sample.prompt_token_ids, prompt.token_ids),
        f"the reward {sample.reward} for {text!r}":
            has_own_reward and sample.reward != score("", text, "", {}),
    })  # fmt: skip


def _end_faults(run: Run, sample: Sample, limit: int) -> list[str]:
    """A response ends with its only end-of-sequence id, or at its limit, and says which."""
    eos, ids = {*run.foundation.eos_token_ids}, sample.token_ids[sample.num_begun_tokens :].tolist()
    length, finish = sample.num_trained_tokens, sample.finish_reason
    return broken({
        "goes on after an end-of-sequence id": not eos.isdisjoint(ids[:-1]),
        f"ends with id {ids[-1:]} and says {finish}": (finish == "stop") == eos.isdisjoint(ids[-1:]),
        f"is cut after {length} tokens, and not {limit}":
            length > limit or (length < limit and finish == "length"),
    })  # fmt: skip


def engine_samples(run: Run, requests: Sequence[SampleRequest]) -> list[Sample]:
    """Return what the first engine samples for the requests under its present weights."""
    assert run.engines is not None
    saving.wake_engines(run)
    samples = run.engines.idle(0).generate(requests, version=run.engines.version, timeout=TIMEOUT_S)
    saving.sleep_engines(run)
    return samples


def check_arrival(run: Run, origin: Path, full: bool) -> Iterator[Row]:
    """Change all tensors, each kind of tensor alone, and the factors of adapters; send each change, and
    compare what the engine samples. What differs is changed once more in another way before it is called
    wrong: a router's tie falls either way by chance, and a fault does not.

    Args:
        origin: the present weights.
        full: leave out single kinds, which take long with a large model.
    """
    precision, tensors = sampling_precision(run.config.rollout).dtype, weights_in(origin)
    kinds = {"all tensors": [*tensors]}
    for name in () if full else tensors:
        kind = re.sub(r"\.\d+(?=\.)", ".*", name).removeprefix("model.").removesuffix(".weight")
        kinds.setdefault(kind, []).append(name)

    def change(names: Sequence[str], seed: int) -> Path:
        """Write and load a checkpoint in which some tensors differ by as much as their root mean square."""
        target, generator = origin.parent / "changed", torch.Generator().manual_seed(seed)
        target.mkdir(exist_ok=True)
        copy_all_but_weights(origin, target, torch.float32)
        sizes = {name: tensors[name].square().mean().sqrt().item() or SHIFT for name in names}
        noise = {name: torch.randn(tensors[name].shape, generator=generator) * sizes[name] for name in names}
        changed = {name: t + noise[name] if name in noise else t for name, t in tensors.items()}
        save_file(changed, target / "model.safetensors", metadata={"format": "pt"})
        run.policy.load_weights(target)
        return target

    def shift(factor: str, _: int) -> None:
        run.policy.shift_adapters(factor, SHIFT)

    restore = partial(run.policy.load_weights, origin)
    changes: dict[str, tuple[Callable[[int], object], Callable[[], object]]]
    changes = {kind: (partial(change, names), restore) for kind, names in kinds.items()}
    for factor in () if run.config.model.lora_rank is None else ("A", "B"):
        changes[f"adapters' {factor}"] = (
            partial(shift, factor),
            partial(run.policy.shift_adapters, factor, -SHIFT),
        )
    # a policy so random that its samples tell much, and that rounding moves it more
    changed = change([*tensors], seed=2)
    sequences, _ = _sent(run)
    model, _, of_random = reference_of(changed, sequences, precision)
    if not run.config.rollout.truncation:
        yield _drawn_row(model, sequences)
    yield _seeds_row(loop.sample(run))
    saving.sleep_engines(run)
    restore()
    _, _, spread = reference_of(origin, _sent(run)[0], precision)
    for kind, (make, undo) in changes.items():
        rounding = max(spread, of_random if kind == "all tensors" else 0.0)
        for seed in range(2):
            make(seed)
            sequences, logprobs = _sent(run)
            undo()
            moved = mean_gap(logprobs, sequences, run.policy.logprobs(sequences))
            what = f"after an update that moves the trainer's by {moved:.2g}"
            row = trainer.logprob_row(f"arrival: {kind}", mean_gap(logprobs, sequences), rounding, what)
            if row.verdict == "right":
                break
        if row.verdict == "right" and row.bound is not None and moved < VISIBLE * row.bound:
            row = replace(row, verdict="not checked", reason=f"{row.reason}, too little to be seen")
        yield row


def _sent(run: Run) -> tuple[list[TrainSequence], trainer.LogProbs]:
    """Send the trainers' weights, and sample from the engine: the run's first prompts, and twice a long one
    made of many, as caches keep whole blocks only. Return (the samples, the trainer's log-probs of them)."""
    assert run.engines is not None
    run.engines.update_weights(run.engines.version + 1)
    rollout, room = run.config.rollout, run.foundation.max_context - LONGEST - 1
    prompts = _first_prompts(run, 8 * PROMPTS)
    long_prompt = np.concatenate(prompts)[: min(BLOCK + PROMPTS, room)]
    length = min(LONGEST, rollout.rollout_max_response_len)
    settings = length, rollout.rollout_temperature, *rollout.top_p_and_k(0)
    chosen = enumerate([*prompts[:PROMPTS], long_prompt, long_prompt])
    samples = engine_samples(run, [SampleRequest(ids, seed, *settings) for seed, ids in chosen])
    sequences = [_as_trained(sample) for sample in samples]
    return sequences, run.policy.logprobs(sequences)


def _drawn_row(model: Any, sequences: Sequence[TrainSequence]) -> Row:
    """Check that tokens are drawn from the distribution that is reported. The ratio of their probability at
    another temperature to that at their own has the mean 1, so a ratio of x or more has a chance of at most
    1/x."""

    def total_logprob(factor: float) -> float:
        scaled = [replace(s, temperature=s.temperature * factor) for s in sequences]
        pairs = zip(transformers_logprobs(model, scaled), sequences, strict=True)
        return sum(float(logprobs[s.loss_mask].sum()) for logprobs, s in pairs)

    total = total_logprob(1.0)
    gain, factor = largest({f"{factor:g}": total_logprob(factor) - total for factor in OTHER_TEMPERATURES})
    reason = f"nats by which samples are likelier at {factor} times their temperature"
    return measured("arrival: the draw", gain, SURE, CHANCE, reason)


def _seeds_row(groups: Sequence[Group]) -> Row:
    """Responses to a prompt are drawn independently, and so are not all the same unless that is likely."""
    is_same = [len({response.token_ids.tobytes() for response in group.responses}) == 1 for group in groups]
    further = [response for group in groups for response in group.responses[1:]]
    unlikely = -sum(float(response.logprobs.sum()) for response in further) if all(is_same) else 0.0
    reason = "nats by which it is unlikely that all responses to a prompt are the same"
    return measured("arrival: seeds", unlikely, SURE, CHANCE, reason)


def check_memory(run: Run) -> Iterator[Row]:
    """Compare what trainers and engines hold of main memory with what the plan counts."""
    if torch.cuda.is_available():
        raise NotCheckedError("on GPUs: metrics.jsonl has the peak of each rank, `ibpo plan` the prediction")
    config, shape, processes = run.config, run.foundation.shape, set[psutil.Process]()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if "".join(process.cmdline()[:1]).startswith("ray::_Process"):
                processes |= {process, *process.children(recursive=True)}
    if not processes:
        raise NotCheckedError("trainer and engine are this process, which does much else")
    used = sum(process.memory_full_info().uss for process in processes if process.is_running())
    census = take_census(shape, config, config.cluster.num_trainers or 1)
    planned = sum(memory_on_cpus(config, shape, census).values())
    reason = f"{used / GIB:.2f} GiB held by trainers and engines, {planned / GIB:.2f} planned"
    yield measured("memory: main", used / planned, MEMORY_BOUND, "activations and libraries on top", reason)


def check_resume(config: Config, second: Sequence[Group], undisturbed: Path) -> Iterator[Row]:
    """Open the run again, which ended after two steps, and train its second step from the first checkpoint
    and the journal; then sample that step anew.

    Args:
        second: groups of the second step.
        undisturbed: the weights after it.
    """
    resumed = replace(config, run=replace(config.run, load=config.run.run_dir))
    with open_run(resumed) as run:
        loop.update(run, loop.credit(run, loop.sample(run)).sequences)
        weights = weights_in(_export(run, "resumed"))
    gap, furthest = largest(trainer.tensor_gaps(weights, weights_in(undisturbed)))
    bound, source = (ON_GPU, "stated for GPUs") if torch.cuda.is_available() else (0.0, "bit for bit")
    reason = f"relative difference after step 2 with the journal; furthest: {furthest}"
    yield measured("resume: weights", gap, bound, source, reason)
    shutil.rmtree(config.run.run_dir / JOURNAL)
    with open_run(resumed) as run:
        samples = [s for groups in (second, loop.sample(run)) for group in groups for s in group.samples]
    # but for log-probs, whose last bits depend on what an engine computed together
    fields = [(s.prompt_token_ids.tobytes(), s.token_ids.tobytes(), s.reward) for s in samples]
    size = sum(len(group.samples) for group in second)
    faults = [f"sample {i}" for i, (a, b) in enumerate(zip_longest(fields[:size], fields[size:])) if a != b]
    yield exact("resume: samples", faults, "without the journal, the same prompts and tokens come again")
