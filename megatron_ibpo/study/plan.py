"""A study (several methods, several seeds, one budget, one task or several) as the list of its runs.

Each run gets its own recipe, written next to its directory.

A grid whose best value is the last of its axis is extended there, in the ratio of the last two values. If the
best stays the last, it is taken and marked: no claim is made about a method, or against a baseline, tuned so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import yaml

from megatron_ibpo.config import Config, ConfigError, config_yaml, path_of_user
from megatron_ibpo.credit import find_operator
from megatron_ibpo.run.settings import check_run, doubtful_settings, parse_config

Settings = dict[str, Any]
"""Recipe keys and their values."""


Phase = Literal["tuning", "pilot", "main", "confirmation"]

OTHER_TEMPERATURES = [0.6]
"""Temperatures for evaluation besides --eval-temperature, unless the study sets others. A method that only
makes the policy more confident gains at temperature 1 but not here."""


@dataclass(frozen=True)
class Tuning:
    """Settings chosen separately for each task and method, by short runs that are the same for all methods.
    They are evaluated on problems that no other run of the study is evaluated on."""

    grid: dict[str, tuple[Any, ...]]
    """Recipe key, such as lr or n-samples-per-prompt → its values. Every combination is tried."""
    seeds: tuple[int, ...]
    """Seeds of the tuning runs; none of them is a seed of the study itself."""
    budget: float
    own: dict[str, dict[str, tuple[Any, ...]]] = field(default_factory=dict)
    """Method → further settings and values for its grid alone."""
    methods: tuple[str, ...] = ()
    """Methods that are tuned; all if empty. The others run with the settings that the study gives them."""


@dataclass(frozen=True)
class Task:
    """One task of a study, with the policy that its runs start from."""

    name: str
    """Name of the task; empty in a study of one task that names none."""
    settings: Settings
    """Changes to the recipe: the warm start (hf-checkpoint), prompts, verifier."""
    kind: str = ""
    """Purpose of the task, in words."""
    warm_start: Settings = field(default_factory=dict)
    """Settings that made the warm start; for the reader, no run uses them."""
    skill: float | None = None
    """Measured comparison skill of the warm start: how much more often a correction that is shown a correct
    reference succeeds than another try."""
    budget: float | None = None
    """Budget of its runs, for a task that is learned sooner or later than the others; None: the study's."""


@dataclass(frozen=True)
class PublishedClaim:
    """A claim of a publication that the study puts to the test."""

    source: str
    """Place in the publication."""
    claim: str
    method: str = ""
    """Method of the study that the claim speaks for."""
    than: str = ""
    """Method that it is compared with."""
    measure: str = "accuracy"
    """accuracy, greedy accuracy, cost to threshold, or correction success (of the method alone, last less
    first steps)."""
    task: str = ""
    """Task of the study that the claim is about; empty: the mean over all of them."""
    untestable: str = ""
    """Why the study cannot test it; empty if it can."""


@dataclass(frozen=True)
class Study:
    """The methods to compare, and the budget for each run."""

    name: str
    methods: dict[str, Settings]
    """Method → its changes to the recipe."""
    baseline: str
    """Method that the others are compared with."""
    budget: float
    """Budget of a run, in `budget_unit`; evaluation is free. In tasks with a budget of their own, those of
    tuning are the same share of it."""
    budget_unit: str = "accelerator-seconds"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    recipe: Path | None = None
    """Recipe that all methods start from."""
    common: Settings = field(default_factory=dict)
    """Changes to that recipe for all methods."""
    threshold: float = 0.75
    """Training reward whose cost is compared."""
    processes: int = 1
    """Trainer processes per run."""
    run_timeout: float = 1800.0
    """Seconds after which a run is ended and counted as failed."""
    tune: Tuning | None = None
    tasks: tuple[Task, ...] = (Task("", {}),)
    pilot_seeds: tuple[int, ...] = ()
    """Seeds for runs of the baseline, before all others of the same budget. Their spread tells how many seeds
    the study needs."""
    confirm_seeds: tuple[int, ...] = ()
    """Fresh seeds for running the baseline again, with the methods that beat it."""
    published_claims: tuple[PublishedClaim, ...] = ()

    @property
    def unit(self) -> str:
        """`budget_unit` as metrics spell it."""
        return self.budget_unit.replace("-", "_")

    def budget_of(self, task: Task) -> float:
        """Return the budget of a run on a task."""
        return task.budget or self.budget

    @property
    def budgets(self) -> str:
        """The budget of a run, and of tasks with another one, in words."""
        others = [f"{task.name}: {task.budget:g}" for task in self.tasks if task.budget is not None]
        return f"{self.budget:g} {self.budget_unit}" + (f" ({', '.join(others)})" if others else "")

    @property
    def unit_in_words(self) -> str:
        return self.budget_unit.replace("-", " ")


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    method: str
    seed: int
    directory: Path
    arguments: tuple[str, ...]
    """The flags of megatron_ibpo.commands.train."""
    config: str
    """Resolved configuration, for recognising a finished run."""
    budget: float
    setting: Settings = field(default_factory=dict)
    """Tuned settings and their values."""
    task: str = ""
    phase: Phase = "main"
    policy: Path | None = None
    """Directory or Hub id of the policy that it starts from."""
    doubts: tuple[str, ...] = ()
    """Warnings about settings that work but may not be intended."""

    @property
    def label(self) -> str:
        """Name of the run in progress messages."""
        values = [f"{key} {value}" for key, value in self.setting.items()]
        return ", ".join([*filter(None, [self.task]), self.method, f"seed {self.seed}", *values])


