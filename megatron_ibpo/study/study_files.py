"""Reading studies from YAML files."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.text import shown
from megatron_ibpo.config import ConfigError, load_hook, nearest, path_in_recipe, read_yaml
from megatron_ibpo.study.claims import read_claims
from megatron_ibpo.study.plan import Settings, Study, Task, Tuning, grid_points, point_name
from megatron_ibpo.study.run_results import comparison_skill

MOST_SEEDS = 1_000


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_seeds(value: Any) -> bool:
    are_few = isinstance(value, list) and len(value) <= MOST_SEEDS
    return are_few and all(_is_integer(seed) and 0 <= seed < 2**62 for seed in value)


_TEXT = "text", lambda value: isinstance(value, str)
_ABOVE_0 = (
    "a number above 0",
    lambda value: (_is_integer(value) or isinstance(value, float)) and 0 < value < 1e300,
)
_NUMBER = "a number", lambda value: (_is_integer(value) or isinstance(value, float)) and abs(value) < 1e300
_MAPPING = "`key: value` lines", lambda value: isinstance(value, Mapping)
_METHODS = (
    "names, each with settings, a recipe or an import path",
    lambda value: (
        isinstance(value, Mapping)
        and all(isinstance(method, Mapping | str | None) for method in value.values())
    ),
)
_CLAIMS = (
    "a list of claims, each with `key: value` lines",
    lambda value: isinstance(value, list) and all(isinstance(claim, Mapping) for claim in value),
)
_NAMES = (
    "a list of names",
    lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
)
_SEEDS = "a list of whole numbers from 0 to 2^62", _are_seeds
_SEEDS_OR_COUNT = (
    f"a list of whole numbers from 0 to 2^62 or how many, up to {MOST_SEEDS:,}",
    lambda value: _are_seeds(value) or (_is_integer(value) and 0 < value <= MOST_SEEDS),
)
Kind = tuple[str, Callable[[Any], bool]]
_OF_STUDY: dict[str, Kind] = {
    "name": _TEXT,
    "methods": _METHODS,
    "baseline": _TEXT,
    "budget": _ABOVE_0,
    "budget_unit": _TEXT,
    "seeds": _SEEDS_OR_COUNT,
    "recipe": _TEXT,
    "common": _MAPPING,
    "threshold": _NUMBER,
    "processes": (
        "a whole number from 1 to 10,000",
        lambda value: _is_integer(value) and 0 < value <= 10_000,
    ),
    "run_timeout": _ABOVE_0,
    "tune": _MAPPING,
    "tasks": _MAPPING,
    "pilot_seeds": _SEEDS,
    "confirm_seeds": _SEEDS,
    "published_claims": _CLAIMS,
}
"""Key of a study → the kind of value that it must hold."""
_OF_TUNING: dict[str, Kind] = {
    "grid": _MAPPING,
    "seeds": _SEEDS,
    "budget": _ABOVE_0,
    "own": _MAPPING,
    "methods": _NAMES,
}
_OF_TASK: dict[str, Kind] = {"settings": _MAPPING, "warm_start": _MAPPING, "budget": _ABOVE_0}

LONGEST_NAME = 200
"""Bytes. File systems allow 255, and some names get a suffix."""


def read_study(
    paths: Sequence[Path],
    overrides: Settings | None = None,
    *,
    add: Mapping[str, Settings | str] | None = None,
    only: Sequence[str] = (),
    tasks: Sequence[str] = (),
) -> Study:
    """Read a study from one file with `methods`, or from several recipes that are a method each.

    Args:
        overrides: fields of `Study` that override the file's; with recipes they must give the budget and the
            baseline.
        add: further methods, in the forms of `method_settings`.
        only: names of methods to compare with the baseline; all if empty.
        tasks: names of tasks to run; all if empty.

    Raises:
        ConfigError: a file that cannot be read, unknown or missing keys.
    """
    contents = [_read(path) for path in paths]
    if len(paths) == 1 and "methods" in contents[0]:
        raw = {str(key).replace("-", "_"): value for key, value in contents[0].items()}
    else:
        if len({path.stem for path in paths}) < len(paths):
            raise ConfigError(
                "two recipes have the same file name, which is the name of their method; rename one"
            )
        raw = {"name": "study", "methods": {p.stem: c for p, c in zip(paths, contents, strict=True)}}
    raw |= overrides or {}
    keys = {item.name for item in fields(Study)}
    for key in raw:
        if key not in keys:
            raise ConfigError(
                f"{paths[0]}: unknown key {key!r}{nearest(key, [name.replace('_', '-') for name in keys])}"
            )
    raw = {"name": paths[0].stem} | _of_kinds(raw, _OF_STUDY, str(paths[0]))
    if missing := {"methods", "baseline", "budget"} - raw.keys():
        raise ConfigError(f"{paths[0]}: a study needs {', '.join(sorted(missing))}")
    if _is_integer(raw.get("seeds")):
        raw["seeds"] = range(raw["seeds"])
    if "tune" in raw:
        raw["tune"] = _tuning(raw["tune"], paths[0])
    if "recipe" in raw:
        raw["recipe"] = path_in_recipe(raw["recipe"])
    for key in ("seeds", "pilot_seeds", "confirm_seeds"):
        if key in raw:
            raw[key] = tuple(raw[key])
    if "tasks" in raw:
        raw["tasks"] = tuple(_task(str(name), task, paths[0]) for name, task in raw["tasks"].items())
    methods = {**raw["methods"], **(add or {})}
    raw["methods"] = {str(name): method_settings(settings) for name, settings in methods.items()}
    try:
        names = [task.name for task in raw.get("tasks", ())]
        claims = read_claims(raw.get("published_claims", ()), raw["methods"], names, str(paths[0]))
        raw["published_claims"] = claims
    except ValueError as error:
        raise ConfigError(str(error)) from error
    study = Study(**raw)
    _check(study, paths[0])
    chosen_methods = {study.baseline, *(only or study.methods)}
    _check_names("method", only, study.methods)
    _check_names("task", tasks, [task.name for task in study.tasks])
    return replace(
        study,
        methods={name: settings for name, settings in study.methods.items() if name in chosen_methods},
        tasks=tuple(task for task in study.tasks if not tasks or task.name in tasks),
    )


def method_settings(method: Settings | str | None) -> Settings:
    """Return the settings by which a method changes the recipe.

    Args:
        method: settings; or the path of a recipe; or an import path module:NAME of settings, of an operator
            (--ibpo-operator), or of a function for use with GSPO: a function of rewards is an estimator
            (--advantages), a function of groups, advantages and context a token credit (--token-credit).

    Raises:
        ConfigError: there is no such recipe, or the import path leads to none of these.
    """
    if method is None or isinstance(method, Mapping):
        return dict(method or {})
    method = str(method)
    if method.endswith((".yaml", ".yml")):
        return _read(path_in_recipe(method))
    if ":" not in method:
        raise ConfigError(
            f"method {method!r}: must be a recipe (FILE.yaml), an import path (module:NAME) or settings"
        )
    hook = load_hook("method", method)
    if isinstance(hook, Mapping):
        return dict(hook)
    if hasattr(hook, "judge"):
        return {"ibpo-operator": method}
    if hasattr(hook, "of_batch"):
        return {"advantage-estimator": "gspo", "advantages": method}
    is_class = isinstance(hook, type)
    call = vars(hook).get("__call__") if is_class else hook
    arguments = len(signature(call).parameters) - is_class if callable(call) else 0
    if flag := {1: "advantages", 3: "token-credit"}.get(arguments):
        return {"advantage-estimator": "gspo", flag: method}
    raise ConfigError(
        f"method {method}: neither settings, an operator, an estimator nor a token credit: "
        "docs/comparing-methods.md"
    )


def _check(study: Study, path: Path) -> None:
    problems = _bad_names(study)
    if study.baseline not in study.methods:
        problems.append(f"baseline {study.baseline!r} is none of the methods")
    if len(set(study.seeds)) < max(1, len(study.seeds)) or not study.seeds:
        problems.append("seeds must be one or more, all different")
    of_phases = {
        "tuning": study.tune.seeds if study.tune is not None else (),
        "the pilot": study.pilot_seeds,
        "confirmation": study.confirm_seeds,
    }
    used = set(study.seeds)
    for phase, seeds in of_phases.items():
        if used & set(seeds) or len(set(seeds)) < len(seeds):
            problems.append(f"{phase} must not use the study's own seeds, nor one that is used elsewhere")
        used |= set(seeds)
    if study.tune is not None:
        named = {*study.tune.own, *study.tune.methods}
        if strangers := named - study.methods.keys():
            problems.append(f"tune names {', '.join(sorted(strangers))}, which is none of the methods")
    if len(study.pilot_seeds) == 1:
        problems.append("a pilot of one seed has no spread: pilot-seeds must be two or more")
    if not study.tasks:
        problems.append("tasks must name at least one")
    if problems:
        raise ConfigError(f"{path}: " + "; ".join(problems))


def _bad_names(study: Study) -> list[str]:
    """Return an error for each name that cannot be a directory within the study's own."""
    points = [] if study.tune is None else [p for m in study.methods for p in grid_points(study.tune, m)]
    named = [("method", name) for name in study.methods]
    named += [("task", task.name) for task in study.tasks if task.name]
    named += [("tuning run", point_name(point)) for point in points]
    return [
        f"{kind} {name[:40]!r}: a directory gets this name, so it must have 1 to {LONGEST_NAME} bytes, no "
        "slash, no control character and no dot at its start"
        for kind, name in named
        if not _names_a_directory(name)
    ]


