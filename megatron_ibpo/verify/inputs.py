"""The run's prompts: what is left out, whether two readings agree, whether they show their text. And its
verifier: labels as their own answers, and answers that must not count."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.records import Prompt, TokenIds
from megatron_ibpo.basics.rendezvous import variables_set
from megatron_ibpo.config import Config, rm_type_in
from megatron_ibpo.config.config_error import broken
from megatron_ibpo.data import Tokenizer, open_pass_rates
from megatron_ibpo.data.files import chosen_files, each_row
from megatron_ibpo.data.inspection import inspect_source
from megatron_ibpo.data.layouts import fields_read
from megatron_ibpo.data.row_prompts import normalised, template_settings
from megatron_ibpo.data.sources import read_spec
from megatron_ibpo.data.tokenizer import DataError
from megatron_ibpo.rewards import Score, Verifier, named_rm_types, open_pool
from megatron_ibpo.run.inputs import RunData, open_run_data, scored_by_verifiers
from megatron_ibpo.run.resolve import read_foundation
from megatron_ibpo.verify.rows import NotCheckedError, Row, attempted, exact, measured

READING_TIMEOUT_S, FEW_HELD_OUT = 300.0, 128
MOST, FEW, GRADED, SCANNED = 512, 64, 32, 20_000
"""Prompts that are read twice, looked at closely, and whose labels are scored; rows that are searched."""
FORMS = (
    r"Step by step, I find \boxed{LABEL}, and so this is the result.",  # that of --rm-type math
    "The answer is LABEL.", "LABEL", "<answer>LABEL</answer>", "#### LABEL",
)  # fmt: skip
"""Ways in which a response may give its answer; one of them must earn full marks for every label."""


def check_data(config: Config) -> Iterator[Row]:
    """Read the run's own prompts, here and in another process. Few are held out, unless they are taken from
    those of training."""
    if not config.holds_out:
        few = min(config.run.eval_num_prompts, FEW_HELD_OUT)
        config = replace(config, run=replace(config.run, eval_num_prompts=few))
    data = open_run_data(config, read_foundation(config))
    if data.prompts is None:
        raise NotCheckedError("the run replays recorded rollouts and reads no prompts")
    size = data.prompts.num_prompts()
    prompts = data.prompts.batch(0, min(MOST, size or MOST))
    pairs = zip(
        contents(config, len(prompts)), with_other_hashes(contents, config, len(prompts)), strict=True
    )
    faults = [f"{first} and then {second}" for first, second in pairs if first != second]
    yield exact("data: two readings", faults, f"{len(prompts)} prompts are the same in two processes")
    yield from attempted("data: rows", lambda: _check_rows(config, data, prompts))
    if 0 < size <= MOST:
        first, second = (Counter((p.text, p.label) for p in data.prompts.batch(i, size)) for i in range(2))
        faults = [text for text, _ in first - second]
        yield exact("data: epochs", faults, f"two passes have the same {size} prompts")
    if held_out := [p for eval_set in data.eval_sets for p in eval_set.prompts]:
        texts = {normalised(prompt.text) for prompt in prompts}
        trained = sum(normalised(prompt.text) in texts for prompt in held_out)
        source = "half of them: generated tasks repeat their easiest prompts"
        reason = f"of {len(held_out)} held-out prompts are trained on"
        yield measured("data: duplicates", trained, len(held_out) / 2, source, reason)


def with_other_hashes(function: Callable[..., Any], *arguments: object) -> Any:
    """Return what a function returns in another process, where Python's hashes have another seed than here,
    even if the environment fixes that of this process."""
    other_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    with variables_set({"PYTHONHASHSEED": other_seed}), get_context("spawn").Pool(1) as pool:
        return pool.apply_async(function, arguments).get(READING_TIMEOUT_S)


def contents(config: Config, count: int) -> list[str]:
    """Return the content of the run's first `count` prompts. They are read from the last to the first, since
    each must depend on its position alone."""
    source = open_run_data(config, read_foundation(config)).prompts
    assert source is not None  # checked by the caller
    prompts = [source.at(position) for position in reversed(range(count))]
    return [
        repr((p.index, p.label, p.token_ids.tolist(), p.text, sorted(p.metadata.items()))) for p in prompts
    ]


def _check_rows(config: Config, data: RunData, prompts: list[Prompt]) -> Iterator[Row]:
    """Compare the prompts with the rows of their file: all are prompts or counted as left out, and the label
    of a prompt is in the row that has its text."""
    spec, *further_specs = config.data.prompt_data
    source = read_spec(spec)
    if further_specs or "://" in source.location or data.prompts is None or data.prompts.grows:
        raise NotCheckedError("the prompts are not the rows of one file that is read at the start")
    room = (
        read_foundation(config).max_context - config.rollout.rollout_max_response_len - data.suffixes.longest
    )
    rows = inspect_source(
        spec, data.tokenizer, config.data, split="train", max_prompt_len=room, most_rows=SCANNED, show=0,
        rates=open_pass_rates(config), environment=config.environment,
    )  # fmt: skip
    if not rows.is_whole:
        raise NotCheckedError(f"the file has more than {SCANNED:,} rows")
    num_held_out = sum(len(eval_set.prompts) for eval_set in data.eval_sets) if config.holds_out else 0
    missing = len(rows.lengths) - data.prompts.num_prompts() - num_held_out
    reason = (
        f"prompts of {len(rows.lengths)} in {rows.rows} rows are missing; left out: {dict(rows.tally.counts)}"
    )
    yield measured("data: rows", abs(missing), 0, "exact", reason)
    keys, texts = (
        (source.input_key or config.data.input_key, source.label_key or config.data.label_key),
        list[str](),
    )
    files = chosen_files(Path(source.location), "train", source.split)
    for _, read in each_row(files, sorted(fields_read(*keys))):
        with suppress(DataError):  # of a row that is left out and counted
            texts.append(_letters(read()))
    faults = []
    for prompt in prompts[:FEW]:
        label, of_prompt = _letters(prompt.label), [text for text in texts if _letters(prompt.text) in text]
        if (
            of_prompt
            and any(label in text for text in texts)
            and not any(label in text for text in of_prompt)
        ):
            faults.append(f"prompt {prompt.index} has the label {prompt.label[:60]!r} of another row")
    yield exact("data: labels", faults, f"{len(prompts[:FEW])} prompts have text and label of one row")


def _letters(value: object) -> str:
    """Return a value's letters and digits, which every way of writing it has."""
    return "".join(filter(str.isalnum, json.dumps(value, default=str)))


