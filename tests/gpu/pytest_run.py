"""pytest in a process of its own, and what it counted."""

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from job import Skipped

ROOT = Path(__file__).resolve().parent.parent.parent


def run_pytest(arguments, scratch, environment, prefix=()) -> dict[str, Any]:
    """Return how many tests passed, failed and were skipped, what failed and why, and the exit status."""
    for module in ("pytest", "hypothesis"):
        if importlib.util.find_spec(module) is None:
            raise Skipped(f"{module} is not installed")
    results = scratch / "junit.xml"
    flags = ["-q", "-p", "no:cacheprovider", "--durations=5", f"--junitxml={results}"]
    command = [*prefix, sys.executable, "-m", "pytest", *flags, *arguments]
    status = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL).returncode
    counts = {"exit_status": status, "passed": 0, "failed": 0, "skipped": 0, "failures": {}}
    if not results.exists():
        return counts
    for case in ElementTree.parse(results).iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error")]
        kind = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        counts[kind] += 1
        if bad:
            counts["failures"][case.get("name")] = (bad[0].get("message") or "")[:300]
    return counts
