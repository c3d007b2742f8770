"""Leaves what a run whose true accuracy is known would leave, at once; and runs that fail or do not end."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import yaml


def train(arguments, *, best, gains, pause):
    """Learning rates but the `best` of a preset lose accuracy by the square of their distance; a preset adds
    its gain."""
    settings = {}
    for flag, path in pairwise(arguments):
        if flag == "--config":
            settings |= yaml.safe_load(Path(path).read_text())
    out = Path(arguments[arguments.index("--run-dir") + 1])
    seed, preset = int(settings["seed"]), settings["advantage-estimator"]
    distance = math.log10(float(settings.get("lr", 3e-4)) / best.get(preset, 3e-4))
    truth = 0.5 - 0.1 * distance**2 + gains.get(preset, 0.0)
    # the problems of tuning flatter every method alike: a judgement by them would show it
    truth += 0.2 * (settings.get("eval-half") == "tuning")
    accuracy = truth + 0.01 * random.Random(seed).gauss(0, 1)
    (out / "evaluations").mkdir(parents=True)
    with (out.parent / "order").open("a") as order:
        order.write(f"{os.getpid()}\n")
    time.sleep(pause)
    spent = {f"spent_{unit}": settings["budget"] for unit in ("accelerator_seconds", "tokens", "flops")}
    rows = [{"kind": "step", "step": n, "reward": accuracy, **spent} for n in range(1, 8)]
    found = {"accuracy": accuracy, "greedy_accuracy": 0.9, "eval/chain_sum@0.6/accuracy": accuracy + 0.1}
    rows.append({"kind": "evaluation", "step": 7, **found, **spent})
    lines = (json.dumps(row | {"seconds": {}}) + "\n" for row in rows)
    (out / "metrics.jsonl").write_text("".join(lines))
    solved = {str(n): {"sampled": [int(n < accuracy * 200)]} for n in range(200)}
    (out / "evaluations/step_000007.json").write_text(json.dumps({"step": 7, "problems": solved}))
    summary = {"status": "finished", "steps": 7, "accuracy_end": accuracy, "seconds_total": 30.0}
    (out / "summary.json").write_text(json.dumps(summary))
    return 0


def stubborn(arguments):
    """Ignore signals, start another process and write its number into the file `arguments[0]`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    unfinished = Path(arguments[0] + ".part")
    unfinished.write_text(str(below.pid))
    unfinished.rename(arguments[0])  # it is never seen half written
    time.sleep(600)


def failing(arguments):
    print("why")
    return 3
