"""Sources of held-out prompts: SPEC alone, or NAME=SPEC where there are several."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

_NAMED = re.compile(r"([A-Za-z0-9_][\w.-]*)=(.*)", re.DOTALL | re.ASCII)
"""A name has no slash and no colon, so that the parameters of a URL are not taken for it."""


@dataclass(frozen=True)
class EvalSpec:
    """One set of held-out prompts, as the user named it."""

    name: str | None
    """None where none was given."""
    spec: str

    def __str__(self) -> str:
        return self.spec if self.name is None else f"{self.name}={self.spec}"


def as_specs(value: str | Sequence[str] | None) -> list[EvalSpec]:
    """What --eval-prompt-data means."""
    texts = [value] if isinstance(value, str) else value or ()
    return [_spec(text) for text in texts]


def relocated(value: str | tuple[str, ...], locate: Callable[[str], str]) -> str | tuple[str, ...]:
    """The same sources, each with what `locate` makes of its part after the name."""
    # an empty one is refused later, and would be taken for the directory where the user stands
    moved = [str(replace(spec, spec=spec.spec and locate(spec.spec))) for spec in as_specs(value)]
    return moved[0] if isinstance(value, str) else tuple(moved)


def are_distinct(specs: Sequence[EvalSpec]) -> bool:
    """Whether every one names a source, and no two have the same name."""
    names = [spec.name for spec in specs if spec.name is not None]
    return all(spec.spec for spec in specs) and len(names) == len(set(names))


def _spec(text: str) -> EvalSpec:
    found = _NAMED.fullmatch(text)
    return EvalSpec(None, text) if found is None else EvalSpec(found[1], found[2])
