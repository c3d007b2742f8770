"""A study (several methods, several seeds, one budget, one task or several) as the list of its runs.

Each run gets a recipe of its own, written next to its directory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

import yaml

from megatron_ibpo.config import Config, ConfigError, config_yaml, path_of_user
from megatron_ibpo.run.checks import check_run
from megatron_ibpo.run.settings import parse_config

Settings = dict[str, Any]
"""Recipe keys and their values."""


Phase = Literal["tuning", "pilot", "main", "confirmation"]

OTHER_TEMPERATURES = [0.6]
"""At which policies are evaluated beside --eval-temperature, unless the study says otherwise: a method that
only makes the policy surer of itself gains at temperature 1 and not here."""


@dataclass(frozen=True)
class Tuning:
    """Settings chosen for each task and method by themselves, by short runs that all methods get alike. They
    are evaluated on problems that no other run of the study is evaluated on."""

    grid: dict[str, tuple[Any, ...]]
    """Recipe key, such as lr or n-samples-per-prompt → its values. Every combination is tried."""
    seeds: tuple[int, ...]
    """None of them is a seed of the study itself."""
    budget: float
    own: dict[str, dict[str, tuple[Any, ...]]] = field(default_factory=dict)
    """Method → further settings that it alone has, and their values: its grid is wider by these."""


@dataclass(frozen=True)
class Task:
    """One task of a study, with the policy that its runs start from."""

    name: str
    """Empty in a study of one task that names none."""
    settings: Settings
    """What it changes in the recipe: the warm start (hf-checkpoint), prompts, verifier."""
    kind: str = ""
    """What it is there for, in words."""
    warm_start: Settings = field(default_factory=dict)
    """How its warm start was made; for the reader, no run uses it."""
    skill: float | None = None
    """Comparison skill of the warm start, as measured: how much more often than another try a correction
    that is shown a correct reference succeeds."""


@dataclass(frozen=True)
class Study:
    """What is compared, and at which cost."""

    name: str
    methods: dict[str, Settings]
    """What each method changes in the recipe."""
    baseline: str
    """The method that the others are compared with."""
    budget: float
    """What every run may spend, in `budget_unit`; evaluation is free."""
    budget_unit: str = "accelerator-seconds"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    recipe: Path | None = None
    """What all methods start from."""
    common: Settings = field(default_factory=dict)
    """What the study changes in it for all."""
    threshold: float = 0.75
    """Training reward whose cost is compared."""
    processes: int = 1
    """Trainer processes of a run."""
    run_timeout: float = 1800.0
    """Seconds after which a run is ended and counted as failed."""
    tune: Tuning | None = None
    tasks: tuple[Task, ...] = (Task("", {}),)
    pilot_seeds: tuple[int, ...] = ()
    """Seeds of runs of the baseline, before all others of the same budget, whose spread tells how many seeds
    the study needs."""
    confirm_seeds: tuple[int, ...] = ()
    """Fresh seeds by which the baseline and what beat it are run again."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    method: str
    seed: int
    directory: Path
    arguments: tuple[str, ...]
    """The flags of megatron_ibpo.commands.train."""
    config: str
    """The resolved configuration, by which a finished run is known again."""
    budget: float
    setting: Settings = field(default_factory=dict)
    """What is tuned, and its values."""
    task: str = ""
    phase: Phase = "main"

    @property
    def label(self) -> str:
        """What it is called on the way."""
        values = [f"{key} {value}" for key, value in self.setting.items()]
        return ", ".join([*filter(None, [self.task]), self.method, f"seed {self.seed}", *values])


def grid_points(tuning: Tuning, method: str) -> list[Settings]:
    """Every combination of the values that a method is tried with."""
    grid = tuning.grid | tuning.own.get(method, {})
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def point_name(point: Settings) -> str:
    """Return the name of the directory of a combination."""
    return "_".join(f"{key}_{value}" for key, value in point.items()).replace("/", "%2F")


def plan_tuning(study: Study, directory: Path) -> list[PlannedRun]:
    """The runs that tune each method on each task; none if the study tunes nothing.

    Raises:
        ConfigError: a method's settings cannot work.
    """
    if study.tune is None:
        return []
    return [
        run
        for task in study.tasks
        for method in study.methods
        for point in grid_points(study.tune, method)
        for run in plan_point(study, directory, task, method, point, study.tune.seeds)
    ]


def plan_point(
    study: Study, directory: Path, task: Task, method: str, point: Settings, seeds: Sequence[int]
) -> list[PlannedRun]:
    """The runs that try one combination.

    Raises:
        ConfigError: it cannot work.
    """
    assert study.tune is not None
    parent = _of_task(directory / "tuning", task) / method / point_name(point)
    return _planned(study, "tuning", task, method, seeds, parent, point)


Chosen = Mapping[tuple[str, str], Settings]
"""(task, method) → what tuning found for it."""


def plan_runs(
    study: Study,
    directory: Path,
    phase: Phase,
    seeds: Sequence[int],
    methods: Sequence[str],
    chosen: Chosen | None = None,
) -> list[PlannedRun]:
    """The runs of a phase, seed by seed, so that a study cut short has whole seeds.

    Raises:
        ConfigError: a method's settings cannot work.
    """
    tuned = chosen or {}
    folder = {"main": "runs"}.get(phase, phase)
    by_method = [
        _planned(
            study,
            phase,
            task,
            method,
            seeds,
            _of_task(directory / folder, task) / method,
            tuned.get((task.name, method), {}),
        )
        for task in study.tasks
        for method in methods
    ]
    return [run for of_seed in zip(*by_method, strict=True) for run in of_seed]


def plan_main(study: Study, directory: Path, chosen: Chosen | None = None) -> list[PlannedRun]:
    """The runs that are compared.

    Raises:
        ConfigError: a method's settings cannot work.
    """
    return plan_runs(study, directory, "main", study.seeds, list(study.methods), chosen)


def _of_task(folder: Path, task: Task) -> Path:
    return folder / task.name if task.name else folder


def _planned(
    study: Study,
    phase: Phase,
    task: Task,
    method: str,
    seeds: Sequence[int],
    parent: Path,
    tuned: Settings,
) -> list[PlannedRun]:
    """Runs that differ by their seed alone."""
    assert study.tune is not None or phase != "tuning"
    budget = study.tune.budget if study.tune is not None and phase == "tuning" else study.budget
    settings: Settings = {} if phase == "tuning" else {"eval-other-temperatures": OTHER_TEMPERATURES}
    settings |= {**study.common, **task.settings, **study.methods[method], **tuned}
    settings |= {"budget": budget, "budget-unit": study.budget_unit}
    if phase == "tuning":
        settings["eval-interval"] = None  # judged by its end alone
    if study.tune is not None or study.pilot_seeds:
        # what is chosen must not be chosen on the problems by which it is judged
        settings["eval-half"] = "tuning" if phase in ("tuning", "pilot") else "test"
    parent.mkdir(parents=True, exist_ok=True)
    runs: list[PlannedRun] = []
    config: Config | None = None
    for seed in seeds:
        directory = parent / f"seed_{seed}"
        recipe = directory.with_suffix(".yaml")
        of_seed = settings | {"seed": seed, "data-seed": seed}
        recipe.write_text(yaml.safe_dump(of_seed, sort_keys=False, allow_unicode=True), encoding="utf-8")
        base = [] if study.recipe is None else ["--config", str(study.recipe)]
        recipes = (*base, "--config", str(recipe))
        if config is None:
            where = f"task {task.name}, method {method}" if task.name else f"method {method}"
            # without its only flag, the run's directory, it is read ten times as fast
            config = _checked(recipes, where)
        config.run.seed = config.data.data_seed = seed
        config.run.run_dir = path_of_user(directory)
        text = config_yaml(config)
        arguments = (*recipes, "--run-dir", str(directory))
        runs.append(PlannedRun(method, seed, directory, arguments, text, budget, tuned, task.name, phase))
    return runs


def _checked(arguments: Sequence[str], where: str) -> Config:
    try:
        config = parse_config(arguments)
        check_run(config)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return config
