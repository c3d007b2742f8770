"""Published runs of other projects, as data: tools/planner_evidence/ holds one file per source.

A row holds facts that its source states, with the file and commit (or address and date) where they were read.
`open` names what the source does not say, each with a range; the row's own value is then the middle, from
which a prediction starts. `models.yaml` has dimensions of models that examples/models lacks.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from megatron_ibpo.models import ModelShape, read_hf_config
from megatron_ibpo.models.families import family_module
from megatron_ibpo.models.shape import Fields

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "tools/planner_evidence"
KINDS = ("training", "generation", "step", "update")


@dataclass(frozen=True)
class Row:
    """A published run with one figure or several."""

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
    """Place where it was read."""

    def with_facts(self, **facts: Any) -> Mapping[str, Any]:
        """Return the facts, with some of them replaced."""
        return {**self.facts, **facts}

    @property
    def times(self) -> dict[str, float]:
        """The figures of time, without those of memory."""
        return {name: value for name, value in self.measured.items() if not name.endswith("_gib")}


def read_evidence() -> list[Row]:
    """Return all rows, by source.

    Raises:
        ValueError: a file lacks something.
    """
    return [row for path in sorted(PLACE.glob("*.yaml")) if path.stem != "models" for row in _rows(path)]


@cache
def shape_of(model: str) -> ModelShape | None:
    """Return a model's shape, or None for models that this project does not know."""
    folder = ROOT / "examples/models" / model
    if folder.is_dir():
        return read_hf_config(folder)
    raw = yaml.safe_load((PLACE / "models.yaml").read_text(encoding="utf-8")).get(model)
    if raw is None:
        return None
    shape: ModelShape = family_module(raw["model_type"]).read(Fields(raw, Path(model)))
    return shape


def halves(rows: Sequence[Row]) -> dict[str, Literal["fitted", "held out"]]:
    """Return the half of each source. In order of the SHA-256 of their names, the sources of each kind of row
    (the kind of most of their rows) alternate whole between fitted and held out."""
    by_source: dict[str, Counter[str]] = {}
    for row in rows:
        by_source.setdefault(row.source, Counter())[row.kind] += 1
    main = {source: kinds.most_common(1)[0][0] for source, kinds in by_source.items()}
    half_of: dict[str, Literal["fitted", "held out"]] = {}
    for kind in KINDS:
        alike = [source for source in main if main[source] == kind]
        for place, source in enumerate(sorted(alike, key=_digest)):
            half_of[source] = "held out" if place % 2 else "fitted"
    return half_of


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def _rows(path: Path) -> Iterator[Row]:
    raw = yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)  # a tenth of the time
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
        source = file if commit is None else f"{raw['repository']} {file} at {commit[:8]}"
        yield Row(path.stem, name, kind, facts, left_open, measured, f"{source}, {date}")
