import json
import statistics
from collections import defaultdict


def read(path):
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def append(path, records):
    """A run's records, all at once: a campaign that is interrupted leaves no part of a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


def so_far(records, seed):
    """(kills, number of the next run) of the campaign with this seed."""
    own = [record for record in records if record["seed"] == seed]
    kills = sum(record["kind"] == "kill" for record in own)
    return kills, 1 + max((record["run"] for record in own), default=-1)


def table(records):
    """Count, and seconds of recovery, median and worst, by what was hit and how; in Markdown."""
    kinds = defaultdict(list)
    for record in records:
        if record["kind"] == "kill":
            torn = f", torn {record['torn']}" if "torn" in record else ""
            kinds[record["victim"], record["signal"] + torn].append(record["recovery_seconds"])
    lines = ["| victim | signal | times | to the next step: median, worst |", "|---|---|---:|---:|"]
    for (victim, signal), seconds in sorted(kinds.items()):
        spread = f"{statistics.median(seconds):.1f} s, {max(seconds):.1f} s"
        lines.append(f"| {victim} | {signal} | {len(seconds)} | {spread} |")
    return "\n".join(lines)
