"""The sets of held-out prompts of a run or an evaluation, opened and checked; and results.json, the results
of an evaluation by set and by problem."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.basics.text import counted, listed
from megatron_ibpo.config import (
    Config,
    DataConfig,
    EvalSampling,
    EvalSpec,
    as_specs,
    display_name,
    eval_sampling,
    nearest,
    rm_type_in,
)
from megatron_ibpo.credit import Operator
from megatron_ibpo.data import DataError, PromptSource, Tokenizer, open_sources
from megatron_ibpo.data.files import each_row
from megatron_ibpo.data.generated import warn_if_slow
from megatron_ibpo.data.layouts import fields_read
from megatron_ibpo.data.prompts import in_environment
from megatron_ibpo.data.row_prompts import prompts_of_rows
from megatron_ibpo.engines.registry import sampling_precision
from megatron_ibpo.evaluate.accuracy import Evaluation, interval_over_prompts, unknown_as_nan
from megatron_ibpo.evaluate.benchmarks import BENCHMARKS, BenchmarkRows, checksums
from megatron_ibpo.evaluate.stored_samples import (
    FINISHED,
    UNFINISHED,
    EvalSample,
    Settings,
    problem_id,
    prompts_digest,
    read_results,
    write_results,
)
from megatron_ibpo.rewards import Response, answer_extractor, extracted_answer, main_rm_type

_OTHER_SCHEMES = ("reasoning_gym", "import")
_ROWS_FOR_FIELDS = 1000
"""Rows that are searched for fields without a meaning."""
_MOST_LOOKED_AT = 100
"""Prompts of an endless source to look at per prompt of a half; every second prompt falls into it."""


@dataclass(frozen=True)
class EvalSet:
    """Held-out prompts, and how responses to them are sampled."""

    name: str
    is_named: bool
    """True if metrics include the name: unless it is the only set, and the user gave it none."""
    prompts: list[Prompt]
    sampling: EvalSampling
    answer: Callable[[Prompt, str | Response], str | None] | None
    """Extracts the answer of a response to a prompt; None if no verifier of the set defines that."""
    notes: tuple[str, ...] = ()
    """Notes on the source for the user."""

    def metrics(self, of_evaluation: dict[str, float]) -> dict[str, float]:
        """Return the metrics of an evaluation of this set, by their names in a log."""
        prefix = f"eval/{self.name}/" if self.is_named else ""
        return {f"{prefix}{name}": value for name, value in of_evaluation.items()}


@dataclass(frozen=True)
class SetEvaluation:
    """One set with its evaluation."""

    set: EvalSet
    evaluation: Evaluation
    samples: list[EvalSample]


def set_settings(eval_set: EvalSet, config: Config, operator: Operator, policy: str) -> Settings:
    """Return everything that the samples of a set depend on.

    Args:
        policy: digest of the policy's weights.
    """
    corrects = config.run.eval_compare_and_correct
    of_episodes = config.environment.of_samples()
    episodes = {f"--{name.replace('_', '-')}": value for name, value in of_episodes.items()}
    return episodes | {
        "policy": policy,
        "prompts": prompts_digest(eval_set.prompts),
        "--n-samples-per-eval-prompt": eval_set.sampling.samples,
        "--eval-max-response-len": eval_set.sampling.max_tokens,
        "--eval-temperature": eval_set.sampling.temperature,
        "--eval-top-p": eval_set.sampling.top_p,
        "--eval-top-k": eval_set.sampling.top_k,
        "--rollout-max-context-len": config.rollout.rollout_max_context_len,
        "precision": sampling_precision(config.rollout).dtype,
        "--seed": config.run.seed,
        "--rm-type": config.data.rm_type,
        "--reward-threshold": config.data.reward_threshold,
        "--eval-compare-and-correct": corrects,
        "--ibpo-k": operator.ibpo_k if corrects else None,
        "--ibpo-strip-thinking": operator.ibpo_strip_thinking if corrects else None,
    }


def open_eval_sets(config: Config, tokenizer: Tokenizer, max_context: int, *, ibpo_k: int) -> list[EvalSet]:
    """Open every set of --eval-prompt-data, or what is held out of --prompt-data; none if evaluation is off.

    Args:
        max_context: limit of tokens in prompt and response together.
        ibpo_k: samples that --eval-compare-and-correct shows.

    Raises:
        ValueError: one cannot be used (`DataError`), two have one name, or --eval-compare-and-correct shows
            more samples than are taken.
    """
    if config.run.eval_num_prompts == 0:
        return []
    specs = as_specs(config.data.eval_prompt_data)
    if config.holds_out:
        specs = [EvalSpec(None, spec) for spec in config.data.prompt_data]
    sets = [
        _open(spec, config, tokenizer, max_context, ibpo_k, is_named=len(specs) > 1 or spec.name is not None)
        for spec in specs
    ]
    sets += [
        replace(
            eval_set,
            name=f"{eval_set.name}@{temperature:g}",
            is_named=True,
            sampling=replace(eval_set.sampling, temperature=temperature),
            notes=(),
        )
        for eval_set in sets
        for temperature in config.run.eval_other_temperatures
    ]
    names = [eval_set.name for eval_set in sets]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"--eval-prompt-data: two sets would be called {name!r}; give them names, NAME=SPEC"
            )
    return sets


def _open(
    spec: EvalSpec, config: Config, tokenizer: Tokenizer, max_context: int, ibpo_k: int, *, is_named: bool
) -> EvalSet:
    scheme, separator, location = spec.spec.partition("://")
    benchmark = BENCHMARKS.get(scheme) if separator else None
    if separator and benchmark is None and scheme not in _OTHER_SCHEMES:
        schemes = [*BENCHMARKS, *_OTHER_SCHEMES]
        raise DataError(
            f"--eval-prompt-data {spec}: no benchmark {scheme!r}; there are {', '.join(schemes)}"
            f"{nearest(scheme, schemes)}"
        )
    of_the_set = {} if benchmark is None else {"n_samples_per_eval_prompt": benchmark.samples}
    sampling = eval_sampling(config, of_the_set)
    room = _room(max_context, sampling)
    if benchmark is not None:
        rows = BenchmarkRows(benchmark, scheme, location)
        plain = replace(config.data, input_key="prompt", label_key="label")  # the names that `rows` gives
        benchmark_prompts = prompts_of_rows(rows, tokenizer, plain, spec="benchmark", max_prompt_len=room)
        source = in_environment(benchmark_prompts, config.environment.environment)
        notes = [*source.notes, *rows.notes(), *checksums(location)]
    else:
        source = open_sources(
            [spec.spec],
            tokenizer,
            config.data,
            split="eval",
            max_prompt_len=room,
            holds_out=config.holds_out,
            environment=config.environment,
        )
        notes = [*source.notes, *_unused_fields(spec.spec, config.data)]
    count, available = config.run.eval_num_prompts, source.num_prompts()
    number = min(count, available or count)
    with warn_if_slow(f"{spec}: making {counted(number, 'prompt')}; --eval-num-prompts asks for fewer"):
        half = config.run.eval_half
        prompts = source.batch(0, number) if half == "all" else _of_half(source, half, count, spec)
    if available > count:
        notes.append(f"{spec}: the first {count} of {counted(available, 'prompt')} (--eval-num-prompts)")
    _check(spec, prompts, sampling, ibpo_k if config.run.eval_compare_and_correct else 0)
    return EvalSet(
        name=spec.name or _name_of(spec.spec),
        is_named=is_named,
        prompts=prompts,
        sampling=sampling,
        answer=_answer_of(prompts, config.data) if config.environment.environment is None else None,
        notes=tuple(notes),
    )


def _of_half(source: PromptSource, half: str, count: int, spec: EvalSpec) -> list[Prompt]:
    """Return the first `count` prompts of a half, or all there are."""
    positions = range(source.num_prompts() or _MOST_LOOKED_AT * count)
    prompts = list(islice((p for p in map(source.at, positions) if half_of(p.text) == half), count))
    if not prompts:
        raise DataError(f"--eval-half {half}: none of the prompts of {spec} falls into it; give more prompts")
    return prompts


def half_of(text: str) -> str:
    """Return "tuning" or "test" by a hash of a question's text, the same in every run."""
    return (
        "tuning" if hashlib.blake2b(text.encode(), key=b"half", digest_size=1).digest()[0] < 128 else "test"
    )


