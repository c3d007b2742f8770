"""The records of a step as readable JSON, and back.

Token ids stand beside their text; the text is for readers and is not read back. Floats are written so that
reading gives the same bits, tuples and lists stay what they were.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_ibpo.records import Correction, Group, Prompt, Response, TrainSequence

__all__ = ["Trained", "load_groups", "load_trained", "rollout_path", "save_groups"]

_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Trained:
    """What training made of one response or correction."""

    advantage: float
    weight: float
    token_weights: list[float] | None
    """None: all ones."""
    old_logprobs: list[float] | None
    """The trainer's, before the update."""
    new_logprobs: list[float] | None
    """The trainer's, after it."""


def rollout_path(directory: Path, step: int) -> Path:
    """Where the records of a step are kept."""
    return directory / f"step_{step:06d}.json"


def save_groups(
    path: Path,
    step: int,
    groups: Sequence[Group],
    decode: Callable[[Sequence[int]], str],
    sequences: Sequence[TrainSequence] = (),
) -> None:
    """Write the groups of a step, corrections and rewards included, and what was trained on of them.

    Raises:
        TypeError: a prompt's metadata holds what JSON cannot keep.
    """
    content = {
        "format": _FORMAT,
        "step": step,
        "groups": [_group_to_json(group, decode) for group in groups],
        "trained": _trained_to_json(groups, sequences),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(_readable(content) + "\n", encoding="utf-8")
    unfinished.replace(path)


def load_groups(path: Path) -> tuple[int, list[Group]]:
    """(step, groups) as they were saved.

    Raises:
        ValueError: the file is missing or is not what `save_groups` writes.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']}, expected {_FORMAT}")
        return content["step"], [_group_from_json(item) for item in content["groups"]]
    except OSError as error:
        raise ValueError(f"recorded rollouts {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"recorded rollouts {path}: not a file of --save-debug-rollout-data: {error!r}"
        ) from error


def load_trained(path: Path) -> dict[tuple[int, str, int], Trained]:
    """(group, "response" or "correction", place in the group) → what was trained on. Those left out of
    training are missing, and all of them in recordings that hold none.

    Raises:
        ValueError: the file is missing or is not what `save_groups` writes.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {
            (item["group"], item["kind"], item["index"]): Trained(
                **{name: item[name] for name in Trained.__dataclass_fields__}
            )
            for item in content.get("trained", [])
        }
    except OSError as error:
        raise ValueError(f"recorded rollouts {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"recorded rollouts {path}: not a file of --save-debug-rollout-data: {error!r}"
        ) from error


def _trained_to_json(groups: Sequence[Group], sequences: Sequence[TrainSequence]) -> list[dict[str, Any]]:
    """Each sequence beside the place of what it was made of: they come in order, some left out."""
    items = []
    places = {kind: [_taken(group, kind) for group in groups] for kind in ("response", "correction")}
    for sequence in sequences:
        place = places[sequence.kind][sequence.group]
        index = next(i for i, ids in place if ids == sequence.response_token_ids)
        kept = {name: getattr(sequence, name) for name in Trained.__dataclass_fields__}
        items.append({"group": sequence.group, "kind": sequence.kind, "index": index, **kept})
    return items


def _taken(group: Group, kind: str) -> Iterator[tuple[int, tuple[int, ...]]]:
    responses = group.responses if kind == "response" else [c.response for c in group.corrections]
    return ((i, tuple(response.token_ids)) for i, response in enumerate(responses))


def _group_to_json(group: Group, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    prompt = {"decoded": decode(group.prompt.token_ids)} | _fields(group.prompt)
    prompt["metadata"] = _tagged(group.prompt.metadata)
    return {
        "prompt": prompt,
        "responses": [_response_to_json(response, decode) for response in group.responses],
        "corrections": [
            {"prompt_decoded": decode(correction.prompt_token_ids)}
            | _fields(correction)
            | {"response": _response_to_json(correction.response, decode)}
            for correction in group.corrections
        ],
        "skipped_pairs": group.skipped_pairs,
    }


def _group_from_json(item: dict[str, Any]) -> Group:
    prompt = _without(item["prompt"], "decoded")
    prompt["token_ids"] = tuple(prompt["token_ids"])
    prompt["metadata"] = _untagged(prompt["metadata"])
    corrections = []
    for stored in item["corrections"]:
        correction = _without(stored, "prompt_decoded")
        correction["references"] = tuple(correction["references"])
        correction["prompt_token_ids"] = tuple(correction["prompt_token_ids"])
        correction["response"] = _response_from_json(correction["response"])
        corrections.append(Correction(**correction))
    responses = [_response_from_json(response) for response in item["responses"]]
    return Group(Prompt(**prompt), responses, corrections, item["skipped_pairs"])


def _response_from_json(item: dict[str, Any]) -> Response:
    response = _without(item, "decoded")
    own_prompt = response.get("prompt_token_ids")
    response["prompt_token_ids"] = None if own_prompt is None else tuple(own_prompt)
    for name in ("token_ids", "logprobs"):
        response[name] = tuple(response[name])
    return Response(**response)


def _response_to_json(response: Response, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    return {"decoded": decode(response.token_ids)} | _fields(response)


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _without(item: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != key}


def _tagged(value: Any) -> Any:
    """Metadata with what JSON would change (tuples, dictionaries by other than text) under a tag."""
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
    """JSON with one line for each field and each list of numbers."""
    deeper = indent + "  "
    if isinstance(value, dict) and value:
        lines = [f"{deeper}{json.dumps(key)}: {_readable(item, deeper)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return "[\n" + ",\n".join(deeper + _readable(item, deeper) for item in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)
