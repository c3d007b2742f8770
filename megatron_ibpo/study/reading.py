"""Studies as files: YAML in, `Study` out."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

from megatron_ibpo.config import ConfigError, load_hook, nearest, path_in_recipe, read_yaml
from megatron_ibpo.study.plan import Settings, Study, Task, Tuning
from megatron_ibpo.study.results import comparison_skill
from megatron_ibpo.words import shown


def read_study(
    paths: Sequence[Path],
    overrides: Settings | None = None,
    *,
    add: Mapping[str, Settings | str] | None = None,
    only: Sequence[str] = (),
    tasks: Sequence[str] = (),
) -> Study:
    """The study of one file with `methods`, or of several recipes, each of which is a method.

    Args:
        overrides: fields of `Study` that win over the file's; with recipes they must give the budget and the
            baseline.
        add: further methods, as `method_settings` takes them.
        only: names of methods to compare with the baseline; all if empty.
        tasks: names of tasks to run; all if empty.

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
    _check_types(raw, paths[0])
    if raw.get("tune") is not None:
        raw["tune"] = _tuning(raw["tune"], paths[0])
    if raw.get("recipe") is not None:
        raw["recipe"] = path_in_recipe(raw["recipe"])
    if isinstance(raw.get("seeds"), int):
        raw["seeds"] = range(raw["seeds"])
    for key in ("seeds", "pilot_seeds", "confirm_seeds"):
        if key in raw:
            raw[key] = tuple(raw[key])
    if "tasks" in raw:
        raw["tasks"] = tuple(_task(str(name), task, paths[0]) for name, task in (raw["tasks"] or {}).items())
    methods = {**raw["methods"], **(add or {})}
    raw["methods"] = {str(name): method_settings(given) for name, given in methods.items()}
    study = Study(**raw)
    _check(study, paths[0])
    kept = {study.baseline, *(only or study.methods)}
    _known("method", only, study.methods)
    _known("task", tasks, [task.name for task in study.tasks])
    return replace(
        study,
        methods={name: settings for name, settings in study.methods.items() if name in kept},
        tasks=tuple(task for task in study.tasks if not tasks or task.name in tasks),
    )


def method_settings(given: Settings | str | None) -> Settings:
    """What a method changes in the recipe.

    Args:
        given: settings; or the path of a recipe; or an import path module:NAME of settings, of an operator
            (--ibpo-operator), or, on GSPO, of a function: of rewards it is an estimator (--advantages), of
            groups, advantages and context a token credit (--token-credit).

    Raises:
        ConfigError: there is no such recipe, or the import path leads to nothing of the kind.
    """
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    given = str(given)
    if given.endswith((".yaml", ".yml")):
        return _read(path_in_recipe(given))
    if ":" not in given:
        raise ConfigError(
            f"method {given!r}: must be a recipe (FILE.yaml), an import path (module:NAME) or settings"
        )
    found = load_hook("method", given)
    if isinstance(found, Mapping):
        return dict(found)
    if hasattr(found, "judge"):
        return {"ibpo-operator": given}
    arguments = len(signature(found).parameters) if callable(found) else 0
    if flag := {1: "advantages", 3: "token-credit"}.get(arguments):
        return {"advantage-estimator": "gspo", flag: given}
    raise ConfigError(
        f"method {given}: neither settings, an operator, an estimator nor a token credit: "
        "docs/comparing-methods.md"
    )


MOST_SEEDS = 1000
"""Of a study: a run for each."""
SEED_RULE = f"whole numbers from 0 to 2^62, at most {MOST_SEEDS} of them"


def _are_seeds(value: Any) -> bool:
    if type(value) is int:
        return 0 < value <= MOST_SEEDS
    are_few = isinstance(value, Sequence) and not isinstance(value, str) and len(value) <= MOST_SEEDS
    return are_few and all(type(seed) is int and 0 <= seed < 2**62 for seed in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _are_methods(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, dict | str | None) for one in value.values())


_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("name", "baseline", "budget_unit"), (lambda value: isinstance(value, str), "text")),
    **dict.fromkeys(("budget", "threshold", "run_timeout"), (_is_number, "a number")),
    **dict.fromkeys(("seeds", "pilot_seeds", "confirm_seeds"), (_are_seeds, SEED_RULE)),
    "common": (lambda value: isinstance(value, dict), "settings, as `key: value` lines"),
    "tasks": (lambda value: isinstance(value, dict), "names, each with its task"),
    "methods": (_are_methods, "names, each with settings, a recipe or an import path"),
    "processes": (lambda value: type(value) is int and 0 < value <= 10_000, "a whole number from 1 to 10000"),
    "recipe": (lambda value: isinstance(value, str | Path | None), "a path"),
}
"""Key of a study → what its value must be."""


