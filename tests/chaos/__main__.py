import os
import sys
import time
from pathlib import Path

from chaos.campaign import one_run
from chaos.processes import end_on_sigterm
from chaos.results import append, read, so_far, table
from chaos.trial import ROOT

KILLS_OF_A_RUN = 25
MOST_SAID = 6000  # characters of the last driver's output, where something was wrong


def main() -> int:
    end_on_sigterm()
    kills, seed, minutes = [*sys.argv[1:], *("20", "0", "inf")[len(sys.argv) - 1 :]]
    kills, seed, until = int(kills), int(seed), time.monotonic() + 60 * float(minutes)
    results = Path(os.environ.get("CHAOS_RESULTS", ROOT / "tools/results/chaos.jsonl"))
    while True:
        done, number = so_far(read(results), seed)
        if done >= kills or time.monotonic() > until:
            break
        print(f"{done} of {kills} kills; run {number}", flush=True)
        records, run, place = one_run(seed, number, min(KILLS_OF_A_RUN, kills - done), until)
        append(results, [*records, run])
        print(f"run {number}: {len(records)} kills in {run['seconds']} s", flush=True)
        if run["problems"]:
            said = sorted(place.glob("driver_*.log"))[-1].read_text(errors="replace")[-MOST_SAID:]
            print("\n".join([said, *run["problems"], f"all of it is kept in {place}"]), flush=True)
            return 1
    print(table(read(results)))
    return 0


sys.exit(main())