def _check(spec: EvalSpec, prompts: list[Prompt], sampling: EvalSampling, k: int) -> None:
    """Raise ValueError for prompts that cannot be told apart, or with fewer samples than `k`, which a
    correction is shown."""
    first: dict[str, int] = {}
    for prompt in prompts:
        if (earlier := first.setdefault(problem_id(prompt), prompt.index)) != prompt.index:
            raise DataError(
                f"--eval-prompt-data {spec}: rows {earlier} and {prompt.index}, counted from 0, both have "
                f"the id {problem_id(prompt)!r}"
            )
    if sampling.samples < k:
        raise ValueError(
            f"--eval-compare-and-correct: a correction is shown --ibpo-k {k} samples of its prompt, but "
            f"{spec} takes {sampling.samples}; raise --n-samples-per-eval-prompt"
        )


def _room(context: int, sampling: EvalSampling) -> int:
    """Return the limit of tokens per prompt."""
    if sampling.max_tokens >= context:
        raise ValueError(
            f"--eval-max-response-len, which --eval-preset may set: {sampling.max_tokens} leaves no room for "
            f"a prompt in a context of {context}"
        )
    return context - sampling.max_tokens


def _answer_of(
    prompts: list[Prompt], data: DataConfig
) -> Callable[[Prompt, str | Response], str | None] | None:
    kinds = {rm_type_in(prompt.metadata, data) for prompt in prompts}
    verifiers = {main_rm_type(replace(data, rm_type=kind)) for kind in kinds}
    if not any(map(answer_extractor, verifiers)):
        return None
    return lambda prompt, response: extracted_answer(prompt, response, data)


