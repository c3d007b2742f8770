"""Judge methods on frozen policies before anybody trains, and test the verdicts by short training.

    python examples/referee/referee.py record STUDY --save RECORDS
    python examples/referee/referee.py judge STUDY --save RECORDS --add my=my.yaml
    python examples/referee/referee.py predict STUDY --save RECORDS --bursts BURSTS
    python examples/referee/referee.py check BURSTS

`record` continues where it was stopped. Run it from the root of the repository.
"""

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from frozen_policy import FrozenPolicy, open_space
from gradient_records import Compass, load, make_compass, packed, record_prompts
from gradient_records import save as save_file
from referee_page import SIZES, judge_tasks, page
from sequence_gradients import transformers_gradients
from training_bursts import check_bursts, write_bursts

from megatron_ibpo.basics.entry_point import guarded
from megatron_ibpo.study.plan import Study, Task
from megatron_ibpo.study.study_files import read_study

PROMPTS_AT_ONCE = 10
"""Prompts of a file, which are lost if `record` is stopped."""

Metric = Literal["plain", "adam"]
StudyFile = Annotated[Path, tyro.conf.Positional]
Names = tyro.conf.UseAppendAction[tuple[str, ...]]
_TRAINED = ("gspo", "wrong-weight", "ibpo", "ibpo-shaping-only", "plain-prompt", "plain-prompt-gated")
"""Methods that are trained by default; the study's others are coefficients on the same gradients."""


def record(
    study: StudyFile, save: Path, task: Names = (), prompts: int = 400, star: int = 480, scores: int = 128
) -> None:
    """Record the policies of a study.

    Args:
        study: a file of `ibpo compare`; each of its tasks is a policy.
        save: directory for the records, one below for each task.
        task: a task to record; may be repeated. Default: all.
        prompts: number of prompts to measure.
        star: number of prompts for the gradient of accuracy.
        scores: number of plain responses in which KL is measured.
    """
    torch.set_num_threads(1)
    read = read_study([study], tasks=task)
    for each in read.tasks:
        with ExitStack() as stack:
            _record_task(read, each, save / each.name, stack, (prompts, star, scores))


def _record_task(
    study: Study, task: Task, directory: Path, stack: ExitStack, sizes: tuple[int, int, int]
) -> None:
    prompts, star, scores = sizes
    paths = [directory / f"prompts_{first:05d}.pt" for first in range(0, prompts, PROMPTS_AT_ONCE)]
    if all(path.exists() for path in paths):
        return
    directory.mkdir(parents=True, exist_ok=True)
    space = open_space(study, task, SIZES, directory)
    policy, gradients = FrozenPolicy(space, stack), transformers_gradients(space.foundation.hf_dir)
    compass_path = directory / "compass.pt"
    if not compass_path.exists():
        started = time.process_time()
        longest = space.config.rollout.rollout_max_response_len
        compass = make_compass(
            space.prompts.at, policy.answers, gradients, num_star=star, num_scores=scores, longest=longest
        )
        save_file(compass_path, compass.content() | {"seconds": time.process_time() - started})
    content = load(compass_path)
    compass = Compass(content["star"], content["scores"], content["spread"], content["num_prompts"])
    require_prompts(task, space.prompts.num_prompts(), compass.num_prompts + prompts)
    for place, path in enumerate(paths):
        if path.exists():
            continue
        started = time.process_time()
        batch = [space.prompts.at(position) for position in measured_positions(compass, place)]
        records = record_prompts(batch, list(space.contenders.values()), policy.answers, gradients, compass)
        spent = time.process_time() - started
        save_file(path, {"prompts": [packed(each) for each in records], "seconds": spent})
        print(f"{task.name}: {path.stem}, {spent:.1f} s of processor time", flush=True)


def measured_positions(compass: Compass, file: int) -> range:
    """Return the places in the task of the prompts that a file of records holds, files counted from 0."""
    first = compass.num_prompts + file * PROMPTS_AT_ONCE
    return range(first, first + PROMPTS_AT_ONCE)


def require_prompts(task: Task, num_prompts: int, num_needed: int) -> None:
    """Refuse a task whose prompts would serve twice: g* must come from other prompts than those measured."""
    if 0 < num_prompts < num_needed:
        raise ValueError(
            f"task {task.name}: has {num_prompts} prompts before they repeat, and {num_needed} different "
            "ones are needed; lower --prompts, --star or --scores"
        )


def judge_methods(
    study: StudyFile,
    save: Path,
    task: Names = (),
    add: Names = (),
    metric: Metric = "adam",
    json_file: Path | None = None,
) -> None:
    """Print the page of the referee: tables for each policy and group size.

    Args:
        study: the study that was recorded.
        save: directory of the records.
        task: a task to judge; may be repeated. Default: all with records.
        add: a further method, NAME=RECIPE; may be repeated.
        metric: update by "plain" gradients or by those over "adam"'s divisor.
        json_file: file for all figures.
    """
    named = dict(text.split("=", 1) for text in add)
    cells: dict[str, Any] = {}
    for name, cell in judge_tasks(read_study([study], add=named, tasks=task), save, metric):
        cells[name] = cell
        print(page(name, cell), flush=True)
    if json_file is not None:
        json_file.write_text(json.dumps(cells), encoding="utf-8")


def predict(
    study: StudyFile,
    save: Path,
    bursts: Path,
    metric: Metric = "adam",
    train: tuple[str, ...] = _TRAINED,
    seeds: tuple[int, ...] = (0, 1),
    steps: int = 12,
    responses: int = 64,
) -> None:
    """Write what the referee predicts, and the studies of short training that test it.

    Args:
        study: the study that was recorded.
        save: directory of the records.
        bursts: directory for predictions.json and one study for each policy and group size.
        metric: as in `judge`.
        train: methods to train, the study's baseline first.
        seeds: seeds of each method.
        steps: steps of each method; larger costs of a method are met by fewer prompts in each.
        responses: number of responses in a step of the baseline.
    """
    read = read_study([study])
    cells = dict(judge_tasks(read, save, metric))
    write_bursts(read, cells, bursts, trained=train, seeds=seeds, steps=steps, responses=responses)


def check(bursts: tyro.conf.Positional[Path]) -> None:
    """Compare the predictions with the bursts that have been run.

    Args:
        bursts: directory that `predict` wrote and `ibpo compare` filled.
    """
    print(check_bursts(bursts))


def main() -> int:
    commands: dict[str, Any] = {"record": record, "judge": judge_methods, "predict": predict, "check": check}
    tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
