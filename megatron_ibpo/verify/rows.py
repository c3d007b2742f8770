"""The result of the checks: rows with a verdict, their table and their JSON."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from megatron_ibpo.basics.text import fault_text, without_keys
from megatron_ibpo.report import jsonable

LOOK_AT = {
    "split": "the loss's divisor and weights (--loss-aggregation, --loss-variant, --token-credit), dropout",
    "reference": "the model's conversion and export, rotary positions, temperature, the loss's mask",
    "engine": "temperature, top-p and top-k, the engine's precision, caches that outlive weights (arrival)",
    "arrival": "--check-weight-update-equal, the engine's name and layout of this tensor, seeds of requests",
    "tokens": "the chat template, the tokenizer, the engine's stop tokens",
    "rewards": "the reward function",
    "data": "ibpo data, --deduplicate, --drop-long-prompts",
    "resume": "the checkpoint's optimizer state, learning rate and step; the journal",
    "memory": "ibpo plan",
}
"""Check → what to look at where it is wrong, in the order of the table."""
CHECKS = tuple(LOOK_AT)


class NotCheckedError(Exception):
    """A check that cannot be made with this model, data or machine; its message is the reason."""


@dataclass(frozen=True)
class Row:
    """One line of the result: `check` is the name of its check, a colon and what it looked at, `bound` the
    largest figure that is right, `reason` what was measured, why it was not, or what to look at next."""

    check: str
    verdict: Literal["right", "wrong", "not checked"]
    figure: float | None = None
    bound: float | None = None
    bound_from: str = ""
    reason: str = ""


def measured(check: str, figure: float, bound: float, bound_from: str, reason: str) -> Row:
    """Return the row of a figure, which `reason` describes; it is right up to `bound`."""
    is_right = math.isfinite(figure) and figure <= bound
    text = reason if is_right else f"{reason}; look at {LOOK_AT[check_of(check)]}"
    return Row(check, "right" if is_right else "wrong", figure, bound, bound_from, text)


def exact(check: str, faults: Sequence[str], reason: str) -> Row:
    """Return the row of a check that allows no fault; three are named behind `reason`, what was looked at."""
    named = f"{reason}: {'; '.join(faults[:3])}" if faults else reason
    return measured(check, float(len(faults)), 0.0, "exact", named)


def attempted(check: str, work: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """Yield the rows of a check. One that cannot be made is "not checked"; one that fails is wrong, since the
    run would fail there too."""
    try:
        yield from work()
    except NotCheckedError as why:
        yield Row(check, "not checked", reason=str(why))
    except Exception as error:
        yield Row(check, "wrong", reason=f"it failed: {fault_text(error)}")


def largest(figures: Mapping[str, float]) -> tuple[float, str]:
    """Return the largest figure, or a NaN, and its name."""
    name = max(figures, key=lambda name: (math.isnan(figures[name]), figures[name]))
    return figures[name], name


def check_of(row_name: str) -> str:
    """Return the check that a row belongs to."""
    return row_name.partition(":")[0]


def as_json(rows: Sequence[Row], about: dict[str, Any]) -> str:
    """Return the content of verify.json."""
    content = {**about, "checks": [asdict(row) for row in rows]}
    return without_keys(json.dumps(jsonable(content), indent=1, allow_nan=False)) + "\n"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, a line each, with the reason below."""
    lines = [f"{'check':<34} {'verdict':<12} {'figure':>9} {'bound':>9}  bound from"]
    for row in rows:
        figure, bound = ("" if value is None else f"{value:.3g}" for value in (row.figure, row.bound))
        lines.append(f"{row.check:<34} {row.verdict:<12} {figure:>9} {bound:>9}  {row.bound_from}".rstrip())
        lines += [f"    {row.reason}"] if row.reason else []
    counts = {name: sum(row.verdict == name for row in rows) for name in ("right", "wrong", "not checked")}
    return "\n".join([*lines, "", ", ".join(f"{count} {name}" for name, count in counts.items())])
