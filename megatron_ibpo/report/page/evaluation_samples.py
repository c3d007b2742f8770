"""The samples of an evaluation's set as the page shows them: its problems as groups.

Samples are read by their place in the file, so that a set of any size takes only its table's memory.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.record_lines import finished_lines
from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.basics.text import shown
from megatron_ibpo.basics.user_files import check_user_file
from megatron_ibpo.evaluate.stored_samples import RESULTS_FILE, read_results, samples_path
from megatron_ibpo.report.metrics_log import is_number

_SAMPLES = samples_path(Path(), "").name
_PROMPT_END = 160
"""Characters of a prompt's end in the table of problems."""


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
    """Return the problems of a set, in order; an unfinished last line is left out.

    Raises:
        ValueError: a line is not a sample; the text names it.
    """
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
            problem.outcomes.append(_outcome(sample))
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
    """Return a problem with the text of every sample.

    Raises:
        ValueError: the file has changed and a line is no longer a sample.
    """
    samples = []
    with path.open("rb") as file:
        for place in problem.places:
            file.seek(place)
            samples.append(_sample(file.readline(), f"{path}, byte {place}"))
    prompt = samples[0]["prompt"]
    return {
        "prompt": [["prompt", prompt]],
        "question": prompt,
        "label": problem.label,
        "task": problem.identity,
        "responses": [
            _outcome(sample)
            | {"text": sample["text"], "error": sample.get("error"), "answer": sample.get("answer")}
            | {"details": _numbers(sample.get("details"))}
            for sample in samples
        ],
        "corrections": [],
        "vocabulary": [],
    }


def matching_samples(path: Path, problems: list[Problem], text: str) -> list[tuple[int, int]]:
    """Return (problem, sample) of each sample that contains the text, ignoring case, in itself or in its
    prompt."""
    folded_text = text.casefold()
    matches = []
    with path.open("rb") as file:
        for number, problem in enumerate(problems):
            for index, place in enumerate(problem.places):
                file.seek(place)
                sample = _sample(file.readline(), f"{path}, byte {place}")
                if folded_text in sample["text"].casefold() or folded_text in sample["prompt"].casefold():
                    matches.append((number, index))
    return matches


@dataclass(frozen=True)
class Results:
    """The content of results.json."""

    status: str
    policy: str
    sets: dict[str, dict[str, Any]]
    """Set → "measures" (name → number), "intervals" (name → [low, high]), "notes" (texts)."""


def results_of(directory: Path) -> Results:
    """Return the results of an evaluation; an unfinished set's are empty.

    Raises:
        ValueError: its file does not hold results.
    """
    content = read_results(directory)
    try:
        sets = {str(name): _set(entry) for name, entry in content.get("sets", {}).items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{directory / RESULTS_FILE}: not the results of an evaluation: {error!r:.200}"
        ) from error
    return Results(str(content.get("status", "")), str(content.get("policy", "")), sets)


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


def _outcome(sample: dict[str, Any]) -> dict[str, Any]:
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
