"""Verifier of generated tasks: reasoning_gym's own scorer of the task."""

import functools
import json
from typing import Any

import reasoning_gym

from megatron_ibpo.basics.reward_value import RESPONSE_ERROR, ResponseError
from megatron_ibpo.rewards.final_answer import final_boxes, final_part
from megatron_ibpo.rewards.limits import cpu_limit, in_batches

CHECK_S = 2.0
"""Seconds of processor time that one response may take, see `megatron_ibpo.rewards.math`."""
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
_MARK_IN_ANSWERS = frozenset({"ab"})
"""Tasks whose answers contain `#`, which elsewhere comes before an answer."""
_NO_ANSWERS = ("I do not know", "")


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
    before, closed, _ = text.rpartition("</answer>")
    _, opened, content = before.rpartition("<answer>")
    return content.partition("</answer>")[0] if closed and opened else None


def judged(prompt: str, response: str, label: str, metadata: dict[str, Any]) -> Any:
    """Return 1 if the task's scorer gives the answer full marks, else 0.

    Part marks (a right digit, a right format) are left out: in a group of wrong answers they alone would make
    up the advantage. An answer on which the scorer fails is wrong, unless the scorer fails on the label as
    well.

    Raises:
        ValueError: the prompt does not come from reasoning_gym.
        whatever the scorer raises on the label.
    """
    if "source_dataset" not in metadata:
        raise ValueError("the prompt is not a reasoning_gym item (no source_dataset in its metadata)")
    answer = extract_answer(response, metadata)
    if answer is None:
        if label.strip():
            return 0.0
        answer = ""  # then the empty answer is right, as now and then in ab
    try:
        return float(_has_full_marks(answer, prompt, label, metadata))
    except ResponseError:
        return {"score": 0.0, RESPONSE_ERROR: 1.0}
    except Exception:
        _has_full_marks(label, prompt, label, metadata)
        return {"score": 0.0, RESPONSE_ERROR: 1.0}


score = in_batches(judged)


def label_problem(label: str, metadata: dict[str, Any]) -> str | None:
    """Return why an item cannot be graded: its own answer does not get full marks, or a wrong one does."""
    name = metadata.get("source_dataset")
    if name is None:
        return "it is no item of reasoning_gym; use the --rm-type that grades it, such as math"
    if name in UNGRADABLE:
        return f"reasoning_gym's {name} cannot be graded: {UNGRADABLE[name]}"
    for answer in (label, *_NO_ANSWERS):
        try:
            found = judged(metadata.get("question", ""), answer, label, metadata)
        except Exception as error:
            return f"reasoning_gym's scorer of {name} fails on {answer!r}: {type(error).__name__}: {error}"
        is_right = (found if isinstance(found, float) else found["score"]) == 1
        if is_right != (answer.strip() == label.strip()):
            return f"reasoning_gym's scorer of {name} finds {answer!r} {'right' if is_right else 'wrong'}"
    return None


def _has_full_marks(answer: str, prompt: str, label: str, metadata: dict[str, Any]) -> bool:
    """
    Raises:
        ResponseError: scoring takes too long.
        whatever the scorer raises on an answer that it cannot take.
    """
    parameters = json.dumps(metadata.get("parameters", {}), sort_keys=True)
    dataset = _dataset(metadata["source_dataset"], parameters)
    entry = {"question": metadata.get("question", prompt), "answer": label, "metadata": metadata}
    with cpu_limit(CHECK_S):
        return bool(dataset.score_answer(answer, entry) >= 1.0)


@functools.lru_cache(maxsize=64)
def _dataset(name: str, parameters: str) -> Any:
    # one item: some tasks make them all when they are opened
    return reasoning_gym.create_dataset(name, seed=0, size=1, **json.loads(parameters))
