"""The run's own verifier: labels as their own answers, and answers that must not count."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.config import DataConfig
from megatron_ibpo.rewards import Score, Verifier, named_rm_types, open_pool
from megatron_ibpo.rewards.verifier import rm_type_of
from megatron_ibpo.run.run_data import open_run_data, scored_by_verifiers
from megatron_ibpo.verify.batch import Subject
from megatron_ibpo.verify.rows import NotCheckedError, Row, counted_faults, measured

NUM_PROMPTS = 32
"""Prompts whose labels are tried."""
FORMS: tuple[Callable[[str], str], ...] = (
    lambda label: rf"Step by step, I find \boxed{{{label}}}, and so this is the result.",
    lambda label: f"The answer is {label}.",
    lambda label: label,
    lambda label: f"<answer>{label}</answer>",
    lambda label: f"#### {label}",
)
"""Ways in which a response may give its answer; one of them must earn full marks for every label. The first
is that of --rm-type math."""
BROKEN, HANGING = f"{__name__}:broken", f"{__name__}:hanging"


def check_rewards(subject: Subject) -> Iterator[Row]:
    """Score labels, wrong answers, empty answers and cut answers, each twice; then let a function fail."""
    config = replace(subject.small, data=subject.config.data)
    data = config.data
    prompts = scored_by_verifiers(open_run_data(config, subject.foundation).first_prompts)[:NUM_PROMPTS]
    if not prompts:
        raise NotCheckedError("environments score this run's responses, and no verifier")
    with Verifier(open_pool(data, named_rm_types(prompts, data)), data) as verifier:
        form, full = _best_form(verifier, prompts, data)
        missed = [_named(p, s) for p, s in zip(prompts, full, strict=True) if not s.correct]
        if len(missed) == len(prompts) and not _labels_are_answers(prompts, data):
            raise NotCheckedError(
                "no label earns full marks as an answer in any form tried; it may be no answer (tests of a "
                "program, a rubric)"
            )
        shown = f"{len(prompts)} labels as answers, such as {form('LABEL')!r}, earn full marks"
        yield counted_faults("rewards: labels", missed, shown)
        yield _must_not_count(verifier, prompts, form)
        answers = [(prompt, form(prompt.label)) for prompt in prompts]
        yield from _repeated(verifier, answers, full, data.reward_timeout)
    yield _failing(data, prompts[0])


def _best_form(
    verifier: Verifier, prompts: Sequence[Prompt], data: DataConfig
) -> tuple[Callable[[str], str], list[Score]]:
    forms = FORMS[:1] if _labels_are_answers(prompts, data) else FORMS
    scored = [(form, verifier.score([(p, form(p.label)) for p in prompts])) for form in forms]
    return max(scored, key=lambda pair: sum(score.correct for score in pair[1]))


def _labels_are_answers(prompts: Sequence[Prompt], data: DataConfig) -> bool:
    """Return whether every label must count as an answer: a task or a function may have labels of its own."""
    return {rm_type_of(prompt, data) for prompt in prompts} == {"math"}


def _must_not_count(verifier: Verifier, prompts: Sequence[Prompt], form: Callable[[str], str]) -> Row:
    """An empty, a wrong and a truncated answer are not correct."""
    other_labels = [next((p.label for p in prompts if p.label != prompt.label), "") for prompt in prompts]
    wrong = {
        "nothing": ["" for _ in prompts],
        "another prompt's label": [form(label) if label else "" for label in other_labels],
        "its label with a 7 behind it": [form(f"{prompt.label}7") for prompt in prompts],
        "its label cut by a digit": [form(p.label[:-1]) if _is_long(p.label) else "" for p in prompts],
        "half of its answer": [form(p.label)[: (len(form(p.label)) - len(p.label)) // 2] for p in prompts],
        "a response cut before its answer": ["First, I look at the question. Then" for _ in prompts],
    }  # fmt: skip
    faults = [
        f"{kind} counts for {_named(prompt, score)}"
        for kind, texts in wrong.items()
        for prompt, score in zip(prompts, verifier.score(list(zip(prompts, texts, strict=True))), strict=True)
        if score.correct
    ]
    return counted_faults("rewards: wrong answers", faults, f"{', '.join(wrong)}: none counts as right")


def _is_long(label: str) -> bool:
    return len(label) > 2 and label.removeprefix("-").isdigit()


def _repeated(
    verifier: Verifier, pairs: Sequence[tuple[Prompt, str]], scores: Sequence[Score], timeout: float
) -> Iterator[Row]:
    """The same text twice has the same reward, in another order too; how long it takes."""
    began = time.monotonic()
    repeated = verifier.score(pairs[::-1])[::-1]
    seconds = (time.monotonic() - began) / len(pairs)
    faults = [
        f"{first.reward} and then {second.reward} for prompt {prompt.index}"
        for (prompt, _), first, second in zip(pairs, scores, repeated, strict=True)
        if first.reward != second.reward
    ]
    yield counted_faults("rewards: twice", faults, f"{len(pairs)} responses, scored again in reverse order")
    errors = [score.error for score in repeated if score.error is not None]
    if errors:
        yield counted_faults("rewards: seconds", errors, f"{len(errors)} errors")
        return
    yield measured(
        "rewards: seconds", seconds, timeout, "--reward-timeout", "seconds per response"
    )  # fmt: skip


def _failing(data: DataConfig, prompt: Prompt) -> Row:
    """A function that raises, or that does not end, gives an error and no reward of 0."""
    unnamed = replace(prompt, metadata={k: v for k, v in prompt.metadata.items() if k != "rm_type"})
    faults = []
    for target in (BROKEN, HANGING):
        failing = replace(data, rm_type=target, reward_part=(), reward_timeout=1.0)
        with Verifier(open_pool(failing), failing) as verifier:
            (score,) = verifier.score([(unnamed, "1")])
        if score.reward is not None or not score.error:
            faults.append(f"{target.partition(':')[2]}: the reward {score.reward}")
    return counted_faults(
        "rewards: errors", faults, "functions that raise and that hang give errors, and not 0"
    )


def broken(prompt: str, response: str, label: str, metadata: object) -> float:
    """Raise, as a reward function with a fault in it."""
    raise RuntimeError("this function fails, to see what becomes of it")


def hanging(prompt: str, response: str, label: str, metadata: object) -> float:
    """Take longer than any time-out here."""
    time.sleep(60)
    return 0.0


def _named(prompt: Prompt, score: Score) -> str:
    return f"prompt {prompt.index}, label {prompt.label[:60]!r}: {score.error or score.reward}"
