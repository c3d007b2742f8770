"""Verifier of generated tasks: reasoning_gym's own scorer of the task."""

import functools
import json
from typing import Any

import reasoning_gym


def extract_answer(response: str) -> str:
    """What follows the last `#`, as worked solutions end in `#15`; the whole response if there is none."""
    return response.rpartition("#")[2].strip()


def score(prompt: str, response: str, label: str, metadata: dict[str, Any]) -> float:
    """1 if the task's scorer gives the answer full marks, else 0.

    Part marks (a right digit, a right format) are left out: in a group of wrong answers they would be all
    that the advantage is made of.

    Raises:
        ValueError: the prompt does not come from reasoning_gym.
        whatever the scorer raises on an answer that it cannot take.
    """
    if "source_dataset" not in metadata:
        raise ValueError("the prompt is no reasoning_gym item (no source_dataset in its metadata)")
    parameters = json.dumps(metadata.get("parameters", {}), sort_keys=True)
    entry = {"question": metadata.get("question", prompt), "answer": label, "metadata": metadata}
    marks = _dataset(metadata["source_dataset"], parameters).score_answer(extract_answer(response), entry)
    return 1.0 if marks >= 1.0 else 0.0


@functools.lru_cache(maxsize=64)
def _dataset(name: str, parameters: str) -> Any:
    return reasoning_gym.create_dataset(name, seed=0, **json.loads(parameters))
