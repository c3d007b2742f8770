"""The records of a step as readable JSON, and back.

Token ids come with their text, which is for readers and is not read back. Floats are written so that reading
gives the same bits; tuples and lists in a prompt's metadata keep their types.

Samples of a few steps are kept by default, so that the page of a run has responses to read. Training
cannot be repeated from them: only the first groups of a large step are kept.
"""

import base64
import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from json.encoder import encode_basestring, encode_basestring_ascii
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ibpo.basics.records import (
    Correction,
    ExpertIds,
    Floats,
    Group,
    Prompt,
    Sample,
    TokenIds,
    TrainSequence,
    Weights,
    token_ids,
)
from megatron_ibpo.basics.reward_value import LARGEST_REWARD
from megatron_ibpo.basics.sampling_mask import decoded_mask, encoded_mask
from megatron_ibpo.basics.text import shown
from megatron_ibpo.basics.user_files import RECORD_BYTES, read_user_file
from megatron_ibpo.credit.explanation import GroupExplanation, Line, SampleExplanation
from megatron_ibpo.report.run_dir import write_whole

_FORMAT = 2
_HALF = re.compile("[\ud800-\udfff]")
_READABLE_FORMATS = (1, 2)
"""Format 1 has one policy version per response, no loss mask and no index; a correction's prompt was next to
it."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """Advantage and weight used to train on a response or correction."""

    advantage: float
    weight: float
    token_weights: Weights | None
    """None: all ones."""
    token_advantages: Weights | None
    """None: `advantage` for every token."""
    old_logprobs: Floats | None
    """The trainer's log-probs before the update."""
    new_logprobs: Floats | None
    """The trainer's log-probs after it."""
    values: Floats | None = None
    """The critic's value before each token; None without a critic."""


@dataclasses.dataclass(frozen=True)
class RecordedStep:
    """The content of a step's file."""

    step: int
    groups: list[Group]
    trained: dict[tuple[int, str, int], Trained]
    """Training data of each sample, by (group, "response" or "correction", index in the group). Samples left
    out of training have none, and it is empty for recordings that do not hold it."""
    explanations: list[GroupExplanation]
    """How each advantage came about, group by group; empty for recordings of version 0.2 and before."""


def rollout_path(directory: Path, step: int) -> Path:
    """Return the path of a step's records."""
    return directory / f"step_{step:06d}.json"


def save_groups(
    path: Path,
    step: int,
    groups: Sequence[Group],
    decode: Callable[[TokenIds], str],
    sequences: Sequence[TrainSequence] = (),
    *,
    old_logprobs: Sequence[Floats] | None = None,
    new_logprobs: Sequence[Floats] | None = None,
    explanations: Sequence[GroupExplanation] = (),
) -> None:
    """Write the groups of a step with corrections and rewards, and what was trained on.

    Args:
        explanations: of every group; empty for none.
        old_logprobs, new_logprobs: the trainer's log-probs of each sequence, before and after the update.

    Raises:
        TypeError: a prompt's metadata holds what JSON cannot keep.
    """
    content = {
        "format": _FORMAT,
        "step": step,
        "groups": [_group_to_json(group, decode) for group in groups],
        "trained": _trained_to_json(sequences, old_logprobs, new_logprobs),
        "explanations": [_explanation_to_json(explanation) for explanation in explanations],
    }
    # a lone surrogate, which a prompt or a message may hold, can be in UTF-8 only as an escape
    text = _HALF.sub(lambda match: f"\\u{ord(match[0]):04x}", _readable(content))
    write_whole(path, text + "\n")


def load_step(path: Path) -> RecordedStep:
    """Return a step as it was saved, by this version or the ones before it. Raises ValueError if the file is
    missing or is not what `save_groups` writes."""
    try:
        text = read_user_file(path, RECORD_BYTES)
    except OSError as error:
        raise ValueError(f"recorded rollouts {path}: {error.strerror}") from error
    try:
        return _step_from_json(json.loads(text))  # including infinities, which a record may hold
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"recorded rollouts {path}: not a file of --save-debug-rollout-data: {shown(error)}"
        ) from error


