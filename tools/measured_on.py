"""On what a benchmark was run, to be kept with its results."""

from __future__ import annotations

import datetime
import os
import platform
import re
from importlib.metadata import version
from pathlib import Path


def machine(*packages: str) -> dict[str, object]:
    """Date, processor, cores that this process may use, Python, and the versions of `packages`."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*:\s*(.*)", info)
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": model[1] if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }
