"""The held-out problems that a policy solved, kept for each evaluation, so that runs can be compared by
problem."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_ibpo.evaluate import EvalSample, SetEvaluation
from megatron_ibpo.report.run_dir import write_whole


def outcomes_path(run_dir: Path, step: int, name: str = "") -> Path:
    """Return the path of the outcomes of the evaluation after `step` steps.

    Args:
        name: the set's name, if sets have names.
    """
    return run_dir / "evaluations" / name / f"step_{step:06d}.json"


def save_outcomes(run_dir: Path, step: int, evaluated: Sequence[SetEvaluation]) -> None:
    """Write the outcomes of every set."""
    (run_dir / "evaluations").mkdir(exist_ok=True)
    for set_evaluation in evaluated:
        path = outcomes_path(run_dir, step, set_evaluation.set.name if set_evaluation.set.is_named else "")
        write_whole(path, json.dumps({"step": step, "problems": _problems(set_evaluation.samples)}) + "\n")


def _problems(samples: Sequence[EvalSample]) -> dict[str, dict[str, list[int | None]]]:
    """Return 1 (correct), 0 (wrong) or null (the verifier failed) for each response, by problem; sampled and
    greedy ones are separate."""
    problems: dict[str, dict[str, list[int | None]]] = {}
    for sample in samples:
        outcomes = problems.setdefault(str(sample.prompt_index), {"sampled": [], "greedy": []})
        if sample.kind != "correction":
            outcomes[sample.kind].append(None if sample.reward is None else int(sample.correct))
    return problems


def load_outcomes(path: Path) -> dict[int, float]:
    """Return problem → share of its sampled responses that were correct; NaN if the verifier failed on all.

    Raises:
        ValueError: the file is missing or is not what `save_outcomes` writes.
    """
    try:
        problems = json.loads(path.read_text(encoding="utf-8"))["problems"]
        return {int(index): _share(outcomes["sampled"]) for index, outcomes in problems.items()}
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: holds no outcomes of an evaluation: {error!r:.200}") from error


def _share(outcomes: Sequence[int | None]) -> float:
    scored: npt.NDArray[np.float64] = np.array([outcome for outcome in outcomes if outcome is not None])
    return float(scored.mean()) if scored.size else float("nan")
