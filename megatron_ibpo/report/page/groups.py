"""Samples as the page shows them, in groups: those of a recorded step with all their tokens, and those of an
evaluation's set, whose problems are its groups.

Numbers per token are rounded; tokens are numbers in a vocabulary that goes with the group. The samples of an
evaluation are read by their place in the file, so that a set of any size takes only its table's memory.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ibpo.basics.records import Correction, Group, Sample, TokenIds
from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.basics.text import shown
from megatron_ibpo.basics.user_files import check_user_file, finished_lines
from megatron_ibpo.credit.explanation import SampleExplanation
from megatron_ibpo.data import Tokenizer
from megatron_ibpo.edit_distance import opcodes
from megatron_ibpo.evaluate.stored_samples import RESULTS_FILE, read_results, samples_path
from megatron_ibpo.report.metrics_log import is_number
from megatron_ibpo.report.rollout_data import RecordedStep, Trained

_OF_CORRECTION = ("target", "references", "distance", "reference_distance", "rewritten", "unmodified_share")
"""Fields of a correction that the page shows as they are."""
_PROMPT_END = 160
"""Characters of a prompt's end in the table of groups."""
_LONGEST_CHARACTER = 4
"""Most bytes of a character in UTF-8, and so its most tokens."""


def index_of_step(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the data for the table of groups and the filters: everything but tokens."""
    return [
        {
            "prompt": group.prompt.text[-_PROMPT_END:],
            "label": group.prompt.label,
            "skipped_pairs": group.skipped_pairs,
            "responses": [_outcome(response) for response in group.responses],
            "corrections": [
                {
                    "target": correction.target,
                    "kind": _kind(group, correction),
                    "leaks": correction.reference_leakage,
                }
                for correction in group.corrections
            ],
        }
        for group in groups
    ]


def group_of_step(number: int, step: RecordedStep, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a group with its tokens, and the lines that explain its advantages."""
    vocabulary, group = _Vocabulary(tokenizer), step.groups[number]
    trained, prompt_ids = step.trained, group.prompt.token_ids
    content = {
        "prompt": vocabulary.turns(prompt_ids) or [("prompt", group.prompt.text)],
        "question": group.prompt.text,
        "label": group.prompt.label,
        "task": group.prompt.task,
        "index": group.prompt.index,
        "metadata": json.dumps(group.prompt.metadata, default=str) if group.prompt.metadata else "",
        "responses": [
            _response(response, vocabulary, trained.get((number, "response", index)))
            | {
                "asked": None
                if np.array_equal(response.prompt_token_ids, prompt_ids)
                else vocabulary.prompt(response)
            }
            | {"lines": _lines(step, number, "responses", index)}
            for index, response in enumerate(group.responses)
        ],
        "corrections": [
            _correction(group, correction, vocabulary, trained.get((number, "correction", index)))
            | {"lines": _lines(step, number, "corrections", index)}
            for index, correction in enumerate(group.corrections)
        ],
    }
    return content | {"vocabulary": vocabulary.texts}


def _lines(step: RecordedStep, number: int, kind: str, index: int) -> list[list[Any]]:
    """Return the lines that explain a sample's advantage, [name, value, sum, note]; none without a record."""
    if number >= len(step.explanations):
        return []
    samples: list[SampleExplanation] = getattr(step.explanations[number], kind)
    return [[line.name, line.value, line.sum, line.note] for line in samples[index].lines]


def matches(groups: Sequence[Group], text: str, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Return (group, response) of each response that contains the text, ignoring case, in itself, in its
    prompt or in its correction."""
    folded = text.casefold()

    def holds(ids: TokenIds) -> bool:
        return folded in tokenizer.decode(ids).casefold()

    places = []
    for number, group in enumerate(groups):
        if folded in group.prompt.text.casefold():
            places += [(number, index) for index in range(len(group.responses))]
            continue
        targets = {c.target for c in group.corrections if holds(c.response.token_ids)}
        places += [
            (number, index)
            for index, response in enumerate(group.responses)
            if index in targets or holds(response.token_ids)
        ]
    return places


def _outcome(response: Sample) -> dict[str, Any]:
    return {
        "reward": response.reward,
        "correct": response.correct,
        "error": response.reward_error is not None,
        "truncated": response.finish_reason == "length",
        "length": len(response.token_ids),
    }


def _kind(group: Group, correction: Correction) -> str:
    if not correction.response.correct:
        target_ids = group.responses[correction.target].content_ids
        return "no-op" if np.array_equal(target_ids, correction.response.content_ids) else "failed"
    return "rewritten" if correction.rewritten else "corrected"


def _correction(
    group: Group, correction: Correction, vocabulary: "_Vocabulary", trained: Trained | None
) -> dict[str, Any]:
    target_ids = group.responses[correction.target].content_ids
    return {name: getattr(correction, name) for name in _OF_CORRECTION} | {
        "kind": _kind(group, correction),
        "leaks": correction.reference_leakage,
        "prompt": vocabulary.prompt(correction.response),
        "ops": opcodes(target_ids, correction.response.content_ids),
        "response": _response(correction.response, vocabulary, trained),
    }


def _response(response: Sample, vocabulary: "_Vocabulary", trained: Trained | None) -> dict[str, Any]:
    fields = {
        "tokens": vocabulary.numbers(response.token_ids),
        **_outcome(response),
        "error": response.reward_error,
        "details": response.reward_details,
        "versions": response.versions,
        "temperature": response.temperature,
        "mask": None if response.loss_mask.all() else response.loss_mask.astype(int).tolist(),
        "sampled": _rounded(response.logprobs),
    }
    if trained is None:
        return fields
    return fields | {
        "advantage": trained.advantage,
        "weight": trained.weight,
        "weights": _rounded(trained.token_weights),
        "advantages": _rounded(trained.token_advantages),
        "values": _rounded(trained.values),
        "old": _rounded(trained.old_logprobs),
        "new": _rounded(trained.new_logprobs),
    }


def _rounded(values: np.ndarray | None) -> list[float] | None:
    return None if values is None else [round(value, 5) for value in values.tolist()]


class _Vocabulary:
    """A numbering of a group's different tokens in order of appearance, with their texts."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._numbers: dict[tuple[str, bool], int] = {}
        self._alone: dict[int, str] = {}
        self.texts: list[tuple[str, bool]] = []
        """(text, special)"""
        # ids of ChatML's marks, if the tokenizer has each as one token
        marks = [tokenizer.encode(mark) for mark in ("<|im_start|>", "<|im_end|>")]
        self._marks = tuple(mark[0] if len(mark) == 1 else None for mark in marks)

    def text(self, ids: TokenIds) -> str:
        return self._tokenizer.decode(ids)

    def numbers(self, ids: TokenIds) -> list[int]:
        """Return the number of each token's text. A character of several tokens is at the first."""
        tokens = ids.tolist()
        texts = [self._text_alone(token) for token in tokens]
        for start in range(len(texts)):
            for end in range(start + 2, min(len(texts), start + _LONGEST_CHARACTER) + 1):
                if "\ufffd" not in texts[start]:
                    break
                if "\ufffd" not in (text := self._tokenizer.decode(tokens[start:end])):
                    texts[start:end] = [text] + [""] * (end - start - 1)
        return [self._number(text, token) for text, token in zip(texts, tokens, strict=True)]

    def prompt(self, sample: Sample) -> list[tuple[str, str]]:
        """Return the prompt that a sample was drawn from, as turns or as one text."""
        prompt_ids = sample.prompt_token_ids
        return self.turns(prompt_ids) or [("prompt", self.text(prompt_ids))]

    def turns(self, ids: TokenIds) -> list[tuple[str, str]]:
        """Return (role, text) of a chat in ChatML; empty for any other prompt."""
        opening, _ = self._marks
        tokens = ids.tolist()
        if opening is None or opening not in tokens:
            return []
        starts = [place for place, token in enumerate(tokens) if token == opening]
        turns = [("prompt", self.text(ids[: starts[0]]))] if starts[0] else []
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            role, _, text = self.text(ids[start + 1 : end]).partition("\n")
            turns.append((role, text.rstrip("\n")))
        return turns

    def _text_alone(self, token: int) -> str:
        if token not in self._alone:
            self._alone[token] = self._tokenizer.decode([token])
        return self._alone[token]

    def _number(self, text: str, token: int) -> int:
        special = not text and not self._text_alone(token)
        if special:
            text = "⟨end⟩" if token == self._tokenizer.eos_id else f"⟨{token}⟩"
        key = (text, special)
        if key not in self._numbers:
            self._numbers[key] = len(self.texts)
            self.texts.append(key)
        return self._numbers[key]


_SAMPLES = samples_path(Path(), "").name


@dataclass
class Problem:
    """All samples of one prompt."""

    prompt: str
    """End of the prompt."""
    label: str
    identity: str
    places: list[int] = field(default_factory=list)
    """Offset in the file at which the line of each sample begins."""
    outcomes: list[dict[str, Any]] = field(default_factory=list)


def sample_files(directory: Path) -> dict[str, Path]:
    """Return set → file of its samples."""
    return {path.name.removesuffix(_SAMPLES): path for path in sorted(directory.glob("*" + _SAMPLES))}


def read_problems(path: Path) -> list[Problem]:
    """Return the problems of a set, in order; an unfinished last line is left out. Raises ValueError: a line
    is not a sample; the text names it."""
    problems: dict[int, Problem] = {}
    check_user_file(path)
    with path.open("rb") as file:
        place = 0
        for number, line in enumerate(finished_lines(file, path), start=1):
            sample = _sample(line, f"{path}, line {number}")
            problem = problems.setdefault(
                sample["prompt_index"],
                Problem(sample["prompt"][-_PROMPT_END:], str(sample["label"]), str(sample.get("id", ""))),
            )
            problem.places.append(place)
            problem.outcomes.append(_stored_outcome(sample))
            place += len(line)
    return [problems[index] for index in sorted(problems)]


def index_of_set(problems: list[Problem]) -> list[dict[str, Any]]:
    """Return the data for the table of problems and the filters."""
    return [
        {
            "prompt": problem.prompt,
            "label": problem.label,
            "skipped_pairs": 0,
            "responses": problem.outcomes,
            "corrections": [],
        }
        for problem in problems
    ]


def group_of_set(path: Path, problem: Problem) -> dict[str, Any]:
    """Return a problem with the text of every sample. Raises ValueError if the file has changed and a line is
    no longer a sample."""
    samples = list(_samples_of(path, problem))
    prompt = samples[0]["prompt"]
    return {
        "prompt": [["prompt", prompt]],
        "question": prompt,
        "label": problem.label,
        "task": problem.identity,
        "responses": [
            _stored_outcome(sample)
            | {"text": sample["text"], "error": sample.get("error"), "answer": sample.get("answer")}
            | {"details": _numbers(sample.get("details"))}
            for sample in samples
        ],
        "corrections": [],
        "vocabulary": [],
    }


def matching_samples(path: Path, problems: list[Problem], text: str) -> list[tuple[int, int]]:
    """Return (problem, sample) of each sample that contains the text, ignoring case, or whose prompt does."""
    folded_text = text.casefold()
    return [
        (number, index)
        for number, problem in enumerate(problems)
        for index, sample in enumerate(_samples_of(path, problem))
        if folded_text in sample["text"].casefold() or folded_text in sample["prompt"].casefold()
    ]


def _samples_of(path: Path, problem: Problem) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for place in problem.places:
            file.seek(place)
            yield _sample(file.readline(), f"{path}, byte {place}")


def results_of(directory: Path) -> tuple[str, str, dict[str, dict[str, Any]]]:
    """Return (status, policy, set → "measures" (name → number), "intervals" (name → [low, high]) and "notes")
    of an evaluation; an unfinished set's are empty. Raises ValueError if its file does not hold results."""
    content = read_results(directory)
    try:
        sets = {str(name): _set(entry) for name, entry in content.get("sets", {}).items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{directory / RESULTS_FILE}: not the results of an evaluation: {error!r:.200}"
        ) from error
    return str(content.get("status", "")), str(content.get("policy", "")), sets


def _set(entry: dict[str, Any]) -> dict[str, Any]:
    intervals = {name: [low, high] for name, (low, high) in entry.get("intervals", {}).items()}
    if not all(is_number(bound) for bounds in intervals.values() for bound in bounds if bound is not None):
        raise ValueError("intervals must be numbers")
    return {
        "measures": _numbers(entry.get("measures")),
        "intervals": intervals,
        "notes": [str(note) for note in entry.get("notes", [])],
    }


def _sample(line: bytes, location: str) -> dict[str, Any]:
    try:
        sample = read_json(line)
    except ValueError as error:
        raise ValueError(f"{location}: not JSON: {error}") from error
    if (
        not isinstance(sample, dict)
        or type(sample.get("prompt_index")) is not int
        or not all(isinstance(sample.get(name), str) for name in ("prompt", "text"))
        or not (sample.get("reward") is None or is_number(sample["reward"]))
        or "label" not in sample
    ):
        raise ValueError(f"{location}: not a sample of an evaluation: {shown(sample)}")
    return sample


def _stored_outcome(sample: dict[str, Any]) -> dict[str, Any]:
    length = sample.get("num_tokens")
    return {
        "reward": sample.get("reward"),
        "correct": bool(sample.get("correct")),
        "error": sample.get("error") is not None,
        "truncated": sample.get("finish_reason") == "length",
        "length": length if is_number(length) else None,
        "name": f"{sample.get('kind', 'sampled')} {sample.get('number', '')}".strip(),
    }


def _numbers(details: Any) -> dict[str, float]:
    return {str(k): v for k, v in details.items() if is_number(v)} if isinstance(details, dict) else {}
