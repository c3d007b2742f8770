"""A run that ended after two steps resumes from its first checkpoint and its journal as if it had not
ended."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_ibpo.basics.records import Group, Sample
from megatron_ibpo.config import Config
from megatron_ibpo.run import steps as loop
from megatron_ibpo.run.inputs import JOURNAL
from megatron_ibpo.run.open import open_run
from megatron_ibpo.verify.one_rank import largest_difference, weights_in
from megatron_ibpo.verify.rows import Row, counted_faults, measured

ON_GPU = 1e-3
"""Relative difference of weights on GPUs, whose kernels add in varying orders; not measured on one yet."""


def check_resume(config: Config, steps: Sequence[Sequence[Group]], undisturbed: Path) -> Iterator[Row]:
    """Open the run again and train its second step from the journal; then sample that step anew.

    Args:
        steps: groups of the two steps of the run that ended.
        undisturbed: the weights after them.
    """
    resumed = replace(config, run=replace(config.run, load=config.run.run_dir))
    with open_run(resumed) as run:
        faults = [] if run.progress.step == 1 else [f"it goes on after step {run.progress.step}, not 1"]
        second = loop.sample(run)
        faults += _different(steps[1], second)
        loop.update(run, loop.credit(run, second).sequences)
        run.policy.save_hf(undisturbed.parent / "resumed")
    yield counted_faults("resume: journal", faults, "the second step is that of the journal")
    gap, furthest, _ = largest_difference(
        weights_in(undisturbed.parent / "resumed"), weights_in(undisturbed), 0.0
    )
    on_gpu = torch.cuda.is_available()
    yield measured(
        "resume: weights", gap, ON_GPU if on_gpu else 0.0, "stated for GPUs" if on_gpu else "bit for bit",
        f"largest difference after step 2; {furthest or 'no tensor differs'}",
        "the checkpoint's optimizer state, learning rate and step; the journal",
    )  # fmt: skip
    shutil.rmtree(config.run.run_dir / JOURNAL)
    with open_run(resumed) as run:
        second = loop.sample(run)
    faults = _different(steps[1], second, exactly=False)
    if config.algorithm.group_filter is None:  # a filter takes further prompts
        faults += _out_of_place([steps[0], second], config.rollout.rollout_batch_size)
    yield counted_faults(
        "resume: samples",
        faults,
        "without the journal, the same prompts and tokens come again",
    )


def _different(groups: Sequence[Group], repeated: Sequence[Group], *, exactly: bool = True) -> list[str]:
    """Return the samples that differ from those of the run that ended.

    Args:
        exactly: in log-probs too, whose last bits depend on what an engine computed together.
    """
    first, second = (
        [_content(sample, exactly=exactly) for group in step for sample in group.samples]
        for step in (groups, repeated)
    )
    if len(first) != len(second):
        return [f"{len(second)} samples in place of {len(first)}"]
    return [f"sample {i} differs" for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]


def _content(sample: Sample, *, exactly: bool) -> tuple[object, ...]:
    arrays: list[Any] = [sample.prompt_token_ids, sample.token_ids, sample.loss_mask]
    arrays += [sample.logprobs] if exactly else []
    return (*(array.tobytes() for array in arrays), sample.reward, sample.temperature, sample.finish_reason)


def _out_of_place(steps: Sequence[Sequence[Group]], size: int) -> list[str]:
    return [
        f"step {number + 1} took prompt {group.prompt.index} in place {place}"
        for number, groups in enumerate(steps)
        for place, group in enumerate(groups, start=number * size)
        if group.prompt.index != place
    ]
