"""Results of campaigns: a line of JSON for each fault, and one for each run."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def append(path: Path, records: Iterable[Record]) -> None:
    """A run's records, all at once: a campaign that is interrupted leaves no part of a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


def so_far(records: Iterable[Record], seed: int) -> tuple[int, int]:
    """(kills, number of the next run) of the campaign with this seed."""
    own = [record for record in records if record["seed"] == seed]
    kills = sum(record["kind"] == "kill" for record in own)
    return kills, 1 + max((record["run"] for record in own), default=-1)


def beyond_start(record: Record) -> float | None:
    """Return the seconds from a fault to the next completed step, without those that the process started in
    the victim's place took to start, nor the time-out that finds what hangs; for an engine until it had
    joined, where that was seen. None where the start was not seen."""
    found_after = record.get("time_out_seconds", 0.0)
    recovery, start = record["recovery_seconds"], record.get("start_seconds")
    if recovery > found_after:  # else the step did not wait for what hangs
        recovery -= found_after
    if "driver_status" in record:
        return None if start is None else recovery - start
    engine_start = record.get("engine_start_seconds")
    if record.get("engines_left") == 0:  # the next step had to wait for it
        return None if engine_start is None else max(recovery - engine_start, 0.0)
    if record.get("replaced_seconds") is not None and engine_start is not None:
        return max(recovery, record["replaced_seconds"] - found_after - engine_start)
    return recovery - (start or 0.0)


def table(records: Sequence[Record]) -> str:
    kinds: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record["kind"] == "kill":
            torn = f", torn {record['torn']}" if "torn" in record else ""
            kinds[record["victim"], record["signal"] + torn].append(record)
    lines = [
        "| victim | signal | times | to the next step: median, worst | less its own start: median, worst |",
        "|---|---|---:|---:|---:|",
    ]
    for (victim, signal), found in sorted(kinds.items()):
        whole = [record["recovery_seconds"] for record in found]
        beyond = [seconds for record in found if (seconds := beyond_start(record)) is not None]
        lines.append(f"| {victim} | {signal} | {len(found)} | {_spread(whole)} | {_spread(beyond)} |")
    return "\n".join(lines)


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.1f} s, {max(seconds):.1f} s" if seconds else "–"