def check_prompts(config: Config) -> Iterator[Row]:
    """Compare prompts with their text as transformers renders it: how they begin, and from the text on."""
    from transformers import AutoTokenizer  # takes seconds

    data, settings = open_run_data(config, read_foundation(config)), config.data
    prompts = scored_by_verifiers(data.first_prompts)[:FEW]
    if not prompts:
        raise NotCheckedError("environments write the prompts, or recorded rollouts are replayed")
    theirs, faults = AutoTokenizer.from_pretrained(config.model.hf_dir), []
    for p in prompts:
        text, question = p.text, p.text.strip()
        if settings.apply_chat_template:
            chat = {"add_generation_prompt": True, "tokenize": False, **template_settings(settings)}
            text = theirs.apply_chat_template([{"role": "user", "content": p.text}], **chat)
        begin = theirs(text, add_special_tokens=not settings.apply_chat_template)["input_ids"][0]
        shown, expected = data.tokenizer.decode_all(p.token_ids), question + text.rpartition(question)[2]
        faults += [f"prompt {p.index} {fault}" for fault in broken({
            f"ends in {shown[-80:]!r} and not in {expected[-80:]!r} (--apply-chat-template?)":
                not "".join(shown.split()).endswith("".join(expected.split())),
            f"begins with id {p.token_ids[0]}, and in transformers with {begin}": p.token_ids[0] != begin,
            "begins with the same special token twice": doubled_start(p.token_ids, data.tokenizer),
        })]  # fmt: skip
    yield exact("tokens: prompts", faults, f"{len(prompts)} prompts are as transformers renders them")


def doubled_start(ids: TokenIds, tokenizer: Tokenizer) -> bool:
    """Return whether a sequence begins with the same special token twice."""
    is_special = bool(tokenizer.decode_all(ids[:1])) and not tokenizer.decode(ids[:1])
    return len(ids) > 1 and ids[0] == ids[1] and is_special


def check_rewards(config: Config) -> Iterator[Row]:
    """Score labels twice, and wrong, empty and cut answers; then let a function fail."""
    data = config.data
    prompts = scored_by_verifiers(open_run_data(config, read_foundation(config)).first_prompts)[:GRADED]
    if not prompts:
        raise NotCheckedError("environments score this run's responses, and no verifier")
    # elsewhere a task or a function may have labels that are no answers
    forms = FORMS[:1] if {rm_type_in(prompt.metadata, data) for prompt in prompts} == {"math"} else FORMS
    with Verifier(open_pool(data, named_rm_types(prompts, data)), data) as verifier:

        def scores(form: str) -> list[Score]:
            return verifier.score([(prompt, form.replace("LABEL", prompt.label)) for prompt in prompts])

        def graded(scores: list[Score], *, correct: bool) -> list[str]:
            pairs = [(p, s) for p, s in zip(prompts, scores, strict=True) if s.correct == correct]
            return [f"prompt {p.index}, label {p.label[:60]!r}: {s.error or s.reward}" for p, s in pairs]

        tried = {form: scores(form) for form in forms}
        form = max(tried, key=lambda form: sum(score.correct for score in tried[form]))
        faults = graded(tried[form], correct=False)
        if len(faults) == len(prompts) and len(forms) > 1:
            raise NotCheckedError(
                "no label earns full marks as an answer; it may be none (a program's tests)"
            )
        yield exact("rewards: labels", faults, f"{len(prompts)} labels, as {form!r}, earn full marks")
        wrong = {"nothing": "", "its label with a 7 behind it": form.replace("LABEL", "LABEL7")}
        wrong |= {"half of a response": form.partition("LABEL")[0]}
        faults = [
            f"{kind} of {f}" for kind, text in wrong.items() for f in graded(scores(text), correct=True)
        ]
        yield exact("rewards: wrong answers", faults, f"{', '.join(wrong)}: none counts as right")
        began = time.monotonic()
        pairs = zip(tried[form], scores(form), strict=True)
        faults = [
            f"{first.reward}, then {second.reward}"
            for first, second in pairs
            if first.reward != second.reward
        ]
        seconds = (time.monotonic() - began) / len(prompts)
        yield exact("rewards: twice", faults, f"{len(prompts)} responses, {seconds:.2g} s for each")
    plain = replace(prompts[0], metadata={k: v for k, v in prompts[0].metadata.items() if k != "rm_type"})
    faults = []
    for name in ("broken", "hanging"):
        rm_type = f"megatron_ibpo.verify.made_up_rewards:{name}"
        failing = replace(data, rm_type=rm_type, reward_part=(), reward_timeout=1.0)
        with Verifier(open_pool(failing), failing) as verifier:
            (score,) = verifier.score([(plain, "1")])
        faults += [f"{name}: {score.reward}"] if score.reward is not None or not score.error else []
    yield exact("rewards: errors", faults, "functions that raise and that hang give errors, and not 0")
