"""The stages of one training step, each a function of the run. Runs on the driver."""

from collections.abc import Sequence
from functools import partial

from megatron_ibpo.basics.records import Group, TrainSequence
from megatron_ibpo.credit import Credit, assign_credit
from megatron_ibpo.engines.truncation import check_recorded
from megatron_ibpo.run.observers import check_against_fresh_engine, observed_logprobs
from megatron_ibpo.run.recovery import admit_engines, remember, sleep_engines, surviving, wake_engines
from megatron_ibpo.run.state import Run, context


class NotFiniteError(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


def sample(run: Run) -> list[Group]:
    """Return this step's groups: responses, scores, and the corrections that the algorithm requests."""
    wake_engines(run)
    with run.stages("sample"):
        groups = run.rollouts.groups(run.progress.step, context(run), partial(admit_engines, run))
    run.cost.sampling(run.rollouts.sampled())
    return groups


def credit(run: Run, groups: list[Group]) -> Credit:
    """Turn the groups into training sequences with advantages and weights.

    Raises:
        ValueError: recorded samples that the loss cannot use (`check_recorded`).
    """
    sleep_engines(run)  # credit may need the policy or the critic, and training follows
    with run.stages("credit"):
        assigned = surviving(run, lambda: assign_credit(groups, context(run), run.foundation.method))
    if not run.config.run.debug_rollout_only:
        check_recorded(run.config, assigned.sequences)
    _count_passes(run)
    remember(run, run.progress.step, assigned)
    return assigned


def update(run: Run, sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Run the optimizer steps of one rollout.

    Raises:
        NotFiniteError: --max-nonfinite-steps consecutive steps were skipped.
    """
    if run.config.run.debug_rollout_only:
        return {}
    run.progress.old_logprobs = observed_logprobs(run, sequences)
    with run.stages("train"):
        metrics = surviving(run, lambda: run.policy.update(sequences))
    _count_passes(run)
    run.progress.new_logprobs = observed_logprobs(run, sequences)
    progress, most = run.progress, run.config.run.max_nonfinite_steps
    progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if metrics["updates_skipped"] else 0
    if progress.skipped_in_a_row >= most:
        raise NotFiniteError(
            f"{most} steps in a row had a loss or gradient that is not finite; lower --lr, or look at "
            "the records kept by --save-debug-rollout-data"
        )
    return metrics


def sync(run: Run) -> dict[str, float]:
    """Count the step, and send the trainers' weights to the engines.

    Raises:
        WeightMismatchError: with --check-weight-update-equal, the engines have other weights.
    """
    run.progress.step += 1
    if run.engines is None or run.config.run.debug_rollout_only:
        return {}
    with run.stages("sync"):
        metrics = surviving(run, partial(run.engines.update_weights, run.progress.step))
        run.rollouts.advance(run.progress.step)
    if run.config.rollout.check_weight_update_equal and not run.progress.weights_checked:
        with run.stages("check weights"):
            check_against_fresh_engine(run, run.engines)
    return metrics


def _count_passes(run: Run) -> None:
    for passes in run.policy.take_passes():
        run.cost.training(passes.forward, passes.updates, passes.repeated_forward, passes.repeated_updates)
