"""Observations beside training: the record of a step, evaluation, instruments, checks. They are no cost of
the algorithm."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from megatron_ibpo.basics.records import Floats, Group, TrainSequence
from megatron_ibpo.credit import Credit, assign_credit, credit_of
from megatron_ibpo.credit.metrics import composition_counts, learns_from_corrections
from megatron_ibpo.engines.probe import compare_probes, probe
from megatron_ibpo.report import (
    check_reward_errors,
    metrics_by_task,
    rollout_path,
    rounding_bound,
    save_groups,
    save_outcomes,
    step_alarms,
)
from megatron_ibpo.report.rollout_data import is_recorded_step, keep_samples
from megatron_ibpo.report.run_dir import SKILL_FILE, write_whole
from megatron_ibpo.run.operator_skill import (
    Asking,
    corrects,
    operator_skill,
    premise,
    skill_json,
    try_corrections,
)
from megatron_ibpo.run.rollouts import LiveRollouts
from megatron_ibpo.run.saving import admit_engines, surviving, wake_engines
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


def report(run: Run, groups: list[Group], credit: Credit, metrics: dict[str, float]) -> None:
    """Record the step and its cost. Raises RewardErrorRateError if the verifier failed on more of the step's
    responses than --max-reward-error-rate allows."""
    seconds = run.stages.take()
    run.cost.time(seconds)
    step, settings = run.progress.step, run.config.run
    with run.stages("report"):
        if settings.save_debug_rollout_data:
            path = rollout_path(settings.run_dir / "rollouts", step)
            run.disk.write(
                lambda: save_groups(
                    path,
                    step,
                    groups,
                    run.data.tokenizer.decode,
                    credit.sequences,
                    old_logprobs=run.progress.old_logprobs,
                    new_logprobs=run.progress.new_logprobs,
                    explanations=credit.explanations,
                )
            )
        elif is_recorded_step(step, settings.num_rollout, settings.keep_samples):
            _keep_samples(run, step, groups, credit)
        if run.engines is not None:
            alive, engines = run.engines.alive, run.engines.count
            metrics = metrics | {"engines": float(engines), "engines_alive": float(alive)}
            masked = any(sequence.sampling_mask is not None for sequence in credit.sequences)
            if (bound := rounding_bound(run.config, replays_mask=masked)) is not None:
                metrics["logprob_diff_bound"] = bound
        metrics = run.rollouts.metrics | credit.metrics | metrics | run.cost.spent.metrics()
        if len(run.config.data.prompt_data) > 1:  # the tasks of a mixture
            metrics |= metrics_by_task(groups)
        if run.data.prompts is not None:
            metrics |= run.data.prompts.left_out()
        metrics |= _premise(run, groups, credit.sequences)
        responses = [response for group in groups for response in group.responses]
        errors = [response.reward_error for response in responses if response.reward_error is not None]
        first = errors[0] if errors else None
        error_limit = settings.max_reward_error_rate
        for alarm in step_alarms(
            metrics, responses=len(responses), first_reward_error=first, most_reward_errors=error_limit
        ):
            run.reporter.note(alarm)
        run.disk.write(lambda: run.reporter.step(step, metrics, seconds))
    run.progress.deaths_in_a_row = 0
    check_reward_errors(len(errors), len(responses), error_limit, first_reward_error=first)


def _keep_samples(run: Run, step: int, groups: Sequence[Group], credit: Credit) -> None:
    """Write some samples of the step for a reader. The run does not depend on them."""
    directory, decode = run.config.run.run_dir, run.data.tokenizer.decode
    try:
        run.disk.write(
            lambda: keep_samples(directory, step, groups, decode, credit.sequences, credit.explanations)
        )
    except TypeError as error:
        run.reporter.note(f"the samples of step {step} are not kept: {error}")


def _premise(run: Run, groups: Sequence[Group], sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Return the metrics that tell whether corrections pay (`skill_needed`). Empty if the run learns from no
    corrections; the suffixes of reset-groups are other responses."""
    operator = run.foundation.method.operator
    if not corrects(operator) or not learns_from_corrections(operator):
        return {}
    price = run.cost.correction_price(groups, sequences)
    return {} if price is None else {"correction_price": price, **composition_counts(groups)}
