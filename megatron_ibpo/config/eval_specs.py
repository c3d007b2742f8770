"""Sources of held-out prompts: SPEC alone, or NAME=SPEC where there are several."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

_NAMED = re.compile(r"([A-Za-z0-9_][\w.-]*)=(.*)", re.DOTALL | re.ASCII)
"""Names have no slash or colon, so that the parameters of a URL are not mistaken for a name."""


@dataclass(frozen=True)
class EvalSpec:
    """One set of held-out prompts, as the user named it."""

    name: str | None
    """None if the user gave no name."""
    spec: str

    def __str__(self) -> str:
        return self.spec if self.name is None else f"{self.name}={self.spec}"


def as_specs(value: str | Sequence[str] | None) -> list[EvalSpec]:
    """Parse the value of --eval-prompt-data."""
    texts = [value] if isinstance(value, str) else value or ()
    return [_spec(text) for text in texts]


def relocated(value: str | tuple[str, ...], locate: Callable[[str], str]) -> str | tuple[str, ...]:
    """Return the same sources with `locate` applied to the part after the name."""
    # an empty one is refused later; here it would become the user's directory
    moved = [str(replace(spec, spec=spec.spec and locate(spec.spec))) for spec in as_specs(value)]
    return moved[0] if isinstance(value, str) else tuple(moved)


def are_distinct(specs: Sequence[EvalSpec]) -> bool:
    """Return whether every spec names a source and all names differ."""
    names = [spec.name for spec in specs if spec.name is not None]
    return all(spec.spec for spec in specs) and len(names) == len(set(names))


def _spec(text: str) -> EvalSpec:
    found = _NAMED.fullmatch(text)
    return EvalSpec(None, text) if found is None else EvalSpec(found[1], found[2])
