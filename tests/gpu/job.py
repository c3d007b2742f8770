"""The settings of a part of `tests/gpu.sh`, and its report."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LARGE_BYTES = 64 * 2**30  # a GPU with less memory gets smaller sizes than reports are about


class Skipped(Exception):
    """This machine lacks what the part needs; the message names it."""


@dataclass
class Job:
    device: str  # cuda or cpu
    quick: bool
    scratch: Path  # a directory of its own, gone when the part ends
    variant: str = ""  # name of one of several cases of the same module
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def on_gpu(self):
        return self.device == "cuda"

    @property
    def is_large(self):
        import torch

        return self.on_gpu and torch.cuda.get_device_properties(0).total_memory >= LARGE_BYTES

    def note(self, **numbers):
        self.found |= numbers
        new = self.scratch / "found.new"
        new.write_text(json.dumps(self.found, ensure_ascii=False), encoding="utf-8")
        new.replace(self.scratch / "found.json")


def check(holds, otherwise):
    """The part fails with `otherwise` unless something holds; python -O would drop an assert."""
    if not holds:
        raise AssertionError(otherwise)
