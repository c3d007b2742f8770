"""A study: several methods, several seeds, one budget; read from YAML, as the list of its runs.

Each run gets a recipe of its own, written next to its directory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from megatron_ibpo.checks import check_run
from megatron_ibpo.config import ConfigError, config_yaml, nearest, parse_config, path_in_recipe, read_yaml

Settings = dict[str, Any]
"""Recipe keys and their values."""


@dataclass(frozen=True)
class Tuning:
    """One setting chosen for each method by itself, by short runs that all methods get alike."""

    setting: str
    """Recipe key, such as lr."""
    values: tuple[Any, ...]
    seeds: tuple[int, ...]
    """None of them is a seed of the study itself."""
    budget: float


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


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    method: str
    seed: int
    directory: Path
    arguments: tuple[str, ...]
    """The flags of megatron_ibpo.train."""
    config: str
    """The resolved configuration, by which a finished run is known again."""
    budget: float
    value: Any = None
    """In a tuning run, the value of the setting that is tuned."""


def read_study(paths: Sequence[Path], overrides: Settings | None = None) -> Study:
    """The study of one file with `methods`, or of several recipes, each of which is a method.

    Args:
        overrides: fields of `Study` that win over the file's; with recipes they must give the budget and the
            baseline.

    Raises:
        ConfigError: a file that cannot be read, unknown or missing keys.
    """
    contents = [_read(path) for path in paths]
    if len(paths) == 1 and "methods" in contents[0]:
        raw = {str(key).replace("-", "_"): value for key, value in contents[0].items()}
        raw = {"name": paths[0].stem} | raw
    else:
        if len({path.stem for path in paths}) < len(paths):
            raise ConfigError("two recipes have the same file name, by which methods are called")
        raw = {"name": "study", "methods": {p.stem: c for p, c in zip(paths, contents, strict=True)}}
    raw |= overrides or {}
    known = {item.name for item in fields(Study)}
    for key in raw:
        if key not in known:
            raise ConfigError(
                f"{paths[0]}: unknown key {key!r}{nearest(key, [name.replace('_', '-') for name in known])}"
            )
    if missing := {"methods", "baseline", "budget"} - raw.keys():
        raise ConfigError(f"{paths[0]}: a study needs {', '.join(sorted(missing))}")
    if raw.get("tune") is not None:
        raw["tune"] = _tuning(raw["tune"], paths[0])
    if raw.get("recipe") is not None:
        raw["recipe"] = path_in_recipe(raw["recipe"])
    if isinstance(raw.get("seeds"), int):
        raw["seeds"] = range(raw["seeds"])
    raw["seeds"] = tuple(raw.get("seeds", (0, 1, 2, 3, 4)))
    raw["methods"] = {str(name): dict(settings or {}) for name, settings in raw["methods"].items()}
    study = Study(**raw)
    _check(study, paths[0])
    return study


def plan_tuning(study: Study, directory: Path) -> list[PlannedRun]:
    """The runs that tune each method; none if the study tunes nothing.

    Raises:
        ConfigError: a method's settings cannot work.
    """
    if study.tune is None:
        return []
    return [
        _planned(
            study,
            method,
            seed,
            directory / "tuning" / method / f"{study.tune.setting}_{value}",
            {study.tune.setting: value},
            study.tune.budget,
            value,
        )
        for seed in study.tune.seeds
        for value in study.tune.values
        for method in study.methods
    ]


def plan_main(study: Study, directory: Path, chosen: dict[str, Settings] | None = None) -> list[PlannedRun]:
    """The runs that are compared, seed by seed, so that a study cut short has whole seeds.

    Args:
        chosen: what tuning found for each method.

    Raises:
        ConfigError: a method's settings cannot work.
    """
    tuned = chosen or {}
    return [
        _planned(study, method, seed, directory / "runs" / method, tuned.get(method, {}), study.budget)
        for seed in study.seeds
        for method in study.methods
    ]


def _planned(
    study: Study,
    method: str,
    seed: int,
    parent: Path,
    tuned: Settings,
    budget: float,
    value: Any = None,
) -> PlannedRun:
    directory = parent / f"seed_{seed}"
    settings = {**study.common, **study.methods[method], **tuned}
    settings |= {"seed": seed, "data-seed": seed, "budget": budget, "budget-unit": study.budget_unit}
    recipe = directory.with_suffix(".yaml")
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), encoding="utf-8")
    base = [] if study.recipe is None else ["--config", str(study.recipe)]
    arguments = (*base, "--config", str(recipe), "--run-dir", str(directory))
    try:
        config = parse_config(arguments)
        check_run(config)
    except ConfigError as error:
        raise ConfigError(f"method {method}: {error}") from error
    return PlannedRun(method, seed, directory, arguments, config_yaml(config), budget, value)


def _check(study: Study, path: Path) -> None:
    problems = []
    if study.baseline not in study.methods:
        problems.append(f"baseline {study.baseline!r} is none of the methods")
    if len(set(study.seeds)) < max(1, len(study.seeds)) or not study.seeds:
        problems.append("seeds must be different ones, at least one")
    if study.tune is not None and set(study.tune.seeds) & set(study.seeds):
        problems.append("tuning must not use the study's own seeds")
    if study.budget <= 0 or study.run_timeout <= 0 or study.processes < 1:
        problems.append("budget, run-timeout and processes must be above 0")
    if problems:
        raise ConfigError(f"{path}: " + "; ".join(problems))


def _tuning(raw: Any, path: Path) -> Tuning:
    known = {item.name for item in fields(Tuning)}
    if not isinstance(raw, dict) or set(raw) != known:
        raise ConfigError(f"{path}: tune must have exactly {', '.join(sorted(known))}")
    return Tuning(raw["setting"], tuple(raw["values"]), tuple(raw["seeds"]), float(raw["budget"]))


def _read(path: Path) -> dict[str, Any]:
    content = read_yaml(path, str(path))
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines")
    return content
