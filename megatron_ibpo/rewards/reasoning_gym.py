"""Verifier of generated tasks: reasoning_gym's own scorer of the task, in the sandbox of `scorer_sandbox`."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ibpo.basics.reward_value import WRONG, LabelError
from megatron_ibpo.basics.text import shown
from megatron_ibpo.config import nearest
from megatron_ibpo.rewards.response import final_boxes, final_part
from megatron_ibpo.rewards.sandbox import SandboxError
from megatron_ibpo.rewards.scorer_sandbox import (
    GRADABLE,
    Task,
    Verdict,
    is_expression,
    judge_answers,
    open_scorers,
    unfit_row,
)

UNGRADABLE = {
    "boxnet": "its items have no answer (None), and its scorer gives marks for parts of a plan",
    "composite": "it is a mixture of other tasks, which must be named",
    "game_of_life_halting": "its scorer gives full marks to whatever is written",
    "graph_color": "its items have no answer (None), and no known answer gets full marks from its scorer",
    "propositional_logic": "its items have no answer (None), and its scorer gives marks for parts",
    "rubiks_cube": "its items have no answer (None), and no known answer gets full marks from its scorer",
    "rush_hour": "its items have no answer (None), and no known answer gets full marks from its scorer",
}
"""Tasks that cannot be graded whatever their parameters, with the reason."""
_MARK_IN_ANSWERS = ("ab",)
"""Tasks whose answers contain `#`, which elsewhere comes before an answer."""
_NO_ANSWERS = ("I do not know", "")
_FAULTS = ("raised", "ended")
"""Verdicts on an answer that the scorer fails on."""


def extract_answer(response: str, metadata: dict[str, Any] | None = None) -> str | None:
    r"""Return the text after the last `#`, as in worked solutions that end in `#15`; without one, the whole
    response. Within that, the last `<answer>` or `\boxed{}` counts if there is one. None if nothing is
    left."""
    final = final_part(response)
    if (metadata or {}).get("source_dataset") not in _MARK_IN_ANSWERS:
        final = final.rpartition("#")[2]
    if (tagged := _tagged(final)) is not None:
        final = tagged
    elif boxes := final_boxes(final):
        final = ", ".join(boxes)
    return final.strip() or None


def _tagged(text: str) -> str | None:
    """Return the content of the last `<answer>…</answer>`; None without one."""
    through_last_answer, closed, _ = text.rpartition("</answer>")
    _, opened, content = through_last_answer.rpartition("<answer>")
    return content.partition("</answer>")[0] if closed and opened else None


@dataclass(frozen=True)
class _Item:
    """An item of a task, as a prompt has it."""

    task: Task
    label: str
    entry: dict[str, Any]

    @classmethod
    def from_row(cls, prompt: str, label: str, metadata: dict[str, Any]) -> _Item:
        """Return the item of a prompt. Raises LabelError if it is none whose scorer may run."""
        name, parameters = metadata.get("source_dataset"), metadata.get("parameters", {})
        if name is None:
            raise LabelError("it is no item of reasoning_gym; use the --rm-type that grades it, such as math")
        if not isinstance(name, str) or not isinstance(parameters, dict):
            raise LabelError("the name of its task must be text, and its parameters a mapping")
        if name in UNGRADABLE:
            raise LabelError(f"reasoning_gym's {name} cannot be graded: {UNGRADABLE[name]}")
        if name not in GRADABLE:
            raise LabelError(f"reasoning_gym has no task {shown(name)}{nearest(name, GRADABLE)}")
        if (problem := unfit_row(name, label, metadata)) is not None:
            raise LabelError(problem)
        entry = {"question": metadata.get("question", prompt), "answer": label, "metadata": metadata}
        return cls(Task(name, pickle.dumps(parameters)), label, entry)


def score(
    prompts: Sequence[str],
    responses: Sequence[str],
    labels: Sequence[str],
    metadata: Sequence[dict[str, Any]],
) -> list[Any]:
    """Return 1 for each response to which the task's scorer gives full marks, else 0.

    Part marks (a right digit, a right format) are left out: in a group of wrong answers they alone would make
    up the advantage. An answer on which the scorer fails is wrong, unless the scorer fails on the label as
    well. An answer that the scorer would evaluate is wrong if it is more than an expression of the task.
    Raises LabelError for a prompt that does not come from reasoning_gym, or on whose label the scorer fails,
    and SandboxError if the scorer cannot run here.
    """
    items = [_Item.from_row(*row) for row in zip(prompts, labels, metadata, strict=True)]
    extracted = [extract_answer(*pair) for pair in zip(responses, metadata, strict=True)]
    return _graded(items, extracted)


score.batched = True  # type: ignore[attr-defined]
score.prepare_worker = open_scorers  # type: ignore[attr-defined]


def label_problem(label: str, metadata: dict[str, Any]) -> str | None:
    """Return why an item cannot be graded: its own answer does not get full marks, or a wrong one does."""
    responses = (label, *_NO_ANSWERS)
    try:
        item = _Item.from_row("", label, metadata)
        extracted = [extract_answer(response, metadata) for response in responses]
        values = _graded([item] * len(responses), extracted, checks_labels=True)
    except (LabelError, SandboxError) as error:
        return str(error)
    for response, value in zip(responses, values, strict=True):
        if (value == 1.0) != (response.strip() == label.strip()):
            name, finding = metadata["source_dataset"], "right" if value == 1.0 else "wrong"
            return f"reasoning_gym's scorer of {name} finds {shown(response)} {finding}"
    return None


def _graded(
    items: Sequence[_Item], extracted: Sequence[str | None], *, checks_labels: bool = False
) -> list[Any]:
    """Return the values of `score` for answers to items. With `checks_labels`, the scorer also judges an
    answer that is the label, whatever an answer may be."""
    values: list[Any] = [0.0] * len(items)
    gradable = []
    for place, (item, answer) in enumerate(zip(items, extracted, strict=True)):
        if answer is None and item.label.strip():
            continue  # elsewhere the empty answer is right, as now and then in ab
        if (checks_labels and answer == item.label) or is_expression(item.task.name, answer or ""):
            gradable.append((place, item, answer or ""))
        else:
            values[place] = WRONG
    failed = []
    verdicts = _judge([(item, answer) for _, item, answer in gradable])
    for (place, item, _), verdict in zip(gradable, verdicts, strict=True):
        if verdict.kind == "right":
            values[place] = 1.0
        elif verdict.kind in _FAULTS:
            values[place] = WRONG
            failed.append(item)
    for item, verdict in zip(failed, _judge([(item, item.label) for item in failed]), strict=True):
        if verdict.kind in _FAULTS:
            raise LabelError(
                f"reasoning_gym's scorer of {item.task.name} fails on {shown(item.label)}: {verdict.reason}"
            )
    return values


def _judge(pairs: Sequence[tuple[_Item, str]]) -> list[Verdict]:
    """Return the verdict on each answer to an item."""
    places_of: dict[Task, list[int]] = {}
    for place, (item, _) in enumerate(pairs):
        places_of.setdefault(item.task, []).append(place)
    verdicts: dict[int, Verdict] = {}
    for task, places in places_of.items():
        attempts = [(pairs[place][1], pairs[place][0].entry) for place in places]
        verdicts |= zip(places, judge_answers(task, attempts), strict=True)
    for place, (item, _) in enumerate(pairs):
        kind, reason = verdicts[place].kind, verdicts[place].reason
        if kind == "unfit":
            raise LabelError(f"reasoning_gym's {item.task.name} cannot be made: {reason}")
        if kind == "silent":
            raise SandboxError(f"reasoning_gym's scorer of {item.task.name}: {reason}")
    return [verdicts[place] for place in range(len(pairs))]
