"""The run's prompts: what is left out, whether two readings agree, whether they fit their context. And its
verifier: labels as their own answers, and answers that must not count."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.basics.rendezvous import variables_set
from megatron_ibpo.config import Config, DataConfig, rm_type_in
from megatron_ibpo.data import PromptSource
from megatron_ibpo.data.files import chosen_files, each_row
from megatron_ibpo.data.layouts import fields_read
from megatron_ibpo.data.row_prompts import normalised
from megatron_ibpo.data.sources import read_spec
from megatron_ibpo.data.tokenizer import DataError
from megatron_ibpo.rewards import Score, Verifier, named_rm_types, open_pool
from megatron_ibpo.run.inputs import open_run_data, scored_by_verifiers
from megatron_ibpo.run.resolve import read_foundation
from megatron_ibpo.verify.batch import Subject
from megatron_ibpo.verify.rows import NotCheckedError, Row, counted_faults, measured, not_checked

READING_TIMEOUT_S = 300.0
FEW_HELD_OUT = 128
MOST, LABELLED, SCANNED = 512, 64, 20_000
"""Prompts that are compared, those that are looked for in their file, and its rows that are searched."""
GRADED = 32
"""Prompts whose labels are scored."""
FORMS: tuple[Callable[[str], str], ...] = (
    lambda label: rf"Step by step, I find \boxed{{{label}}}, and so this is the result.",
    lambda label: f"The answer is {label}.",
    lambda label: label,
    lambda label: f"<answer>{label}</answer>",
    lambda label: f"#### {label}",
)
"""Ways in which a response may give its answer; one of them must earn full marks for every label. The first
is that of --rm-type math."""


def check_data(subject: Subject) -> Iterator[Row]:
    """Read the run's own prompts, here and in another process. Few are held out, unless they are taken from
    those of training."""
    config = subject.config
    if not config.holds_out:
        few = min(config.run.eval_num_prompts, FEW_HELD_OUT)
        config = replace(config, run=replace(config.run, eval_num_prompts=few))
    foundation = read_foundation(config)
    data = open_run_data(config, foundation)
    source = data.prompts
    if source is None:
        raise NotCheckedError("the run replays recorded rollouts and reads no prompts")
    size = source.num_prompts()
    prompts = source.batch(0, min(MOST, size or MOST))
    held_out = [p for eval_set in data.eval_sets for p in eval_set.prompts]
    reasons = sum((tally.counts for tally in source.tallies), Counter[str]())
    left_out = reasons.total()
    yield _readings_row(prompts, config)
    yield from _file_rows(config, prompts, size + left_out + (len(held_out) if config.holds_out else 0))
    named = ", ".join(f"{reason}: {count}" for reason, count in reasons.items()) or "nothing is left out"
    share = left_out / max(1, left_out + (size or len(prompts)))
    yield measured("data: left out", share, 0.5, "half of all rows", f"share of rows; {named}")
    longest, shortest = (choose(len(prompt.token_ids) for prompt in prompts) for choose in (max, min))
    yield measured(
        "data: lengths", longest if shortest else float("inf"),
        foundation.max_context - config.rollout.rollout_max_response_len,
        "--rollout-max-context-len less --rollout-max-response-len",
        f"tokens of the longest of {len(prompts)} prompts; the shortest has {shortest}",
    )  # fmt: skip
    yield _epochs_row(source, size)
    if not held_out:
        yield not_checked("data: duplicates", "no prompts are held out")
        return
    texts = {normalised(prompt.text) for prompt in prompts}
    yield measured(
        "data: duplicates", sum(normalised(prompt.text) in texts for prompt in held_out), len(held_out) / 2,
        "half of them: generated tasks repeat their easiest prompts",
        f"of {len(held_out)} held-out prompts are trained on; {len(prompts) - len(texts)} of {len(prompts)} "
        "prompts are duplicates",
    )  # fmt: skip


def _readings_row(prompts: Sequence[Prompt], config: Config) -> Row:
    """The prompts are the same in another process, where Python's hashes have another seed."""
    repeated = with_other_hashes(contents, config, len(prompts))
    faults = [
        f"prompt {prompt.index} is another in a second reading"
        for prompt, content in zip(prompts, repeated, strict=True)
        if _content(prompt) != content
    ]
    faults += [f"prompt {i} has the index {p.index}" for i, p in enumerate(prompts) if p.index != i]
    reason = f"{len(prompts)} prompts have the same ids, labels and order in two processes"
    return counted_faults("data: two readings", faults, reason)