def grid_points(tuning: Tuning, method: str) -> list[Settings]:
    """Return every combination of a method's grid."""
    grid = tuning.grid | tuning.own.get(method, {})
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def point_name(point: Settings) -> str:
    """Return the name of the directory of a combination."""
    return "_".join(f"{key}_{value}" for key, value in point.items()).replace("/", "%2F")


def plan_tuning(study: Study, directory: Path) -> list[PlannedRun]:
    """Return the runs that tune each method on each task; none if the study tunes nothing. Raises ConfigError
    if a method's settings cannot work."""
    if study.tune is None:
        return []
    return [
        run
        for task in study.tasks
        for method in study.methods
        if method in (study.tune.methods or study.methods)
        for point in grid_points(study.tune, method)
        for run in plan_point(study, directory, task, method, point, study.tune.seeds)
    ]


def plan_point(
    study: Study, directory: Path, task: Task, method: str, point: Settings, seeds: Sequence[int]
) -> list[PlannedRun]:
    """Return the runs that try one combination. Raises ConfigError if the combination cannot work."""
    assert study.tune is not None
    parent = _of_task(directory / "tuning", task) / method / point_name(point)
    return _planned(study, "tuning", task, method, seeds, parent, point)


Chosen = Mapping[tuple[str, str], Settings]
"""(task, method) → settings found by tuning."""


def plan_runs(
    study: Study,
    directory: Path,
    phase: Literal["pilot", "main", "confirmation"],
    chosen: Chosen | None = None,
    methods: Sequence[str] | None = None,
) -> list[PlannedRun]:
    """Return the runs of a phase, seed by seed, so that a study cut short has whole seeds. Raises ConfigError
    if a method's settings cannot work."""
    tuned = chosen or {}
    folder = {"main": "runs"}.get(phase, phase)
    seeds = {"pilot": study.pilot_seeds, "main": study.seeds, "confirmation": study.confirm_seeds}[phase]
    by_method = []
    for task, method in product(study.tasks, study.methods if methods is None else methods):
        parent, setting = _of_task(directory / folder, task) / method, tuned.get((task.name, method), {})
        by_method.append(_planned(study, phase, task, method, seeds, parent, setting))
    return [run for of_seed in zip(*by_method, strict=True) for run in of_seed]


def _of_task(folder: Path, task: Task) -> Path:
    return folder / task.name if task.name else folder