def _names_a_directory(name: str) -> bool:
    plain = "/" not in name and not name.startswith(".") and name.isprintable()
    return plain and 0 < len(name.encode("utf-8", "surrogatepass")) <= LONGEST_NAME


def _of_kinds(raw: Mapping[str, Any], kinds: Mapping[str, Kind], place: str) -> dict[str, Any]:
    """Return the given values, without empty keys."""
    values = {key: value for key, value in raw.items() if value is not None}
    for key, (words, fits) in kinds.items():
        if kinds[key] in (_NUMBER, _ABOVE_0) and key in values:
            values[key] = _number(values[key])
        if key in values and not fits(values[key]):
            raise ConfigError(f"{place}: {key.replace('_', '-')} must be {words}, is {shown(values[key])}")
    return values


def _tuning(raw: Mapping[str, Any], path: Path) -> Tuning:
    needed = {"grid", "seeds", "budget"}
    raw = _of_kinds(raw, _OF_TUNING, f"{path}: tune")
    if not needed <= set(raw) <= needed | {"own", "methods"}:
        raise ConfigError(
            f"{path}: tune must have {', '.join(sorted(needed))}, may have own and methods, and no other key"
        )
    return Tuning(
        grid=_grid(raw["grid"], path),
        seeds=tuple(raw["seeds"]),
        budget=float(raw["budget"]),
        own={str(method): _grid(grid, path) for method, grid in raw.get("own", {}).items()},
        methods=tuple(raw.get("methods", ())),
    )