def _name_of(spec: str) -> str:
    """Return a name for a set that the user did not name: its benchmark, task, function or file."""
    scheme, separator, location = spec.partition("://")
    if scheme in BENCHMARKS:
        return scheme
    path = Path(spec.partition("?")[0])
    of_file = path.stem if display_name(path) == path.name else display_name(path)
    last = location.partition("?")[0] if separator else of_file
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in last) or "prompts"


def _unused_fields(spec: str, data: DataConfig) -> list[str]:
    """Return a note on the fields of a JSONL file, of its first rows, that have no meaning here."""
    location = spec.partition("?")[0]
    if "://" in location or not location.endswith(".jsonl"):
        return []
    used = fields_read(data.input_key, data.label_key)
    unused: dict[str, None] = {}
    for _, read in islice(each_row([Path(location)], ()), _ROWS_FOR_FIELDS):
        with suppress(DataError):  # reported elsewhere
            unused |= dict.fromkeys(name for name in read() if name not in used)
    if not unused:
        return []
    fields = listed([repr(name)[:60] for name in unused], most=10)
    return [f"{location}: fields that are not used: {fields}"]


def finish_results(
    directory: Path, evaluated: Sequence[SetEvaluation], further_entries: dict[str, Any]
) -> dict[str, Any]:
    """Write the results of these sets beside existing results of others, and return all of them.

    Args:
        further_entries: entries beside the sets, such as seconds.
    """
    content = read_results(directory)
    for set_evaluation in evaluated:
        content["sets"][set_evaluation.set.name] |= results_of_set(set_evaluation)
    finished = all("measures" in entry for entry in content["sets"].values())
    content |= {"status": FINISHED if finished else UNFINISHED, **further_entries}
    write_results(directory, content)
    return content


def results_of_set(set_evaluation: SetEvaluation) -> dict[str, Any]:
    """Return the entries of one set. measures: as in the metrics log. intervals: 95 %, for each measure that
    is a mean over problems. problems: id, digest of question and label, and each such measure's value for
    every problem, in order."""
    evaluation = set_evaluation.evaluation
    intervals = {
        name: interval_over_prompts(unknown_as_nan(values))
        for name, values in evaluation.by_prompt.items()
        if any(value is not None for value in values)
    }
    return {
        "measures": evaluation.metrics(),
        "intervals": {name: list(bounds) for name, bounds in intervals.items()},
        "problems": {
            "id": [problem_id(prompt) for prompt in set_evaluation.set.prompts],
            "digest": [_digest(prompt) for prompt in set_evaluation.set.prompts],
            **evaluation.by_prompt,
        },
        "notes": list(set_evaluation.set.notes),
    }


def _digest(prompt: Prompt) -> str:
    text = f"{prompt.text}\0{prompt.label}".encode(errors="replace")
    return hashlib.blake2b(text, digest_size=8).hexdigest()
