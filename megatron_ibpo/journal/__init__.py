"""Stub until merged."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SampleKey:
    prompt_index: int
    attempt: int
    kind: Literal["response", "correction"]
    index: int
