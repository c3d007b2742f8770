"""One source of prompts: its specification, a location with settings such as
train.jsonl?weight=2&suffix=Briefly, and its rows that are left out: those held out for evaluation, and a
count of all by reason."""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any
from urllib.parse import parse_qsl, urlencode

from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.basics.text import counted
from megatron_ibpo.config import nearest
from megatron_ibpo.data.tokenizer import DataError


@dataclass(frozen=True)
class SourceSpec:
    """A source as the user names it."""

    location: str
    """A path, or a URL with the parameters of a generated task."""
    weight: Fraction = Fraction(1)
    """Weight in a mixture: the source's share of prompts, relative to the other weights."""
    task: str | None = None
    """Task (`Prompt.task`) of rows that name none."""
    suffix: str = ""
    """Text appended to every question."""
    rm_type: str | None = None
    """Verifier of rows that name none; None: --rm-type."""
    split: str | None = None
    """Part of a directory; None: train, or the held-out one for evaluation."""
    only: tuple[str, str] | None = None
    """(field, value): keep only rows whose field has this value; dots lead into objects."""
    input_key: str | None = None
    label_key: str | None = None


_NAMES = ("weight", "task", "suffix", "rm_type", "split", "only", "input_key", "label_key")


def read_spec(spec: str) -> SourceSpec:
    """Parse a source as the user wrote it. Parameters of a generated task stay with its location. Raises
    DataError for an unknown setting of a file, with the nearest, and for a weight that is not a positive
    number."""
    location, mark, query = spec.partition("?")
    try:
        settings = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise DataError(f"{spec}: settings must read name=value&name=value ({error})") from error
    ours = {name: value for name, value in settings if name in _NAMES}
    theirs = [(name, value) for name, value in settings if name not in _NAMES]
    if "://" in location:
        if not ours:
            return SourceSpec(spec)
        location += mark + urlencode(theirs) if theirs else ""
    elif theirs:
        name = theirs[0][0]
        raise DataError(f"{spec}: a file has no setting {name!r}{nearest(name, _NAMES)}")
    parsers: dict[str, Callable[[str, str], Any]] = {"weight": _weight, "only": _only}
    parsed = {name: parse(ours[name], spec) for name, parse in parsers.items() if name in ours}
    return SourceSpec(location, **(ours | parsed))


def _only(text: str, spec: str) -> tuple[str, str]:
    field, equals, value = text.partition("=")
    if not equals:
        raise DataError(f"{spec}: only must read FIELD=VALUE (only=FIELD%3DVALUE where = is not taken)")
    return field, value


def _weight(text: str, spec: str) -> Fraction:
    try:
        weight = Fraction(text)
    except (ValueError, ZeroDivisionError):
        weight = Fraction(0)
    if not 0 < weight <= 10**9:
        raise DataError(f"{spec}: weight must be a number above 0, is {text!r}")
    return weight


_NAMED = 5
"""Number of rows that are named; finding a line in a large file takes a while."""

BAD_ROW, TOO_LONG, DUPLICATE, NOT_CHOSEN = "bad rows", "too long prompts", "duplicates", "not chosen by only"
HELD_OUT = "held out for evaluation"
PASS_RATE, NOT_MEASURED = "outside the pass-rate window", "without a measured pass rate"


@dataclass
class Tally:
    """The counts of one source. A row counts once however often it is drawn."""

    source: str
    counts: Counter[str] = field(default_factory=Counter)
    named: dict[str, list[str]] = field(default_factory=dict)
    """Reason → places of the first few rows."""
    _counted_keys: set[Hashable] = field(default_factory=set)

    def add(self, reason: str, key: Hashable, say: Callable[[], str]) -> None:
        """Count a row.

        Args:
            key: identifies the row.
            say: returns its place and its fault; called for the first few rows only.
        """
        if key in self._counted_keys:
            return
        self._counted_keys.add(key)
        self.counts[reason] += 1
        named = self.named.setdefault(reason, [])
        if len(named) < _NAMED:
            named.append(say())

    def lines(self) -> list[str]:
        """Return the lines to print: one per reason, and the bad rows that are named."""
        lines = [f"{self.source}: left out {count} {reason}" for reason, count in sorted(self.counts.items())]
        bad = self.named.get(BAD_ROW, [])
        lines += [f"  {text}" for text in bad]
        if (num_unnamed := self.counts[BAD_ROW] - len(bad)) > 0 and bad:
            lines.append(f"  and {counted(num_unnamed, 'more bad row')}")
        return lines


@dataclass(frozen=True)
class Division:
    """A division of questions: equal ones are on one side, whatever the order of the rows."""

    seed: int
    limit: int
    """Questions with a hash up to this are held out."""

    def holds_out(self, question: str) -> bool:
        """Return True if the question is not trained on."""
        return question_hash(question, self.seed) <= self.limit


def question_hash(question: str, seed: int) -> int:
    """Return a number in [0, 2^63) that depends on the question and the seed alone."""
    return derive_seed("held out", seed, question)
