"""A run that lost its trainers after two steps goes on as if it had not."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from megatron_ibpo.basics.records import Group
from megatron_ibpo.cluster.deaths import ProcessDiedError
from megatron_ibpo.engines.registry import samples_in_trainer
from megatron_ibpo.run.recovery import surviving
from megatron_ibpo.run.resume_point import read_resume_point
from megatron_ibpo.run.state import Run
from megatron_ibpo.verify.own_policy import difference, weights_in
from megatron_ibpo.verify.rows import Row, counted_faults, measured

ON_GPU = 1e-3
"""Relative difference of weights on GPUs, whose kernels add in varying orders; not measured on one yet."""


def check_resume(
    run: Run, groups: Sequence[Sequence[Group]], undisturbed: Path, export: Callable[[str], Path]
) -> Iterator[Row]:
    """End the trainers, resume them from a checkpoint and the journal, and compare the weights."""
    if run.config.algorithm.group_filter is None:  # a filter takes further prompts
        yield _prompts(run, groups)
    if samples_in_trainer(run.config.rollout.rollout_backend):
        return  # one process trains and samples, and dies as a whole: `live` starts a second run
    point = read_resume_point(
        replace(run.config.run, load=run.config.run.run_dir), run.foundation.shape.vocab_size
    )
    yield counted_faults(
        "resume: checkpoint", [] if point.step == 1 else [f"it is of step {point.step}"],
        "the newest checkpoint is that of step 1",
    )  # fmt: skip
    deaths = ["trainers were ended by this check"]

    def resumed() -> Path:
        if deaths:
            raise ProcessDiedError(deaths.pop())
        return export("resumed")

    yield _weights(undisturbed, surviving(run, resumed), run.progress.step)


def resumed_rows(
    groups: Sequence[Group], again: Sequence[Group], undisturbed: Path, resumed: Path, step: int
) -> Iterator[Row]:
    """Compare a step with the same step of a run that began with it, from a checkpoint."""
    pairs = [(a, b) for first, second in zip(groups, again, strict=True)
             for a, b in zip(first.samples, second.samples, strict=True)]  # fmt: skip
    faults = [
        f"sample {number}: {what}"
        for number, (a, b) in enumerate(pairs)
        for what, is_same in (
            ("another prompt", np.array_equal(a.prompt_token_ids, b.prompt_token_ids)),
            ("other tokens", np.array_equal(a.token_ids, b.token_ids)),
        )
        if not is_same
    ]
    yield counted_faults("resume: samples", faults, f"{len(pairs)} samples of step {step} are as they were")
    yield _weights(undisturbed, resumed, step)


def _weights(undisturbed: Path, resumed: Path, step: int) -> Row:
    gap, where, _ = difference(weights_in(resumed), weights_in(undisturbed), 0.0)
    on_gpu = torch.cuda.is_available()
    return measured(
        "resume: weights", gap, ON_GPU if on_gpu else 0.0, "stated for GPUs" if on_gpu else "bit for bit",
        f"largest difference after step {step}; {where or 'no tensor differs'}",
        "the checkpoint's optimizer state, learning rate and step; the journal",
    )  # fmt: skip


def _prompts(run: Run, groups: Sequence[Sequence[Group]]) -> Row:
    size = run.config.rollout.rollout_batch_size
    faults = [
        f"step {number + 1} took prompt {group.prompt.index} in place {place}"
        for number, step in enumerate(groups)
        for place, group in enumerate(step, start=number * size)
        if group.prompt.index != place
    ]
    return counted_faults("resume: prompts", faults, f"{len(groups)} steps took the prompts of their places")