def with_other_hashes(function: Callable[..., Any], *arguments: object) -> Any:
    """Return what a function returns in another process, where Python's hashes have another seed than here,
    even if the environment fixes that of this process."""
    other_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    with variables_set({"PYTHONHASHSEED": other_seed}), get_context("spawn").Pool(1) as pool:
        return pool.apply_async(function, arguments).get(READING_TIMEOUT_S)


def contents(config: Config, count: int) -> list[str]:
    """Return all that the run's first prompts hold, in order. The last is read first, since a prompt depends
    on its position alone."""
    source = open_run_data(config, read_foundation(config)).prompts
    assert source is not None  # checked by the caller
    return [_content(source.at(position)) for position in reversed(range(count))][::-1]


def _content(prompt: Prompt) -> str:
    ids, metadata = prompt.token_ids.tolist(), sorted(prompt.metadata.items())
    return repr((prompt.index, prompt.label, ids, prompt.head_length, prompt.text, metadata))


def _file_rows(config: Config, prompts: Sequence[Prompt], num_counted: int) -> Iterator[Row]:
    """Compare the prompts with the rows of their file: each has text and label of a row, and a row that is
    no prompt is counted."""
    spec, *further_specs = [read_spec(spec) for spec in config.data.prompt_data]
    if further_specs or "://" in spec.location:
        for check in ("data: labels", "data: rows"):
            yield not_checked(check, "the prompts are not the rows of one file")
        return
    keys = spec.input_key or config.data.input_key, spec.label_key or config.data.label_key
    columns = sorted(fields_read(*keys))
    num_rows, rows = 0, list[str]()
    files = chosen_files(Path(spec.location), "train", spec.split)
    for num_rows, (_, read) in enumerate(each_row(files, columns), start=1):
        if num_rows <= SCANNED:
            with suppress(DataError):  # of a row that is left out and counted
                row = read()
                rows.append(_letters([row.get(column) for column in columns]))
    yield _labels_row(prompts[:LABELLED], rows)
    if spec.only or config.data.deduplicate or config.data.filter_pass_rate:
        yield not_checked("data: rows", "rows are left out by settings, which count them in another way")
    else:
        reason = f"{num_rows} rows, of which {num_counted} are prompts, held out or counted as left out"
        yield measured("data: rows", abs(num_rows - num_counted), 0, "exact", reason)


def _labels_row(prompts: Sequence[Prompt], rows: Sequence[str]) -> Row:
    """A prompt's label is in a row that has its text, if the rows have both."""
    faults, num_prompts = [], 0
    for prompt in prompts:
        text, label = _letters(prompt.text), _letters(prompt.label)
        with_text = [row for row in rows if text in row]
        if with_text and any(label in row for row in rows):
            num_prompts += 1
            if not any(label in row for row in with_text):
                faults.append(f"prompt {prompt.index} has the label {prompt.label[:60]!r} of another row")
    if not num_prompts:
        return not_checked("data: labels", "texts and labels of prompts are not in the file as they are")
    return counted_faults("data: labels", faults, f"{num_prompts} prompts have text and label of one row")


def _letters(value: object) -> str:
    """Return a value's letters and digits, which every way of writing it has."""
    return "".join(filter(str.isalnum, json.dumps(value, default=str)))


def _epochs_row(source: PromptSource, size: int) -> Row:
    """A second pass has every prompt once, in whatever order."""
    if not 0 < size <= MOST:
        reason = "the prompts never repeat" if not size else f"{size:,} prompts: an epoch is not read through"
        return not_checked("data: epochs", reason)
    first, second = (Counter(p.text + "\0" + p.label for p in source.batch(i, size)) for i in range(2))
    faults = [f"{(first - second).total()} prompts are missing in the second"] if first != second else []
    return counted_faults("data: epochs", faults, f"two passes have the same {size} prompts")


