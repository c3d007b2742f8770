import json
import statistics
from collections import defaultdict


def read(path, seed):
    """The records of the campaign with this seed."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if record["seed"] == seed]


def append(path, records):
    """A run's records, all at once: a campaign that is interrupted leaves no part of a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


def table(records):
    """Count, and seconds of recovery, median and worst, by what was hit and how; in Markdown."""
    kinds = defaultdict(list)
    for record in records:
        if record["kind"] == "kill":
            torn = f", torn {record['torn']}" if "torn" in record else ""
            kinds[f"{record['victim']} | {record['signal']}{torn}"].append(record["recovery_seconds"])
    lines = ["| victim | signal | times | to the next step: median | worst |", "|---|---|---:|---:|---:|"]
    for kind, own in sorted(kinds.items()):
        lines.append(f"| {kind} | {len(own)} | {statistics.median(own):.1f} s | {max(own):.1f} s |")
    return "\n".join(lines)
