"""Plain fields of a row in any of the layouts of existing data sets.

ours            {"prompt": text or messages, "label": text or number, "task", "metadata", "rm_type", "id"}
of RL data sets {"prompt": messages, "reward_model": {"ground_truth": …}, "data_source", "extra_info"}
                (verl's, DAPO-Math-17k)
of others       see LAYOUTS; only with the default --input-key and --label-key, for rows without these fields
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_ibpo.basics.strict_json import json_value, read_json
from megatron_ibpo.basics.text import listed
from megatron_ibpo.data.tables import Row
from megatron_ibpo.data.tokenizer import DataError, Message
from megatron_ibpo.rewards.response import final_boxes

COLUMNS = ("task", "metadata", "rm_type", "id", "reward_model", "data_source", "extra_info")
"""Columns that may be read besides question and label."""
MEDIA = ("images", "image", "videos", "video", "audios", "audio", "multi_modal_data")
"""Columns with a part of the question that is no text; only an empty value is accepted."""
PLACEHOLDER = re.compile(
    r"\A\s*<(?:image|video|audio)>|<(?:image|video|audio)>\s*\Z|<\|(?:image|video|vision|audio)_\w+\|>"
)
"""Text that stands for a picture, a film or a sound: at an end of a question, or as models' own tokens."""
PLAIN_KEYS = ("prompt", "label")
"""The default --input-key and --label-key."""

_KINDS: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "text or a list of messages": (str, list),
    "text or a number": (str, int, float),
    "an object": (dict,),
}


@dataclass(frozen=True)
class Layout:
    """The fields of a known data set."""

    question: str
    """Field with the question."""
    answer: str
    """Field with the ground truth, alone or at the end of a solution."""
    label: Callable[[Any], Any]
    """Returns the label for the value of that field."""
    description: str
    """Description of where the labels are, for notes."""


def _after_hashes(answer: Any) -> Any:
    """Return the result at the end of a solution of GSM8K, as a number without separators of thousands; an
    answer without one as it is."""
    if not isinstance(answer, str) or "####" not in answer:
        return answer
    return answer.rpartition("####")[2].strip().replace(",", "")


def _in_box(solution: Any) -> Any:
    r"""Return the content of the last \boxed{} of a solution."""
    boxes = final_boxes(solution) if isinstance(solution, str) else []
    if not boxes:
        raise DataError(r"field 'solution' has no \boxed{} with an answer")
    return ",".join(boxes)


def _unchanged(answer: Any) -> Any:
    return answer


def _unless_missing(answer: Any) -> Any:
    """Return an answer of NuminaMath, which has these words where there is none."""
    if answer in ("notfound", "proof"):
        raise DataError(
            f"field 'answer' is {answer!r}, NuminaMath's word for a problem without an answer; "
            "--skip-bad-rows leaves such rows out"
        )
    return answer


LAYOUTS = (
    Layout("question", "answer", _after_hashes, "answer, of which the part after #### (GSM8K)"),
    Layout("problem", "answer", _unless_missing, "answer (OpenR1-Math, NuminaMath-1.5, MATH-500)"),
    Layout("problem", "solution", _in_box, r"the last \boxed{} of solution (NuminaMath)"),
    Layout("messages", "label", _unchanged, "label"),
    Layout("messages", "answer", _unchanged, "answer"),
)
"""Layouts of known data sets, in the order in which they are tried."""
_OF_LAYOUTS = {name for layout in LAYOUTS for name in (layout.question, layout.answer)}


@dataclass(frozen=True)
class PlainRow:
    """The fields of a row, checked."""

    input_key: str
    """Field with the question."""
    messages: Sequence[Message]
    is_chat: bool
    """True if the row has chat messages, False for one text."""
    label: str
    task: str | None
    metadata: dict[str, Any]
    """Metadata, with `rm_type` and `id` if the row has them."""
    has_list_of_numbers: bool = False
    """True if the label is a list of several numbers, and no text."""


def plain_row(row: Row, input_key: str, label_key: str) -> PlainRow:
    """Return the row's fields, whatever its layout. Raises DataError, which names the field, if one is
    missing, empty or of another type."""
    check_text_only(row)
    label_field, task_field, metadata_field = label_key, "task", "metadata"
    if (truth := _ground_truth(row, label_key)) is not None:
        if truth["ground_truth"] is None:
            raise DataError("field 'reward_model' has no ground_truth")
        row = {**row, label_key: truth["ground_truth"]}
        label_field = "reward_model.ground_truth"
        task_field = "task" if row.get("task") else "data_source"
        metadata_field = "metadata" if row.get("metadata") else "extra_info"
    elif (layout := known_layout(row, input_key, label_key)) is not None:
        input_key = layout.question
        label_field = label_key = layout.answer
        row = {**row, label_key: layout.label(row[label_key])}
    elif label_key not in row and row.get("reward_model") is not None:
        raise DataError("field 'reward_model' must be an object with ground_truth, which is the label")
    _check_keys(row, {input_key: "--input-key", label_key: "--label-key"})
    question = checked(row[input_key], input_key, "text or a list of messages")
    label = _without_arrays(row[label_key])
    is_structure = isinstance(label, list | dict)
    if not is_structure:
        checked(label, label_field, "text or a number")
    elif not label:
        raise DataError(f"field {label_field!r} is empty")
    metadata = _plain_value(_optional(row, metadata_field, "an object") or {})
    for name in ("rm_type", "id"):
        kind = "text" if name == "rm_type" else "text or a number"
        if (value := _optional(row, name, kind)) is not None:
            metadata[name] = value
    return PlainRow(
        input_key,
        as_messages(question, input_key),
        isinstance(question, list),
        json.dumps(_plain_value(label), ensure_ascii=False) if is_structure else str(label),
        _optional(row, task_field, "text"),
        metadata,
        has_list_of_numbers=_num_numbers(label) > 1,
    )


