"""The findings of a study as plain data, saved as results.json."""

import gzip
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.user_files import JSON_BYTES, UserFileError, check_user_file, read_user_file
from megatron_ibpo.report import jsonable
from megatron_ibpo.study.plan import Choice, PublishedClaim, Study, Task, Tried, Tuning, choose
from megatron_ibpo.study.run_results import RunResult
from megatron_ibpo.study.statistics import PowerAnalysis


@dataclass(frozen=True)
class Findings:
    """A study and the results of its runs."""

    study: Study
    runs: list[RunResult]
    choices: list[Choice] = field(default_factory=list)
    power: PowerAnalysis | None = None
    """Analysis of the pilot, made before the runs."""
    confirmation: list[RunResult] = field(default_factory=list)
    """Runs with fresh seeds."""
    runs_left: int = 0
    """Number of main runs that are planned and not finished."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the code, the packages and the machine that wrote these findings, and the command. The code
    of each run is in `RunResult.code`."""


def write_findings(path: Path, findings: Findings, tables: Mapping[str, Any]) -> None:
    """Write all findings as JSON, with the tables that follow from them."""
    plain = jsonable(asdict(findings) | dict(tables), shorten=lambda value: float(f"{value:.7g}"))
    path.write_text(json.dumps(plain, allow_nan=False) + "\n", encoding="utf-8")


def read_findings(path: Path) -> Findings:
    """Read a file of `write_findings`, or the results of a study from before there were tasks and grids. A
    file whose name ends in .gz is gzipped. Raises ValueError if the file cannot be read or holds no results
    of a study."""
    try:
        content = json.loads(_text(path))
        return Findings(
            study=_study(content["study"]),
            runs=[_run(run) for run in content["runs"]],
            # with the edges of the grid as `choose` names them now, whatever the file says
            choices=[
                choose(choice["task"], choice["method"], [Tried(**run) for run in choice["tried"]])
                for choice in content.get("choices", [])
            ],
            power=_power(content.get("power")),
            confirmation=[_run(run) for run in content.get("confirmation", [])],
            runs_left=content.get("runs_left", 0),
            versions=content.get("versions", {}),
        )
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not gzip, or cut off: {error}") from error
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: holds no results of a study: {error!r:.200}") from error


def _text(path: Path) -> bytes:
    if path.suffix != ".gz":
        return read_user_file(path, JSON_BYTES)
    check_user_file(path, JSON_BYTES)
    with gzip.open(path) as file:
        text = file.read(JSON_BYTES + 1)
    if len(text) > JSON_BYTES:
        raise UserFileError(f"it has more than {JSON_BYTES:,} bytes when unpacked")
    return text


def _study(raw: dict[str, Any]) -> Study:
    field_names = {item.name for item in fields(Study)}
    content = {key: value for key, value in raw.items() if key in field_names}
    for key in ("seeds", "pilot_seeds", "confirm_seeds"):
        if key in content:
            content[key] = tuple(content[key])
    if content.get("recipe") is not None:
        content["recipe"] = Path(content["recipe"])
    if (tune := content.get("tune")) is not None:
        grid = tune.get("grid") or {tune["setting"]: tune["values"]}
        values = {key: tuple(of_key) for key, of_key in grid.items()}
        own_grids = {
            method: {key: tuple(of_key) for key, of_key in grid.items()}
            for method, grid in tune.get("own", {}).items()
        }
        methods = tuple(tune.get("methods", ()))
        content["tune"] = Tuning(values, tuple(tune["seeds"]), tune["budget"], own_grids, methods)
    if "published_claims" in content:
        content["published_claims"] = tuple(PublishedClaim(**c) for c in content["published_claims"])
    if "tasks" in content:
        content["tasks"] = tuple(Task(**task) for task in content["tasks"])
    return Study(**content)


def _run(raw: Mapping[str, Any]) -> RunResult:
    pairs = {key: [(float(cost), float(value)) for cost, value in raw[key]] for key in ("accuracy", "reward")}
    solved = {int(at): math.nan if share is None else float(share) for at, share in raw["solved"].items()}
    return RunResult(**{**raw, **pairs, "solved": solved})


def _power(raw: Mapping[str, Any] | None) -> PowerAnalysis | None:
    if raw is None:
        return None
    detectable = raw["detectable"]
    return PowerAnalysis(**{**raw, "detectable": math.inf if detectable is None else detectable})
