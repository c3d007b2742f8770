"""A run that ended after two steps goes on from its first checkpoint and its journal, as if it had not."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megatron_ibpo.basics.records import Group, Sample
from megatron_ibpo.config import Config
from megatron_ibpo.engines.registry import samples_in_trainer
from megatron_ibpo.run import loop
from megatron_ibpo.run.open import open_run
from megatron_ibpo.verify.own_policy import difference, weights_in
from megatron_ibpo.verify.rows import Row, counted_faults, measured

ON_GPU = 1e-3
"""Relative difference of weights on GPUs, whose kernels add in varying orders; not measured on one yet."""


def check_resume(config: Config, steps: Sequence[Sequence[Group]], undisturbed: Path) -> Iterator[Row]:
    """Open the run again, train its second step again, and sample its third.

    Args:
        steps: groups of the two steps of the run that ended.
        undisturbed: the weights after them.
    """
    run_dir = config.run.run_dir
    samples_again = samples_in_trainer(config.rollout.rollout_backend)  # the same to the last bit
    if samples_again:  # without the journal
        run_dir = run_dir.parent / "second_run"
    with open_run(replace(config, run=replace(config.run, load=config.run.run_dir, run_dir=run_dir))) as run:
        faults = [] if run.progress.step == 1 else [f"it goes on after step {run.progress.step}, not 1"]
        second = loop.sample(run)
        faults += _different(steps[1], second)
        loop.update(run, loop.credit(run, second).sequences)
        loop.sync(run)
        run.policy.save_hf(undisturbed.parent / "resumed")
        third = loop.sample(run)
    if config.algorithm.group_filter is None:  # a filter takes further prompts
        faults += _out_of_place([*steps, third], config.rollout.rollout_batch_size)
    origin = "is sampled again" if samples_again else "comes from the journal"
    yield counted_faults(
        "resume: samples", faults, f"the second step {origin}, the third takes the next prompts"
    )
    gap, where, _ = difference(weights_in(undisturbed.parent / "resumed"), weights_in(undisturbed), 0.0)
    on_gpu = torch.cuda.is_available()
    yield measured(
        "resume: weights", gap, ON_GPU if on_gpu else 0.0, "stated for GPUs" if on_gpu else "bit for bit",
        f"largest difference after step 2; {where or 'no tensor differs'}",
        "the checkpoint's optimizer state, learning rate and step; the journal",
    )  # fmt: skip


def _different(steps: Sequence[Group], again: Sequence[Group]) -> list[str]:
    """Return the samples that differ from those of the run that ended."""
    first, second = ([_content(sample) for g in groups for sample in g.samples] for groups in (steps, again))
    if len(first) != len(second):
        return [f"{len(second)} samples in place of {len(first)}"]
    return [f"sample {i} differs" for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]


def _content(sample: Sample) -> tuple[object, ...]:
    arrays = (sample.prompt_token_ids, sample.token_ids, sample.logprobs, sample.loss_mask)
    return (*(array.tobytes() for array in arrays), sample.reward, sample.temperature, sample.finish_reason)


def _out_of_place(steps: Sequence[Sequence[Group]], size: int) -> list[str]:
    return [
        f"step {number + 1} took prompt {group.prompt.index} in place {place}"
        for number, groups in enumerate(steps)
        for place, group in enumerate(groups, start=number * size)
        if group.prompt.index != place
    ]
