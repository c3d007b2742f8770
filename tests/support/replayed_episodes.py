"""Plays what an episode's sample holds once more in a fresh environment of this process."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron_ibpo.basics.records import Sample
from megatron_ibpo.basics.seeds import derive_seed


def stretches(sample: Sample) -> Iterator[tuple[bool, list[int]]]:
    """Yield (whether the policy wrote it, its ids) of every stretch of the sample."""
    edges = np.flatnonzero(np.diff(sample.loss_mask.astype(int)))
    starts = [0, *(edges + 1).tolist()]
    for start, end in zip(starts, [*starts[1:], len(sample.token_ids)], strict=True):
        yield bool(sample.loss_mask[start]), sample.token_ids[start:end].tolist()


def replay_problems(sample, prompt, environment, chat, *, ends, seed, is_correction=False) -> list[str]:
    """Return how a scored episode differs from what a fresh environment gives for the policy's turns.

    Args:
        ends: end-of-sequence ids; a turn without one was cut, and the environment did not see it.
        seed: the run's.
        is_correction: its prompt is a correction's, not the environment's opening.
    """
    seeded = derive_seed("environment", seed, prompt.index)
    opening = environment.reset(prompt.text, prompt.label, prompt.metadata, seeded)
    problems = []
    if not is_correction and chat.open(opening.messages, opening.tools) != sample.prompt_token_ids.tolist():
        problems.append("the opening differs")
    ids, answer = sample.prompt_token_ids.tolist(), None
    for is_policys, stretch in stretches(sample):
        if is_policys:
            ended = stretch[-1] in ends
            answer = environment.step(chat.read(stretch, opening.tools)) if ended else None
        elif answer is None or chat.extend(ids, answer.messages) != stretch:
            problems.append(f"another answer after {len(ids)} tokens")
        ids += stretch
    scored: Any = environment.score()
    reward = scored["score"] if isinstance(scored, dict) else scored
    if float(reward) != sample.reward:
        problems.append(f"reward {sample.reward}, and {reward} when played again")
    return problems