def check_rewards(subject: Subject) -> Iterator[Row]:
    """Score labels, wrong answers, empty answers and cut answers, each twice; then let a function fail."""
    config = replace(subject.small, data=subject.config.data)
    data = config.data
    prompts = scored_by_verifiers(open_run_data(config, subject.foundation).first_prompts)[:GRADED]
    if not prompts:
        raise NotCheckedError("environments score this run's responses, and no verifier")
    # elsewhere a task or a function may have labels that are no answers
    labels_are_answers = {rm_type_in(prompt.metadata, data) for prompt in prompts} == {"math"}
    with Verifier(open_pool(data, named_rm_types(prompts, data)), data) as verifier:

        def scores(texts: list[str]) -> list[Score]:
            return verifier.score(list(zip(prompts, texts, strict=True)))

        tried = [
            (form, scores([form(prompt.label) for prompt in prompts]))
            for form in (FORMS[:1] if labels_are_answers else FORMS)
        ]
        form, full = max(tried, key=lambda pair: sum(score.correct for score in pair[1]))
        missed = [_named(p, s) for p, s in zip(prompts, full, strict=True) if not s.correct]
        if len(missed) == len(prompts) and not labels_are_answers:
            raise NotCheckedError(
                "no label earns full marks as an answer in any form tried; it may be no answer (tests of a "
                "program, a rubric)"
            )
        reason = f"{len(prompts)} labels as answers, such as {form('LABEL')!r}, earn full marks"
        yield counted_faults("rewards: labels", missed, reason)
        wrong = _wrong_answers(prompts, form)
        faults = [
            f"{kind} counts for {_named(prompt, score)}"
            for kind, texts in wrong.items()
            for prompt, score in zip(prompts, scores(texts), strict=True)
            if score.correct
        ]
        yield counted_faults("rewards: wrong answers", faults, f"{', '.join(wrong)}: none counts as right")
        answers = [(prompt, form(prompt.label)) for prompt in prompts]
        yield from _repeated(verifier, answers, full, data.reward_timeout)
    yield _failing(data, prompts[0])


def _wrong_answers(prompts: list[Prompt], form: Callable[[str], str]) -> dict[str, list[str]]:
    """Return kinds of responses that are not correct, one for each prompt: empty, wrong and cut ones."""

    def is_long(label: str) -> bool:
        return len(label) > 2 and label.removeprefix("-").isdigit()

    other_labels = [next((p.label for p in prompts if p.label != prompt.label), "") for prompt in prompts]
    return {
        "nothing": ["" for _ in prompts],
        "another prompt's label": [form(label) if label else "" for label in other_labels],
        "its label with a 7 behind it": [form(f"{prompt.label}7") for prompt in prompts],
        "its label cut by a digit": [form(p.label[:-1]) if is_long(p.label) else "" for p in prompts],
        "half of its answer": [form(p.label)[: (len(form(p.label)) - len(p.label)) // 2] for p in prompts],
        "a response cut before its answer": ["First, I look at the question. Then" for _ in prompts],
    }


def _repeated(
    verifier: Verifier, answers: list[tuple[Prompt, str]], scores: list[Score], timeout: float
) -> Iterator[Row]:
    """The same text twice has the same reward, in another order too; how long it takes."""
    began = time.monotonic()
    repeated = verifier.score(answers[::-1])[::-1]
    seconds = (time.monotonic() - began) / len(answers)
    faults = [
        f"{first.reward} and then {second.reward} for prompt {prompt.index}"
        for (prompt, _), first, second in zip(answers, scores, repeated, strict=True)
        if first.reward != second.reward
    ]
    yield counted_faults("rewards: twice", faults, f"{len(answers)} responses, scored again in reverse order")
    errors = [score.error for score in repeated if score.error is not None]
    reason = f"seconds per response; {len(errors)} errors{': ' if errors else ''}{'; '.join(errors[:1])}"
    figure = float("inf") if errors else seconds
    yield measured("rewards: seconds", figure, timeout, "--reward-timeout", reason)


def _failing(data: DataConfig, prompt: Prompt) -> Row:
    """A function that raises, or that does not end, gives an error and no reward of 0."""
    unnamed = replace(prompt, metadata={k: v for k, v in prompt.metadata.items() if k != "rm_type"})
    faults = []
    for name in ("broken", "hanging"):
        rm_type = f"megatron_ibpo.verify.made_up_rewards:{name}"
        failing = replace(data, rm_type=rm_type, reward_part=(), reward_timeout=1.0)
        with Verifier(open_pool(failing), failing) as verifier:
            (score,) = verifier.score([(unnamed, "1")])
        if score.reward is not None or not score.error:
            faults.append(f"{name}: the reward {score.reward}")
    reason = "functions that raise and that hang give errors, and not 0"
    return counted_faults("rewards: errors", faults, reason)


def _named(prompt: Prompt, score: Score) -> str:
    return f"prompt {prompt.index}, label {prompt.label[:60]!r}: {score.error or score.reward}"
