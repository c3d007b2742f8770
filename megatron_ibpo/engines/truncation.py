"""Refusals of top-k and top-p where the trainer cannot compute the probabilities that were sampled from.

An engine's log-probs are normalised over the ids that top-k and top-p left. Without a record of these ids
(`Sample.sampling_mask`) the trainer normalises over the whole vocabulary, and its ratios to the engine's
log-probs are too small by the probability that was cut off.
"""

from collections.abc import Iterable, Sequence

from megatron_ibpo.basics.records import TrainSequence
from megatron_ibpo.config import Config, RolloutConfig
from megatron_ibpo.engines.registry import changed_probabilities, sampling_mask_obstacle

SCALED = "ratios to the engine's log-probs would be scaled by the probability that was cut off"


def check_truncation(config: Config, readers: Sequence[str] | None = None, *, on_gpu: bool = True) -> None:
    """Refuse a run that compares the trainer's log-probs with the engine's if these are of another
    distribution, which the engine cannot describe.

    Args:
        readers: settings under which the loss reads the engine's log-probs; None: `flag_readers`.
        on_gpu: whether engines have GPUs; assumed until it is known.

    Raises:
        ValueError: names the flags and says what to do, with a line for every problem.
    """
    readers = flag_readers(config) if readers is None else readers
    if not readers or config.run.load_debug_rollout_data is not None or config.run.debug_rollout_only:
        return
    named, cuts = " and ".join(readers), config.rollout.truncation
    problems = [
        f"{flag} with {named}: the trainer does not compute what it changes, so ratios to the engine's "
        "log-probs would be wrong; drop one of the two"
        for flag in changed_probabilities(config.rollout)
    ]
    if cuts and (obstacle := sampling_mask_obstacle(config, on_gpu=on_gpu)):
        problems.append(
            f"{' and '.join(cuts)} with {named}: {SCALED}, since {obstacle}, or drop one of the two"
        )
    if problems:
        raise ValueError("\n".join(problems))


def check_recorded(config: Config, sequences: Iterable[TrainSequence]) -> None:
    """Refuse to train on samples without a sampling mask that the loss needs, such as those of an older
    version's journal. Raises ValueError with their number."""
    rollout = config.rollout
    if not rollout.truncation or not (readers := all_readers(config)):
        return
    lacking = sum(_is_cut(s, rollout) for s in sequences if s.sampling_mask is None and not s.off_policy)
    if lacking:
        raise ValueError(
            f"{' and '.join(rollout.truncation)} with {' and '.join(readers)}: {SCALED}, since {lacking} "
            "sequences have no record of what was left; sample them again, without this journal or "
            "recording, or drop one of the two"
        )


def _is_cut(sequence: TrainSequence, rollout: RolloutConfig) -> bool:
    """Return whether top-p or top-k cut what a sequence was sampled from; corrections have no cycles."""
    top_p, top_k = rollout.rollout_top_p, rollout.rollout_top_k
    if sequence.kind == "response":
        top_p, top_k = rollout.top_p_and_k(sequence.index)
    return top_p < 1 or top_k > 0


def flag_readers(config: Config) -> list[str]:
    """Return the flags under which the loss depends on the engine's log-probs, or on older policies that only
    these describe."""
    staleness = config.rollout.max_staleness
    stale = [f"--max-staleness {staleness}"] if staleness else []
    return [*config.loss.engine_logprob_readers, *stale]


def variant_readers(config: Config) -> list[str]:
    """Return the loss variant if it reads the engine's log-probs. Importing torch takes a second. Raises
    ValueError if there is no such variant."""
    from megatron_ibpo.loss import resolve_variant

    variant, _ = resolve_variant(config.loss.loss_variant)
    reads = "rollout_logprobs" in variant.token_inputs
    return [f"--loss-variant {config.loss.loss_variant}"] if reads else []


def all_readers(config: Config) -> list[str]:
    """Return the readers of both kinds."""
    return [*flag_readers(config), *variant_readers(config)]