def _grid(raw: Any, path: Path) -> dict[str, tuple[Any, ...]]:
    if not isinstance(raw, dict) or not raw or not all(isinstance(v, list) and v for v in raw.values()):
        raise ConfigError(f"{path}: tune: grid must give each setting a list: {{lr: [1.0e-4, 3.0e-4]}}")
    return {str(key): tuple(map(_number, values)) for key, values in raw.items()}


def _number(value: Any) -> Any:
    """Return text that is a number as a number; YAML 1.1 reads 3e-4 as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _task(name: str, raw: Any, path: Path) -> Task:
    task_keys = {item.name for item in fields(Task)} - {"name"}
    raw = raw if isinstance(raw, dict) else {}
    values = {str(key).replace("-", "_"): value for key, value in raw.items()}
    if "settings" not in values or not values.keys() <= task_keys:
        names = ", ".join(sorted(item.replace("_", "-") for item in task_keys))
        raise ConfigError(f"{path}: task {name}: must have settings, and may have of {names} only")
    if not name:
        raise ConfigError(f"{path}: a task has no name")
    if isinstance(values["settings"], str):
        values["settings"] = _read(path_in_recipe(values["settings"]))
    values = _of_kinds(values, _OF_TASK, f"{path}: task {name}")
    return Task(
        name,
        settings=values.get("settings", {}),
        kind=str(values.get("kind", "")),
        warm_start=values.get("warm_start", {}),
        skill=_skill(values.get("skill"), f"{path}: task {name}"),
        budget=values.get("budget"),
    )


def _skill(skill: Any, place: str) -> float | None:
    """Return a number, or the skill from a file that `ibpo skill --save` wrote."""
    if skill is None or isinstance(skill, int | float):
        return skill
    try:
        return comparison_skill(path_in_recipe(skill))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{place}: skill must be a number, or a file of `ibpo skill`: {error!r:.200}"
        ) from error


def _check_names(kind: str, names: Sequence[str], existing: Collection[str]) -> None:
    for name in names:
        if name not in existing:
            raise ConfigError(
                f"no {kind} {name!r}; there are {', '.join(existing)}{nearest(name, list(existing))}"
            )


def _read(path: Path) -> dict[str, Any]:
    content = read_yaml(path, str(path))
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines")
    return content
