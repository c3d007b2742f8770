"""Observations beside training: evaluation, instruments, checks. They are no cost of the algorithm."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from megatron_ibpo.basics.records import Floats, Group, TrainSequence
from megatron_ibpo.credit import assign_credit, credit_of
from megatron_ibpo.engines.probe import compare_probes, probe
from megatron_ibpo.report import save_outcomes
from megatron_ibpo.report.run_dir import SKILL_FILE, write_whole
from megatron_ibpo.run.operator_skill import (
    Asking,
    corrects,
    operator_skill,
    premise,
    skill_json,
    try_corrections,
)
from megatron_ibpo.run.recovery import admit_engines, surviving, wake_engines
from megatron_ibpo.run.rollouts import LiveRollouts
from megatron_ibpo.run.state import Engines, Run, context

GSPO = credit_of("gspo")
"""Plain advantages of the responses only, as the gradient meter's comparison."""


def measure_corrections_if_due(run: Run) -> None:
    """Measure before the first step whether corrections succeed more often than another try. Its seeds
    and prompts are not those of the first step."""
    config, rollouts, operator = run.config, run.rollouts, run.foundation.method.operator
    count = config.run.operator_skill_prompts
    if run.progress.step > 0 or not count or not corrects(operator):
        return
    if not isinstance(rollouts, LiveRollouts):  # a recording cannot answer
        return
    asking = Asking(
        operator.ibpo_k,
        config.rollout,
        run.data.vocabulary,
        run.foundation.max_context,
        config.run.seed,
        targets=2,
        as_in_training=True,
        prompt_ids=run.data.suffixes,
    )
    prompts = rollouts.prompts_of_later_steps(count)
    wake_engines(run)
    with run.stages("operator skill"):
        tried = rollouts.observed(
            lambda sampler: try_corrections(sampler, prompts, asking), partial(admit_engines, run)
        )
        skill = operator_skill(tried)
    path = config.run.run_dir / SKILL_FILE
    run.disk.write(lambda: write_whole(path, skill_json(skill)))
    run.reporter.note(premise(skill))


def measure_gradient_if_due(
    run: Run, groups: list[Group], sequences: Sequence[TrainSequence]
) -> dict[str, float]:
    """Measure, every --gradient-meter-interval steps and before the update, the gradient's noise over
    prompts, and that of GSPO on the same responses."""
    settings = run.config.run
    interval = settings.gradient_meter_interval
    if interval is None or run.progress.step % interval or settings.debug_rollout_only:
        return {}
    with run.stages("gradient meter"):
        plain = assign_credit(groups, replace(context(run), algorithm=GSPO)).sequences
        metrics = surviving(run, lambda: run.policy.measure_gradient(sequences, plain))
    run.policy.take_passes()  # passes of an instrument are free
    return metrics


def evaluate_if_due(run: Run) -> None:
    """Evaluate at the start, at the end, and every --eval-interval steps."""
    settings, step = run.config.run, run.progress.step
    at_interval = settings.eval_interval is not None and step % settings.eval_interval == 0
    if run.engines is None or not run.data.eval_sets:
        return
    if step > 0 and not run.done() and not at_interval:
        return
    wake_engines(run)
    with run.stages("evaluate"):
        evaluated = run.rollouts.evaluation(run.data, partial(admit_engines, run))
    seconds = run.stages.take()
    run.disk.write(lambda: save_outcomes(settings.run_dir, step, evaluated))
    run.disk.write(lambda: run.reporter.evaluation(step, evaluated, seconds, run.cost.spent.metrics()))


def observed_logprobs(run: Run, sequences: Sequence[TrainSequence]) -> list[Floats] | None:
    """Return the log-probs for the record. They are not counted as cost and do not affect training."""
    if not run.config.run.save_debug_rollout_data:
        return None
    with run.stages("record"):
        logprobs = run.policy.logprobs(sequences)
    run.policy.take_passes()
    return logprobs


def check_against_fresh_engine(run: Run, engines: Engines) -> None:
    """Compare engine 0 with a fresh one after the first update, since errors inside engines show at once.

    The fresh engine takes the place of engine 0, so that no two models need memory at once, and stays.
    """
    directory = run.config.run.run_dir / "weight_check"
    run.policy.save_hf(directory)
    updated = probe(engines.idle(0), engines.version)
    with engines.fresh(0, directory) as fresh:
        compare_probes(updated, probe(fresh, 0), same_batches=engines.reproducible)
    shutil.rmtree(directory)
    run.progress.weights_checked = True