def _planned(
    study: Study, phase: Phase, task: Task, method: str, seeds: Sequence[int], parent: Path, tuned: Settings
) -> list[PlannedRun]:
    """Return runs that differ only by their seed."""
    budget = study.budget_of(task)
    if study.tune is not None and phase == "tuning":
        budget *= study.tune.budget / study.budget
    settings: Settings = {} if phase == "tuning" else {"eval-other-temperatures": OTHER_TEMPERATURES}
    settings |= {**study.common, **task.settings, **study.methods[method], **tuned}
    settings |= {"budget": budget, "budget-unit": study.budget_unit}
    if phase == "tuning":
        settings["eval-interval"] = None  # only the end is judged
    if study.tune is not None or study.pilot_seeds:
        # settings must not be chosen on the problems that judge them
        settings["eval-half"] = "tuning" if phase in ("tuning", "pilot") else "test"
    parent.mkdir(parents=True, exist_ok=True)
    runs: list[PlannedRun] = []
    config: Config | None = None
    doubts: tuple[str, ...] = ()
    for seed in seeds:
        directory = parent / f"seed_{seed}"
        recipe = directory.with_suffix(".yaml")
        of_seed = settings | {"seed": seed, "data-seed": seed}
        recipe.write_text(yaml.safe_dump(of_seed, sort_keys=False, allow_unicode=True), encoding="utf-8")
        base = [] if study.recipe is None else ["--config", str(study.recipe)]
        recipes = (*base, "--config", str(recipe))
        if config is None:
            description = f"task {task.name}, method {method}" if task.name else f"method {method}"
            # parsing is ten times as fast without flags, so the run's directory is set below
            config = _checked(recipes, description)
            doubts = tuple(doubtful_settings(config, find_operator(config.algorithm)))
        config.run.seed = config.data.data_seed = seed
        config.run.run_dir = path_of_user(directory)
        text = config_yaml(config)
        arguments = (*recipes, "--run-dir", str(directory))
        policy = config.model.hf_checkpoint
        runs.append(
            PlannedRun(
                method, seed, directory, arguments, text, budget, tuned, task.name, phase, policy, doubts
            )
        )
    return runs


def _checked(arguments: Sequence[str], description: str) -> Config:
    try:
        config = parse_config(arguments)
        check_run(config)
    except ConfigError as error:
        raise ConfigError(f"{description}: {error}") from error
    return config


@dataclass(frozen=True)
class Tried:
    """One tuning run."""

    setting: Settings
    seed: int
    accuracy: float
    """Final accuracy on the problems of tuning."""
    greedy: float
    steps: int


@dataclass(frozen=True)
class Choice:
    """The settings chosen for one method on one task."""

    task: str
    method: str
    setting: Settings
    """Combination with the highest mean accuracy, the first of equal ones."""
    at_edge: tuple[str, ...]
    """Settings whose best value is the smallest or the largest that was tried."""
    tried: list[Tried]


def choose(task: str, method: str, tried: Sequence[Tried]) -> Choice:
    """Return the best of the combinations tried; needs at least one."""
    by_point: dict[tuple[tuple[str, Any], ...], list[float]] = {}
    for run in tried:
        by_point.setdefault(tuple(run.setting.items()), []).append(run.accuracy)
    best_point = max(by_point, key=lambda point: fmean(by_point[point]))
    best = dict(best_point)
    settings = [dict(point) for point in by_point]
    edges = tuple(key for key in best if _lies_at_edge(key, best, settings))
    return Choice(task, method, best, edges, list(tried))


def beyond(choice: Choice) -> dict[str, Settings]:
    """Return, for each setting at an edge with a value beyond, the best combination with that value."""
    tried = [run.setting for run in choice.tried]
    values_beyond = {key: _beyond(key, choice.setting, tried) for key in choice.at_edge}
    return {key: choice.setting | {key: value} for key, value in values_beyond.items() if value is not None}


def _lies_at_edge(key: str, best: Settings, settings: Sequence[Settings]) -> bool:
    """Return whether the best value is the smallest or largest of an axis: two numbers or more. An axis that
    ends by itself, as a group does at two responses, has an edge there too."""
    values = {setting[key] for setting in settings}
    return len(values) > 1 and all(map(_is_number, values)) and best[key] in (min(values), max(values))


def _beyond(key: str, best: Settings, settings: Sequence[Settings]) -> float | int | None:
    """Return the value beyond the edge where the best one lies, in equal ratios. None if the values are not
    all above 0, or if no whole number lies beyond."""
    values = {setting[key] for setting in settings}
    if min(values) <= 0:
        return None
    ascending = sorted(values, reverse=best[key] == min(values))
    last, previous = ascending[-1], ascending[-2]
    value = last * last / previous
    if all(isinstance(value, int) for value in values):
        value = round(value)
        return value if value >= 1 and value not in values else None
    return float(f"{value:.6g}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
