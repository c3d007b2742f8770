"""Runs that others published: one file for each source, and what each of their rows leaves open.

A row holds facts that its source states, with the file and commit (or address and date) at which they were
read. `open` names what the source does not say, each with a range; the row's own value is then the middle
that a prediction starts from. `models.yaml` has dimensions of models that examples/models lacks.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

_PLACE = Path(__file__).parent
KINDS = ("training", "generation", "step", "update")


@dataclass(frozen=True)
class Row:
    """A published figure or several of one run."""

    source: str
    name: str
    kind: str
    """One of `KINDS`."""
    facts: Mapping[str, Any]
    """Model, hardware, layout, lengths."""
    left_open: Mapping[str, tuple[Any, Any]]
    """Fact → (lower, upper)."""
    measured: Mapping[str, float]
    """Figure → its value. The name ends in its unit."""
    cited: str
    """Where it was read."""

    def with_facts(self, **facts: Any) -> Mapping[str, Any]:
        """The facts, some of them others."""
        return {**self.facts, **facts}


def read_evidence() -> list[Row]:
    """All rows, by source.

    Raises:
        ValueError: a file misses something.
    """
    paths = sorted(path for path in _PLACE.glob("*.yaml") if path.stem != "models")
    return [row for path in paths for row in _rows(path)]


def about() -> dict[str, str]:
    """Source → what it is."""
    paths = sorted(path for path in _PLACE.glob("*.yaml") if path.stem != "models")
    return {path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))["about"] for path in paths}


def model_dimensions() -> dict[str, dict[str, Any]]:
    """Model → what its config.json says of dimensions."""
    raw: dict[str, dict[str, Any]] = yaml.safe_load((_PLACE / "models.yaml").read_text(encoding="utf-8"))
    return raw


def halves(rows: Sequence[Row]) -> dict[str, Literal["fitted", "held out"]]:
    """Source → the half that it falls into, whole: in order of the SHA-256 of their names the sources of each
    kind of row (that which most of their rows have) are fitted and held out in turn. So both halves hold
    every kind that two sources have, and nobody chooses."""
    by_source: dict[str, Counter[str]] = {}
    for row in rows:
        by_source.setdefault(row.source, Counter())[row.kind] += 1
    main = {source: kinds.most_common(1)[0][0] for source, kinds in by_source.items()}
    found: dict[str, Literal["fitted", "held out"]] = {}
    for kind in KINDS:
        alike = [source for source in main if main[source] == kind]
        for place, source in enumerate(sorted(alike, key=_digest)):
            found[source] = "held out" if place % 2 else "fitted"
    return found


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def _rows(path: Path) -> Iterator[Row]:
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    for row in raw["rows"]:
        try:
            facts = dict(row)
            name, kind, measured = facts.pop("name"), facts.pop("kind"), facts.pop("measured")
            file, date, commit = facts.pop("file"), facts.pop("date"), facts.pop("commit", None)
            left_open = {key: (low, high) for key, (low, high) in facts.pop("open", {}).items()}
            facts.pop("note", None)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}: {row.get('name')}: {error}") from None
        if kind not in KINDS or not measured or not {"model", "hardware"} <= facts.keys():
            raise ValueError(f"{path}: {name} must have a kind of {KINDS}, a figure, a model and hardware")
        where = file if commit is None else f"{raw['repository']} {file} at {commit[:8]}"
        yield Row(path.stem, name, kind, facts, left_open, measured, f"{where}, {date}")
