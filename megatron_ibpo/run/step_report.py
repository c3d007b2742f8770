"""The record of a step."""

from collections.abc import Sequence

from megatron_ibpo.basics.records import Group, TrainSequence
from megatron_ibpo.credit import Credit
from megatron_ibpo.credit.break_even import composition_counts, learns_from_corrections
from megatron_ibpo.report import (
    check_reward_errors,
    metrics_by_task,
    rollout_path,
    rounding_bound,
    save_groups,
    step_alarms,
)
from megatron_ibpo.report.rollout_data import is_recorded_step, keep_samples
from megatron_ibpo.run.operator_skill import corrects
from megatron_ibpo.run.state import Run


def report(run: Run, groups: list[Group], credit: Credit, metrics: dict[str, float]) -> None:
    """Record the step and its cost.

    Raises:
        RewardErrorRateError: the verifier failed on more of the step's responses than
            --max-reward-error-rate allows.
    """
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
        metrics = run.rollouts.metrics() | credit.metrics | metrics | run.cost.spent.metrics()
        metrics |= _by_source(run, groups) | _premise(run, groups, credit.sequences)
        responses = [response for group in groups for response in group.responses]
        errors = [response.reward_error for response in responses if response.reward_error is not None]
        first = errors[0] if errors else None
        most = settings.max_reward_error_rate
        for alarm in step_alarms(
            metrics, responses=len(responses), first_reward_error=first, most_reward_errors=most
        ):
            run.reporter.note(alarm)
        run.disk.write(lambda: run.reporter.step(step, metrics, seconds))
    run.progress.deaths_in_a_row = 0
    check_reward_errors(len(errors), len(responses), most, first_reward_error=first)


def _keep_samples(run: Run, step: int, groups: Sequence[Group], credit: Credit) -> None:
    """Write some samples of the step for a reader. The run does not depend on them."""
    directory, decode = run.config.run.run_dir, run.data.tokenizer.decode
    try:
        run.disk.write(
            lambda: keep_samples(directory, step, groups, decode, credit.sequences, credit.explanations)
        )
    except TypeError as error:
        run.reporter.note(f"the samples of step {step} are not kept: {error}")


def _by_source(run: Run, groups: Sequence[Group]) -> dict[str, float]:
    """Return the accuracy and number of prompts of each task of a mixture, and the rows of large files
    left out so far."""
    mixed = len(run.config.data.prompt_data) > 1
    prompts = run.data.prompts
    return (metrics_by_task(groups) if mixed else {}) | ({} if prompts is None else prompts.left_out())


def _premise(run: Run, groups: Sequence[Group], sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Return the metrics that tell whether corrections pay (`credit.break_even`). Empty if the run learns
    from no corrections; the suffixes of reset-groups are other responses."""
    operator = run.foundation.method.operator
    if not corrects(operator) or not learns_from_corrections(operator):
        return {}
    price = run.cost.correction_price(groups, sequences)
    return {} if price is None else {"correction_price": price, **composition_counts(groups)}
