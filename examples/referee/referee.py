"""Judge methods on frozen policies before anybody trains, and test the verdicts by short training.

    python examples/referee/referee.py record STUDY --save RECORDS
    python examples/referee/referee.py judge STUDY --save RECORDS --add my=my.yaml
    python examples/referee/referee.py predict STUDY --save RECORDS --bursts BURSTS
    python examples/referee/referee.py check BURSTS

`record` continues where it was stopped. Run it from the root of the repository.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from frozen_policy import FrozenPolicy, Space, open_space
from gradient_records import Compass, PromptRecord, load, make_compass, packed, record_prompts, save, unpacked
from method_verdicts import CURRENCIES, Verdict, judge, measure
from sequence_gradients import transformers_gradients
from training_bursts import check_bursts, write_bursts

from megatron_ibpo.basics.compiler_stand_ins import stand_in_for_compiler
from megatron_ibpo.basics.entry_point import guarded
from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.study.plan import Study, Task
from megatron_ibpo.study.study_files import read_study

SIZES = (4, 8)
"""Group sizes at which each method is judged."""
PROMPTS_AT_ONCE = 10
STRATA = {"none of 4 right": (0, 0), "1 or 2": (1, 2), "3 or 4": (3, 4)}
"""Difficulty of a prompt by further responses to it: name → least and most right ones."""

StudyFile = Annotated[Path, tyro.conf.Positional]
Names = tyro.conf.UseAppendAction[tuple[str, ...]]


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
            _prompt_at(space), policy.answers, gradients, num_star=star, num_scores=scores, longest=longest
        )
        save(compass_path, compass.tensors() | {"seconds": time.process_time() - started})
    content = load(compass_path)
    compass = Compass(content["star"], content["scores"], content["spread"])
    for place, path in enumerate(paths):
        if path.exists():
            continue
        started = time.process_time()
        batch = space.prompts.batch(place * PROMPTS_AT_ONCE, PROMPTS_AT_ONCE)
        records = record_prompts(batch, list(space.contenders.values()), policy.answers, gradients, compass)
        spent = time.process_time() - started
        save(path, {"prompts": [packed(each) for each in records], "seconds": spent})
        print(f"{task.name}: {path.stem}, {spent:.1f} s of processor time", flush=True)


def _prompt_at(space: Space) -> Any:
    def prompt_at(index: int) -> Prompt:
        return space.prompts.batch(index, 1)[0]

    return prompt_at


# ----------------------------------------------------------------------------------------------- verdicts


def verdicts(study: Study, directory: Path, metric: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (task, what the records say about it and about each method) for each task with records."""
    for task in study.tasks:
        paths = sorted((directory / task.name).glob("prompts_*.pt"))
        if not paths:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            space = open_space(study, task, SIZES, Path(scratch))
        contents = [load(path) for path in paths]
        records = [unpacked(each, _prompt_at(space)) for content in contents for each in content["prompts"]]
        compass = load(directory / task.name / "compass.pt")
        star_scores = (compass["star"] @ compass["scores"].T).double().numpy()
        seconds = compass["seconds"] + sum(content["seconds"] for content in contents)
        measures = {name: measure(each, records) for name, each in space.contenders.items()}
        right = np.array([sum(each.probes) for each in records])
        strata = {
            name: np.flatnonzero((right >= least) & (right <= most)) for name, (least, most) in STRATA.items()
        }
        methods: dict[str, dict[str, Any]] = {}
        for name, own in measures.items():
            baseline = measures[f"{study.baseline}@{name.rpartition('@')[2]}"]
            methods[name] = {"verdict": judge(own, baseline, star_scores, metric)}
            methods[name]["operations"] = {c: float(own.cost[i].mean()) for i, c in enumerate(CURRENCIES)}
            methods[name]["strata"] = {
                stratum: judge(own.only(places), baseline.only(places), star_scores, metric).efficiency[
                    "free"
                ]
                for stratum, places in strata.items()
                if len(places) > 20
            }
        yield (
            task.name,
            {
                "prompts": len(records),
                "solves": float(np.mean([np.mean(each.probes) for each in records])),
                "corrections_succeed": _correction_success(records),
                "core_seconds": seconds,
                "strata": {stratum: len(places) for stratum, places in strata.items()},
                "methods": methods,
            },
        )


def _correction_success(records: Sequence[PromptRecord]) -> float:
    """Return the share of right samples among those asked for under other prompts than the plain one."""
    outcomes = [
        sample.correct
        for each in records
        for sample in each.samples.values()
        if len(sample.prompt_token_ids) != len(each.prompt.token_ids)
    ]
    return float(np.mean(outcomes)) if outcomes else float("nan")


def judge_methods(
    study: StudyFile, save: Path, task: Names = (), add: Names = (), metric: str = "adam"
) -> None:
    """Print the page of the referee: one table for each policy and group size.

    Args:
        study: the study that was recorded.
        save: directory of the records.
        task: a task to judge; may be repeated. Default: all with records.
        add: a further method, NAME=RECIPE; may be repeated.
        metric: update by "plain" gradients or by those over "adam"'s divisor.
    """
    named = dict(text.split("=", 1) for text in add)
    for name, cell in verdicts(read_study([study], add=named, tasks=task), save, metric):
        print(page(name, cell))


def page(task: str, cell: dict[str, Any]) -> str:
    """Return a policy's tables in Markdown."""
    lines = [
        f"## {task}",
        "",
        f"{cell['prompts']} prompts; solves {cell['solves']:.3f}, corrections succeed "
        f"{cell['corrections_succeed']:.3f}; {cell['core_seconds'] / 3600:.2f} core-hours.",
    ]
    for size in SIZES:
        lines += [
            "",
            f"| G = {size} | S | V | V, Euclid | cosine | " + " | ".join(CURRENCIES) + " |",
            "|---" * 8 + "|",
        ]
        for name, entry in cell["methods"].items():
            method, _, of_size = name.rpartition("@")
            if int(of_size) == size:
                lines.append(f"| {method} | {_row(entry['verdict'])} |")
    return "\n".join([*lines, ""])


def _row(verdict: Verdict) -> str:
    efficiency = [verdict.efficiency[currency] for currency in CURRENCIES]
    signs = [verdict.signal, verdict.noise, verdict.euclidean_noise, verdict.cosine, *efficiency]
    return " | ".join(f"{each.value:.2f} [{each.low:.2f}, {each.high:.2f}]" for each in signs)


def predict(
    study: StudyFile, save: Path, bursts: Path, metric: str = "adam", steps: int = 12, responses: int = 64
) -> None:
    """Write what the referee predicts, and the studies of short training that test it.

    Args:
        study: the study that was recorded.
        save: directory of the records.
        bursts: directory for predictions.json and one study for each policy and group size.
        metric: as in `judge`.
        steps: steps of each method; larger costs of a method are met by fewer prompts in each.
        responses: number of responses in a step of the baseline.
    """
    read = read_study([study])
    cells = dict(verdicts(read, save, metric))
    plain = json.loads(json.dumps(cells, default=asdict))
    write_bursts(read, plain, bursts, steps=steps, responses=responses)


def check(bursts: tyro.conf.Positional[Path]) -> None:
    """Compare the predictions with the bursts that have been run.

    Args:
        bursts: directory that `predict` wrote and `ibpo compare` filled.
    """
    print(check_bursts(bursts))


def main() -> int:
    stand_in_for_compiler()
    commands = {"record": record, "judge": judge_methods, "predict": predict, "check": check}
    tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
