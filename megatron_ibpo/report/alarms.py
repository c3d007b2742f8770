"""What a person should hear of while a run goes on, and what stops it."""

from collections.abc import Mapping

from megatron_ibpo.words import counted

REWARD_ERROR_SHARE = 0.05
"""Verifier failures from which on there is an alarm: a time-out now and then is no news, one in twenty is."""
TRUNCATED_SHARE = 0.9
"""Responses cut off at the length limit from which on there is an alarm: hardly any can be correct then."""


class RewardErrorRateError(RuntimeError):
    """The verifier failed on more of a step than --max-reward-error-rate allows."""


def step_alarms(
    metrics: Mapping[str, float], *, responses: int, first_reward_error: str | None = None
) -> list[str]:
    """Lines to show above the progress of a step; none where all is well.

    Args:
        metrics: the step's, with `reward_errors` and `truncated_responses` counted over `responses`.
        responses: sampled in the step, corrections not included.
        first_reward_error: what the verifier raised first.
    """
    if responses == 0:
        return []
    alarms = []
    errors, truncated = int(metrics.get("reward_errors", 0)), int(metrics.get("truncated_responses", 0))
    if errors / responses >= REWARD_ERROR_SHARE:
        alarms.append(
            f"ALARM: the verifier failed on {errors:,} of {counted(responses, 'response')}"
            + _because(first_reward_error)
        )
    if truncated / responses >= TRUNCATED_SHARE:
        alarms.append(
            f"ALARM: {truncated:,} of {counted(responses, 'response')} were cut off at the length limit; "
            "raise --rollout-max-response-len, or see whether the model ends its answers at all (eos_token)"
        )
    return alarms


def check_reward_errors(
    errors: int, responses: int, most: float, *, first_reward_error: str | None = None
) -> None:
    """Stop a run whose verifier does not work: nothing could be learnt from what is left.

    Args:
        errors: responses of one step that the verifier failed on.
        responses: of that step.
        most: --max-reward-error-rate, the share of errors that is still allowed.

    Raises:
        RewardErrorRateError: there are more.
    """
    if responses > 0 and errors / responses > most:
        raise RewardErrorRateError(
            f"the verifier failed on {errors:,} of {counted(responses, 'response')} of a step, more than "
            f"--max-reward-error-rate {most:g} allows{_because(first_reward_error)}"
        )


def _because(error: str | None) -> str:
    return f"; the first error: {error}" if error else ""