def _check_types(raw: Mapping[str, Any], path: Path) -> None:
    for key, value in raw.items():
        fits, rule = _TYPES.get(key, (None, ""))
        if fits is not None and not fits(value):
            raise ConfigError(f"{path}: {key.replace('_', '-')} must be {rule}, is {shown(value)}")


def _check(study: Study, path: Path) -> None:
    problems = []
    if study.baseline not in study.methods:
        problems.append(f"baseline {study.baseline!r} is none of the methods")
    if len(set(study.seeds)) < max(1, len(study.seeds)) or not study.seeds:
        problems.append("seeds must be different ones, at least one")
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
    if study.tune is not None and (strangers := study.tune.own.keys() - study.methods.keys()):
        problems.append(f"tune: own names {', '.join(sorted(strangers))}, which is none of the methods")
    if len(study.pilot_seeds) == 1:
        problems.append("a pilot of one seed has no spread: pilot-seeds must be two or more")
    if not study.tasks:
        problems.append("tasks must name at least one")
    if study.budget <= 0 or study.run_timeout <= 0 or study.processes < 1:
        problems.append("budget, run-timeout and processes must be above 0")
    if problems:
        raise ConfigError(f"{path}: " + "; ".join(problems))


def _tuning(raw: Any, path: Path) -> Tuning:
    needed = {"grid", "seeds", "budget"}
    if not isinstance(raw, dict) or not needed <= set(raw) <= needed | {"own"}:
        raise ConfigError(
            f"{path}: tune must have {', '.join(sorted(needed))}, may have own, and no other key"
        )
    own = raw.get("own") or {}
    if not isinstance(own, dict):
        raise ConfigError(f"{path}: tune: own must give each method a grid of its own settings")
    if not _are_seeds(raw["seeds"]) or type(raw["seeds"]) is int or not _is_number(raw["budget"]):
        raise ConfigError(f"{path}: tune: seeds must be a list of {SEED_RULE}, and budget a number")
    return Tuning(
        grid=_grid(raw["grid"], path),
        seeds=tuple(raw["seeds"]),
        budget=float(raw["budget"]),
        own={str(method): _grid(grid, path) for method, grid in own.items()},
    )


def _grid(raw: Any, path: Path) -> dict[str, tuple[Any, ...]]:
    if not isinstance(raw, dict) or not raw or not all(isinstance(v, list) and v for v in raw.values()):
        raise ConfigError(f"{path}: tune: grid must give each setting a list: {{lr: [1.0e-4, 3.0e-4]}}")
    return {str(key): tuple(map(_number, values)) for key, values in raw.items()}


def _number(value: Any) -> Any:
    """YAML 1.1 reads 3e-4 as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _task(name: str, raw: Any, path: Path) -> Task:
    known = {item.name for item in fields(Task)} - {"name"}
    raw = raw if isinstance(raw, dict) else {}
    given = {str(key).replace("-", "_"): value for key, value in raw.items()}
    if "settings" not in given or not given.keys() <= known:
        names = ", ".join(sorted(item.replace("_", "-") for item in known))
        raise ConfigError(f"{path}: task {name}: must have settings, and of {names} no other")
    if not name or "/" in name:
        raise ConfigError(f"{path}: task {name!r}: a name is a directory's, without a slash")
    settings, warm_start = given["settings"], given.get("warm_start")
    if not isinstance(settings, str | dict | None) or not isinstance(warm_start, dict | None):
        raise ConfigError(
            f"{path}: task {name}: settings must be a recipe or `key: value` lines, and warm-start such lines"
        )
    return Task(
        name,
        settings=_read(path_in_recipe(settings)) if isinstance(settings, str) else dict(settings or {}),
        kind=str(given.get("kind", "")),
        warm_start=dict(warm_start or {}),
        skill=_skill(given.get("skill"), f"{path}: task {name}"),
    )


def _skill(given: Any, where: str) -> float | None:
    """A number, or the file that `ibpo skill --save` wrote."""
    if given is None or isinstance(given, int | float):
        return given
    try:
        return comparison_skill(path_in_recipe(given))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{where}: skill must be a number, or a file of `ibpo skill`: {error!r}") from error


def _known(what: str, asked: Sequence[str], known: Collection[str]) -> None:
    for name in asked:
        if name not in known:
            raise ConfigError(f"no {what} {name!r}; there are {', '.join(known)}{nearest(name, list(known))}")


def _read(path: Path) -> dict[str, Any]:
    content = read_yaml(path, str(path))
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines")
    return content