def _step_from_json(content: dict[str, Any]) -> RecordedStep:
    if content["format"] not in _READABLE_FORMATS:
        raise ValueError(f"format {content['format']}, expected one of {_READABLE_FORMATS}")
    groups = [_group_from_json(item) for item in content["groups"]]
    trained = {
        (item["group"], item["kind"], item["index"]): Trained(
            item["advantage"],
            item["weight"],
            _array(item["token_weights"], np.float64),
            _array(item.get("token_advantages"), np.float64),
            _array(item["old_logprobs"], np.float32),
            _array(item["new_logprobs"], np.float32),
            _array(item.get("values"), np.float32),
        )
        for item in content.get("trained", [])
    }
    explanations = [_explanation_from_json(item) for item in content.get("explanations", [])]
    return RecordedStep(content["step"], groups, trained, explanations)


def _trained_to_json(
    sequences: Sequence[TrainSequence],
    old_logprobs: Sequence[Floats] | None,
    new_logprobs: Sequence[Floats] | None,
) -> list[dict[str, Any]]:
    nothing = [None] * len(sequences)
    return [
        {
            "group": sequence.group,
            "kind": sequence.kind,
            "index": sequence.index,
            "advantage": sequence.advantage,
            "weight": sequence.weight,
            "token_weights": _list(sequence.token_weights),
            "token_advantages": _list(sequence.token_advantages),
            "old_logprobs": _list(old),
            "new_logprobs": _list(new),
        }
        | ({} if sequence.values is None else {"values": _list(sequence.values)})
        for sequence, old, new in zip(
            sequences, old_logprobs or nothing, new_logprobs or nothing, strict=True
        )
    ]


def _explanation_to_json(explanation: GroupExplanation) -> dict[str, Any]:
    """Return the lines of every sample of a group, each as [name, value, sum, note]."""

    def lines(samples: Sequence[SampleExplanation]) -> list[list[list[Any]]]:
        return [
            [[line.name, _plain(line.value), line.sum, line.note] for line in sample.lines]
            for sample in samples
        ]

    return {"responses": lines(explanation.responses), "corrections": lines(explanation.corrections)}


def _plain(value: Any) -> str | float | None:
    """Return a line's value, which a user's operator may have given as a number of numpy."""
    return value if value is None or isinstance(value, str) else float(value)


def _explanation_from_json(item: dict[str, Any]) -> GroupExplanation:
    def samples(stored: list[list[list[Any]]]) -> list[SampleExplanation]:
        return [SampleExplanation([_line(*line) for line in lines]) for lines in stored]

    return GroupExplanation(samples(item["responses"]), samples(item["corrections"]))


def _line(name: str, value: Any, total: str, note: str) -> Line:
    if not all(isinstance(text, str) for text in (name, total, note)):
        raise ValueError(f"a line of an explanation is not text: {shown([name, total, note])}")
    return Line(name, _plain(value), total, note)


def _group_to_json(group: Group, decode: Callable[[TokenIds], str]) -> dict[str, Any]:
    prompt = {"decoded": decode(group.prompt.token_ids)} | _fields(group.prompt)
    prompt["metadata"] = _tagged(group.prompt.metadata)
    return {
        "prompt": prompt,
        "responses": [_sample_to_json(sample, decode, group.prompt.token_ids) for sample in group.responses],
        "corrections": [
            {"prompt_decoded": decode(correction.response.prompt_token_ids)}
            | _fields(correction)
            | {"response": _sample_to_json(correction.response, decode, group.prompt.token_ids)}
            for correction in group.corrections
        ],
        "skipped_pairs": group.skipped_pairs,
    }


def _group_from_json(item: dict[str, Any]) -> Group:
    prompt = _without(item["prompt"], "decoded")
    prompt["token_ids"] = token_ids(prompt["token_ids"])
    prompt["metadata"] = _untagged(prompt["metadata"])
    corrections = []
    for index, stored in enumerate(item["corrections"]):
        correction = _without(stored, "prompt_decoded")
        prompt_ids = token_ids(correction.pop("prompt_token_ids", prompt["token_ids"]))  # format 1
        correction["references"] = tuple(correction["references"])
        correction["response"] = _sample_from_json(correction["response"], index, prompt_ids)
        corrections.append(Correction(**correction))
    responses = [
        _sample_from_json(sample, index, prompt["token_ids"])
        for index, sample in enumerate(item["responses"])
    ]
    return Group(Prompt(**prompt), responses, corrections, item["skipped_pairs"])


def _sample_to_json(
    sample: Sample, decode: Callable[[TokenIds], str], usual_prompt: TokenIds
) -> dict[str, Any]:
    """Return a sample as JSON, without defaults: the group's own prompt, a mask of nothing, no details."""
    content = {"decoded": decode(sample.token_ids)} | _fields(sample)
    if sample.routed_experts is not None:
        content["routed_experts"] = _packed(sample.routed_experts)
    if sample.sampling_mask is not None:
        packed = encoded_mask(sample.sampling_mask, sample.token_ids)
        content["sampling_mask"] = base64.b64encode(packed).decode("ascii")
    if not any(sample.drafts):
        content["drafts"] = None
    if np.array_equal(sample.prompt_token_ids, usual_prompt):
        content["prompt_token_ids"] = None
    if sample.loss_mask.all():
        content["loss_mask"] = None
    content["reward_details"] = sample.reward_details or None
    return {name: value for name, value in content.items() if value is not None or name not in _LEFT_OUT}


_LEFT_OUT = ("routed_experts", "sampling_mask", "drafts", "reward_details")
"""Fields of a sample that are left out where they hold nothing."""


def _sample_from_json(item: dict[str, Any], index: int, usual_prompt: TokenIds) -> Sample:
    sample = _without(item, "decoded")
    if "policy_version" in sample:  # format 1
        sample["versions"] = ((0, sample.pop("policy_version")),)
    if "routed_experts" in sample:
        sample["routed_experts"] = _unpacked(**sample["routed_experts"])
    own_prompt, mask = sample.get("prompt_token_ids"), sample.get("loss_mask")
    sample["prompt_token_ids"] = usual_prompt if own_prompt is None else token_ids(own_prompt)
    sample["token_ids"] = token_ids(sample["token_ids"])
    if "sampling_mask" in sample:
        packed = base64.b64decode(sample["sampling_mask"], validate=True)
        sample["sampling_mask"] = decoded_mask(packed, sample["token_ids"])
    sample["logprobs"] = np.asarray(sample["logprobs"], np.float32)
    sample["loss_mask"] = np.ones(len(sample["token_ids"]), bool) if mask is None else np.asarray(mask, bool)
    sample["versions"] = tuple((first, version) for first, version in sample["versions"])
    drafted, accepted = sample.get("drafts", (0, 0))
    sample["drafts"] = (int(drafted), int(accepted))
    numbers = [sample["reward"] or 0.0, *sample.get("reward_details", {}).values()]
    if not all(abs(number) <= LARGEST_REWARD for number in numbers):
        raise ValueError(f"a reward or a detail of one is larger than {LARGEST_REWARD:g}: {numbers}")
    return Sample(**{"index": index} | sample)


def _packed(ids: ExpertIds) -> dict[str, Any]:
    """Return ids as text with 4/3 characters per byte: users do not read that many numbers."""
    text = base64.b64encode(ids.tobytes()).decode("ascii")
    return {"dtype": ids.dtype.str, "shape": list(ids.shape), "base64_text": text}


def _unpacked(dtype: str, shape: list[int], base64_text: str) -> ExpertIds:
    return np.frombuffer(base64.b64decode(base64_text), np.dtype(dtype)).reshape(shape).copy()


def _fields(record: Any) -> dict[str, Any]:
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {name: _list(value) if isinstance(value, np.ndarray) else value for name, value in values.items()}


