"""results.json: the results of an evaluation, by set and by problem."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.evaluate.accuracy import unknown_as_nan
from megatron_ibpo.evaluate.eval_sample import problem_id
from megatron_ibpo.evaluate.pass_at_k import interval_over_prompts
from megatron_ibpo.evaluate.sets import SetEvaluation
from megatron_ibpo.evaluate.stored_samples import FINISHED, UNFINISHED, read_results, write_results


def finish_results(
    directory: Path, evaluated: Sequence[SetEvaluation], more: dict[str, Any]
) -> dict[str, Any]:
    """Write the results of these sets beside existing results of others, and return all of them.

    Args:
        more: entries beside the sets, such as seconds.
    """
    content = read_results(directory)
    for one in evaluated:
        content["sets"][one.set.name] |= results_of_set(one)
    finished = all("measures" in entry for entry in content["sets"].values())
    content |= {"status": FINISHED if finished else UNFINISHED, **more}
    write_results(directory, content)
    return content


def results_of_set(one: SetEvaluation) -> dict[str, Any]:
    """Return the entries of one set. measures: as in the metrics log. intervals: 95 %, for each measure that
    is a mean over problems. problems: id, digest of question and label, and each such measure's value for
    every problem, in order."""
    evaluation = one.evaluation
    intervals = {
        name: interval_over_prompts(unknown_as_nan(values))
        for name, values in evaluation.by_prompt.items()
        if any(value is not None for value in values)
    }
    intervals["accuracy"] = (evaluation.accuracy_low, evaluation.accuracy_high)
    return {
        "measures": evaluation.metrics(),
        "intervals": {name: list(bounds) for name, bounds in intervals.items()},
        "problems": {
            "id": [problem_id(prompt) for prompt in one.set.prompts],
            "digest": [_digest(prompt) for prompt in one.set.prompts],
            **evaluation.by_prompt,
        },
        "notes": list(one.set.notes),
    }


def _digest(prompt: Prompt) -> str:
    text = f"{prompt.text}\0{prompt.label}".encode(errors="replace")
    return hashlib.blake2b(text, digest_size=8).hexdigest()