def check_text_only(row: Row) -> None:
    """Raise DataError for a row with pictures, films or sounds: the policy would be trained to guess."""
    for name in MEDIA:
        if not _is_empty(row.get(name)):
            raise DataError(
                f"field {name!r} holds a part of the question that is no text, and policies read text alone; "
                "--skip-bad-rows leaves such rows out"
            )


def check_placeholders(messages: Iterable[Message], input_key: str) -> None:
    """Raise DataError for text that stands for a picture, a film or a sound."""
    for message in messages:
        if message["role"] == "user" and (match := PLACEHOLDER.search(message["content"])) is not None:
            raise DataError(
                f"field {input_key!r} has {match[0].strip()} in place of a part of the question, and "
                "policies read text alone; --skip-bad-rows leaves such rows out"
            )


def _is_empty(value: Any) -> bool:
    """Return whether a column holds nothing: null, or a list or object of nothing."""
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    if isinstance(value, list | tuple | np.ndarray):
        return all(map(_is_empty, value))
    return value is None or value == "" or value == b""


def _ground_truth(row: Row, label_key: str) -> dict[str, Any] | None:
    """Return the object `reward_model` of a row, in which RL data sets have the ground truth, perhaps as JSON
    text; None in other layouts."""
    truth = row.get("reward_model")
    if label_key in row or not isinstance(truth, dict | str):
        return None
    if isinstance(truth, str):
        with suppress(ValueError):
            truth = read_json(truth)
    return truth if isinstance(truth, dict) and "ground_truth" in truth else None


def known_layout(row: Row, input_key: str, label_key: str) -> Layout | None:
    """Return the layout of a known data set that a row has; None for a row with plain fields, and where the
    user names the fields."""
    if (input_key, label_key) != PLAIN_KEYS or all(key in row for key in PLAIN_KEYS):
        return None
    return next((layout for layout in LAYOUTS if layout.question in row and layout.answer in row), None)


def layout_said(row: Row, input_key: str, label_key: str) -> str | None:
    """Return the line to print about the layout of a row; None for plain fields."""
    layout = known_layout(row, input_key, label_key)
    if _ground_truth(row, label_key) is not None:
        return "the layout of RL data sets; labels are reward_model.ground_truth"
    if layout is None:
        return None
    return f"a known layout: prompts are {layout.question}, labels {layout.description}"


def fields_read(input_key: str, label_key: str) -> set[str]:
    """Return the fields of a row that may be read."""
    layout_fields = _OF_LAYOUTS if (input_key, label_key) == PLAIN_KEYS else set()
    return {input_key, label_key, *COLUMNS, *MEDIA, *layout_fields}


def has_value(row: Row, field: str, value: str) -> bool:
    """Return whether the field has the value, compared as text; dots in its name lead into objects."""
    field_value: Any = row
    for name in field.split("."):
        field_value = field_value.get(name) if isinstance(field_value, dict) else None
    return str(field_value) == value


def _check_keys(row: Row, flags: Mapping[str, str]) -> None:
    """Refuse a row without these fields, and name the flag of each that is missing."""
    missing = [key for key in flags if key not in row]
    if not missing:
        return
    present = listed([repr(name)[:60] for name in row], most=20)
    flag_names = " and ".join(flags[key] for key in missing)
    many = len(missing) > 1
    raise DataError(
        f"no field {' and no field '.join(map(repr, missing))} (found: {present or 'none'}); "
        f"{flag_names} {'name others' if many else 'names another'}"
    )


def _optional(row: Row, key: str, kind: str) -> Any:
    """Return row[key] if present; the columns of a table are always present but may be null."""
    return None if row.get(key) is None else checked(row[key], key, kind)


def checked(value: Any, key: str, kind: str) -> Any:
    """Return the value of a field. Raises DataError if it is empty or not of this kind (`_KINDS`)."""
    if not isinstance(value, _KINDS[kind]) or isinstance(value, bool):
        raise DataError(f"field {key!r} must be {kind}, found {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"field {key!r} must be {kind}, is {value}")
    if isinstance(value, str | list) and not value:
        raise DataError(f"field {key!r} is empty")
    return value


def as_messages(question: str | list[Any], input_key: str) -> list[Message]:
    """Return a question as chat messages: a text is the user's. Raises DataError for a message without a role
    or content."""
    if isinstance(question, str):
        return [{"role": "user", "content": question}]
    for number, message in enumerate(question):
        keys = ("role", "content")
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in keys):
            raise DataError(f"field {input_key!r}, message {number}: needs text under 'role' and 'content'")
    return question


def _without_arrays(value: Any) -> Any:
    """Return a value with lists and Python's numbers in place of NumPy's, and lists in place of tuples."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _without_arrays(item) for key, item in value.items()}
    return [_without_arrays(item) for item in value] if isinstance(value, list | tuple) else value


def _num_numbers(label: Any) -> float:
    """Return how many numbers there are in a list, or in lists in it; -inf with anything else in them."""
    if not isinstance(label, list):
        return -math.inf
    return sum(
        1 if isinstance(item, int | float) and not isinstance(item, bool) else _num_numbers(item)
        for item in label
    )


def _plain_value(value: Any) -> Any:
    """Return a value that JSON can hold."""
    try:
        return json_value(value)
    except ValueError as error:
        raise DataError(f"a field {error}") from None
