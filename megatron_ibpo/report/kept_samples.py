"""Samples of a few steps, kept by default so that the page of a run has responses to read.

Training cannot be repeated from them: only the first groups of a large step are kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_ibpo.basics.records import Group, Sample, TokenIds, TrainSequence
from megatron_ibpo.report.rollout_data import rollout_path, save_groups

SAMPLES = "samples"
"""Name of the folder in a run's directory."""
TOKENS_PER_STEP = 50_000
"""Tokens of a step after which no further group is kept; some 4 MB."""


def is_kept(step: int, num_steps: int, count: int) -> bool:
    """Return whether the samples of a step are kept: the first step, the last, and others evenly between.

    Args:
        step: counted from 1.
        num_steps: planned steps of the run.
        count: most steps to keep.
    """
    last = max(1, count - 1)
    return step in {1 + round(number * (num_steps - 1) / last) for number in range(count)}


def keep_samples(
    run_dir: Path,
    step: int,
    groups: Sequence[Group],
    decode: Callable[[TokenIds], str],
    sequences: Sequence[TrainSequence],
) -> None:
    """Write the first groups of a step with what was trained on, without the choices of routers.

    Raises:
        TypeError: a prompt's metadata holds what JSON cannot keep.
    """
    first = _first_groups(groups)
    trained = [sequence for sequence in sequences if sequence.group < len(first)]
    save_groups(rollout_path(run_dir / SAMPLES, step), step, first, decode, trained)


def _first_groups(groups: Sequence[Group]) -> list[Group]:
    kept: list[Group] = []
    tokens = 0
    for group in groups:
        if tokens >= TOKENS_PER_STEP:
            break
        tokens += sum(len(sample.prompt_token_ids) + len(sample.token_ids) for sample in group.samples)
        corrections = [replace(one, response=_without_routing(one.response)) for one in group.corrections]
        responses = list(map(_without_routing, group.responses))
        kept.append(replace(group, responses=responses, corrections=corrections))
    return kept


def _without_routing(sample: Sample) -> Sample:
    return sample if sample.routed_experts is None else replace(sample, routed_experts=None)
