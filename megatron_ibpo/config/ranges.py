"""Annotations of fields: ranges, as in `Annotated[int, at_least(1)]`."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.config.hooks import IMPORT_PATH, is_import_path
from megatron_ibpo.config.paths import are_distinct, as_specs


@dataclass(frozen=True)
class Range:
    """A rule for the value of a field. It is never applied to None."""

    holds: Callable[[Any], bool]
    rule: str
    """Completes "must be …"."""


def at_least(least: float) -> Range:
    """Allow values from `least` on."""
    return Range(lambda value: value >= least, f"at least {least}")


def within(least: int, most: int, why: str = "") -> Range:
    """Allow values from `least` to `most`."""
    rule = f"between {least} and {most}" + (f" ({why})" if why else "")
    return Range(lambda value: least <= value <= most, rule)


def above(bound: float, why: str = "") -> Range:
    """Allow values above `bound`."""
    return Range(lambda value: value > bound, f"above {bound}" + (f" ({why})" if why else ""))


def each(rule: Range) -> Range:
    """Apply one rule to every item of a sequence."""
    return Range(lambda values: all(map(rule.holds, values)), f"all {rule.rule}")


def or_word(word: float | str, other: Range, meaning: str = "") -> Range:
    """Allow one special value, such as "adaptive" or -1, besides the values of the other range."""
    named = f"{word} ({meaning})" if meaning else repr(word)
    return Range(lambda value: value == word or other.holds(value), f"{named} or {other.rule}")


POSITIVE = above(0)
NOT_NEGATIVE = at_least(0)
BELOW_1 = Range(lambda value: 0 <= value < 1, "at least 0 and below 1")
SHARE = Range(lambda value: 0 < value <= 1, "above 0 and at most 1")
UNIT = Range(lambda value: 0 <= value <= 1, "between 0 and 1")
AROUND_1 = Range(
    lambda bounds: len(bounds) == 2 and 0 <= bounds[0] < 1 < bounds[1] < math.inf,
    "two bounds LOW HIGH with 0 <= LOW < 1 < HIGH",
)
SECONDS = Range(lambda value: 0 < value <= 2_000_000, "above 0 and at most 2000000 (23 days)")
"""Time-outs. They are waited for with poll(2), whose limit is 2^31 milliseconds."""
MINUTES = Range(lambda value: 0 < value <= 30_000, "above 0 and at most 30000 (20 days)")
RANKS = within(1, 10_000_000)
"""Numbers of processes or GPUs. The limit is beyond any cluster, and low enough to count them one by one."""
COUNT = within(1, 10_000_000)
"""Numbers of tokens, sequences or layers. The limit is beyond any run, and low enough to list them."""
BYTES = within(1, 2**50)
"""Sizes of memory or files. A petabyte is more than any machine has."""
SEED = Range(lambda value: 0 <= value < 2**62, "at least 0 and below 2^62")
"""Megatron and torch add a per-rank offset to the seed in 64 bits."""
NAMED_VALUES = Range(
    lambda settings: all("" not in text.partition("=")[:2] and not _is_no_number(text) for text in settings),
    "name=value each, no value infinite or NaN",
)
"""Range of fields that are read by `named_values`; a recipe may give them as a mapping."""

EVAL_SETS = Range(
    lambda value: are_distinct(as_specs(value)),
    "SPEC, or NAME=SPEC each, names of letters, digits, dots, dashes and underscores, all different",
)
SOURCES = Range(lambda specs: all(specs), "no empty text among the sources")
"""Range of fields with sources of prompts; a recipe may give a source as text or as a mapping
(`recipes._source_spec`)."""
IMPORT_PATHS = Range(lambda names: all(map(is_import_path, names)), f"{IMPORT_PATH} each")
"""Range of names that rows may use; openenv://HOST:PORT has this form too."""
TARGETS = Range(lambda names: bool(names) and all(names), "one name or more, none of them empty")
"""Range of --lora-targets."""
SHARES = Range(
    lambda bounds: 0 <= bounds[0] <= bounds[1] <= 1, "two shares LOW HIGH with 0 <= LOW <= HIGH <= 1"
)
JSON_OBJECT = Range(lambda text: _is_object(text), "a JSON object")
"""Range of fields with settings as JSON; a recipe may give them as a mapping."""

FINITE = Range(
    lambda value: all(math.isfinite(part) for part in _parts(value) if isinstance(part, float)),
    "a finite number",
)
IN_64_BITS = Range(
    lambda value: all(-(2**63) <= part < 2**63 for part in _parts(value) if isinstance(part, int)),
    "a number of 64 bits",
)
OF_ALL = (FINITE, IN_64_BITS)
"""Ranges that apply to every field, in addition to its own."""


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _is_object(text: str) -> bool:
    try:
        return isinstance(read_json(text), dict)
    except ValueError:
        return False


def _is_no_number(setting: str) -> bool:
    """Return whether the value of a "name=value" setting reads as infinity or NaN."""
    try:
        return not math.isfinite(float(setting.partition("=")[2]))
    except ValueError:
        return False


def named_values(settings: Iterable[str]) -> dict[str, str]:
    """Return {name: value} of "name=value" settings; a later value of a name wins. Names get underscores."""
    parts = (text.partition("=") for text in settings)
    return {name.strip().replace("-", "_"): value.strip() for name, _, value in parts}
