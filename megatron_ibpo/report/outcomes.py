"""Which held-out problems a policy solved: kept for each evaluation, so that runs can be compared problem by
problem."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_ibpo.records import Prompt, Sample
from megatron_ibpo.report.run_dir import write_whole


def outcomes_path(run_dir: Path, step: int) -> Path:
    """Where the outcomes of the evaluation after `step` steps are kept."""
    return run_dir / "evaluations" / f"step_{step:06d}.json"


def save_outcomes(path: Path, step: int, pairs: Sequence[tuple[Prompt, Sample]]) -> None:
    """Write 1 (correct), 0 (wrong) or null (the verifier failed) for each scored response, by problem;
    sampled and greedy ones apart."""
    problems: dict[int, dict[str, list[int | None]]] = {}
    for prompt, response in pairs:
        kept = problems.setdefault(prompt.index, {"sampled": [], "greedy": []})
        outcome = None if response.reward is None else int(response.correct)
        kept["greedy" if response.temperature == 0 else "sampled"].append(outcome)
    content = {"step": step, "problems": {str(index): kept for index, kept in problems.items()}}
    write_whole(path, json.dumps(content) + "\n")


def load_outcomes(path: Path) -> dict[int, float]:
    """Problem → share of its sampled responses that were correct; NaN where the verifier failed on all.

    Raises:
        ValueError: the file is missing or is not what `save_outcomes` writes.
    """
    try:
        problems = json.loads(path.read_text(encoding="utf-8"))["problems"]
        return {int(index): _share(kept["sampled"]) for index, kept in problems.items()}
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: holds no outcomes of an evaluation: {error!r}") from error


def _share(outcomes: Sequence[int | None]) -> float:
    known: npt.NDArray[np.float64] = np.array([outcome for outcome in outcomes if outcome is not None])
    return float(known.mean()) if known.size else float("nan")