def _list(values: np.ndarray | None) -> list[Any] | None:
    return None if values is None else values.tolist()


def _array(values: list[Any] | None, dtype: type) -> Any:
    return None if values is None else np.asarray(values, dtype)


def _without(item: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != key}


def _tagged(value: Any) -> Any:
    """Return metadata in which values that JSON would change are tagged: tuples, dictionaries of other keys
    than text."""
    if isinstance(value, tuple):
        return {"(tuple)": [_tagged(item) for item in value]}
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and not value.keys() & {"(tuple)", "(dict)"}:
            return {key: _tagged(item) for key, item in value.items()}
        return {"(dict)": [[_tagged(key), _tagged(item)] for key, item in value.items()]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"prompt metadata holds a {type(value).__name__}, which cannot be recorded: {value!r}")


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"(tuple)"}:
            return tuple(_untagged(item) for item in value["(tuple)"])
        if value.keys() == {"(dict)"}:
            return {_untagged(key): _untagged(item) for key, item in value["(dict)"]}
        return {key: _untagged(item) for key, item in value.items()}
    return value


def _readable(value: Any, indent: str = "") -> str:
    """Return JSON with one line per field and per list of numbers."""
    if (encode := _SCALARS.get(type(value))) is not None:
        return encode(value)
    deeper = indent + "  "
    if isinstance(value, dict) and value:
        lines = [
            f"{deeper}{encode_basestring_ascii(key)}: {_readable(item, deeper)}"
            for key, item in value.items()
        ]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        return "[\n" + ",\n".join(deeper + _readable(item, deeper) for item in value) + f"\n{indent}]"
    return _encoded(value)


_encoded = json.JSONEncoder(ensure_ascii=False).encode
"""json.dumps with these settings, which would make a new encoder for each value."""
_SCALARS: dict[type, Callable[[Any], str]] = {
    str: encode_basestring,
    int: int.__repr__,
    type(None): lambda _: "null",
}
"""Type → the same text as `_encoded` for values of it, most of a record, in a tenth of the time."""


SAMPLES = "samples"
"""Name of the folder in a run's directory."""
TOKENS_PER_STEP = 50_000
"""Tokens of a step after which no further group is kept; some 4 MB."""


def is_recorded_step(step: int, num_steps: int, count: int) -> bool:
    """Return whether the samples of a step are kept: the first step, the last, and others evenly between.

    Args:
        step: counted from 1.
        num_steps: planned steps of the run.
        count: most steps to keep.
    """
    last = max(1, count - 1)
    return step in {1 + round(number * (num_steps - 1) / last) for number in range(count)}


def keep_samples(
    run_dir: Path,
    step: int,
    groups: Sequence[Group],
    decode: Callable[[TokenIds], str],
    sequences: Sequence[TrainSequence],
    explanations: Sequence[GroupExplanation] = (),
) -> None:
    """Write the first groups of a step with what was trained on and why, without the choices of routers and
    sampling masks. Raises TypeError if a prompt's metadata holds what JSON cannot keep."""
    first = _first_groups(groups)
    trained = [sequence for sequence in sequences if sequence.group < len(first)]
    path = rollout_path(run_dir / SAMPLES, step)
    save_groups(path, step, first, decode, trained, explanations=explanations[: len(first)])


def _first_groups(groups: Sequence[Group]) -> list[Group]:
    first_groups: list[Group] = []
    tokens = 0
    for group in groups:
        if tokens >= TOKENS_PER_STEP:
            break
        tokens += sum(len(sample.prompt_token_ids) + len(sample.token_ids) for sample in group.samples)
        corrections = [
            replace(correction, response=_without_engine_records(correction.response))
            for correction in group.corrections
        ]
        responses = list(map(_without_engine_records, group.responses))
        first_groups.append(replace(group, responses=responses, corrections=corrections))
    return first_groups


def _without_engine_records(sample: Sample) -> Sample:
    return replace(sample, routed_experts=None, sampling_mask=None)
