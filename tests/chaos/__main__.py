import gzip
import json
import os
import sys
import time
from pathlib import Path

from chaos.campaign import one_run
from chaos.processes import end_on_sigterm
from chaos.trial import ROOT

KILLS_OF_A_RUN = 25


def open_text(path, mode):
    """Open a file of records, which is gzipped if its name says so."""
    return (gzip.open if path.suffix == ".gz" else open)(path, mode, encoding="utf-8")


def read_records(path):
    if not path.exists():
        return []
    with open_text(path, "rt") as file:
        return [json.loads(line) for line in file]


def main():
    end_on_sigterm()
    kills, seed, minutes = [*sys.argv[1:], *("20", "0", "inf")[len(sys.argv) - 1 :]]
    kills, seed, until = int(kills), int(seed), time.monotonic() + 60 * float(minutes)
    results = Path(os.environ.get("CHAOS_RESULTS", ROOT / "tools/results/chaos.jsonl.gz"))
    while True:
        own = [record for record in read_records(results) if record["seed"] == seed]
        done = sum(record["kind"] == "kill" for record in own)
        number = 1 + max((record["run"] for record in own), default=-1)
        if done >= kills or time.monotonic() > until:
            break
        print(f"{done} of {kills} kills; run {number}", flush=True)
        records, run, place = one_run(seed, number, min(KILLS_OF_A_RUN, kills - done), until)
        results.parent.mkdir(parents=True, exist_ok=True)
        with open_text(results, "at") as file:  # all at once: none has a part of a run
            file.write("".join(json.dumps(record) + "\n" for record in [*records, run]))
        print(f"run {number}: {len(records)} kills in {run['seconds']} s", flush=True)
        if run["problems"]:
            said = sorted(place.glob("driver_*.log"))[-1].read_text(errors="replace")[-6000:]
            print("\n".join([said, *run["problems"], f"all of it is kept in {place}"]), flush=True)
            return 1
    print(f"{done} kills in {number} runs")
    return 0


sys.exit(main())
