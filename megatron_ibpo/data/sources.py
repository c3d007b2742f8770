"""The specification of one source of prompts: a location, and settings after a question mark.

train.jsonl?weight=2&suffix=Answer+in+\\boxed{}.
reasoning_gym://chain_sum?level=1&weight=0.5
"""

from dataclasses import dataclass
from fractions import Fraction
from urllib.parse import parse_qsl, urlencode

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
    """Parse a source as the user wrote it. Parameters of a generated task stay with its location.

    Raises:
        DataError: an unknown setting of a file, with the nearest; a weight that is not a positive number.
    """
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
    return SourceSpec(
        location,
        weight=_weight(ours.get("weight", "1"), spec),
        task=ours.get("task"),
        suffix=ours.get("suffix", ""),
        rm_type=ours.get("rm_type"),
        split=ours.get("split"),
        only=_only(ours["only"], spec) if "only" in ours else None,
        input_key=ours.get("input_key"),
        label_key=ours.get("label_key"),
    )


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
