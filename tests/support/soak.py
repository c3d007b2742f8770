"""See tests/soak.sh."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import psutil
from chaos.processes import below, by_kind, end_on_sigterm, engine_index, title
from chaos.trial import STEP_LINE, environment_within

from megatron_ibpo.basics.versions import machine
from support.paths import ROOT

MOST_GROWTH_MIB = 20.0
WARM = 0.1  # of the steps, in which caches fill: growth counts from there on
EVERY_S = 5.0
RECIPES = "--config examples/recipes/"
MODELS = {
    "next": "tiny_qwen3_next_ibpo.yaml --tensor-model-parallel-size 1 --expert-model-parallel-size 1",
    "dense": "small_cpu.yaml --hf-checkpoint examples/tiny_qwen3",
}
FLAGS = "--num-trainers 1 --rollout-batch-size 4 --n-samples-per-prompt 4 --num-steps-per-rollout 1"
OTHERS = "--max-staleness 1 --eval-num-prompts 0 --num-rollout"


def main() -> int:
    end_on_sigterm()
    words = [*sys.argv[1:], *("2000", "next")[len(sys.argv) - 1 :]]
    steps, model = int(words[0]), words[1]
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        place = Path(name)
        (place / "tmp").mkdir()
        began = time.monotonic()
        status, memory = _run(place, steps, f"{RECIPES}{MODELS[model]} {FLAGS} {OTHERS} {steps}".split())
        seconds = time.monotonic() - began
        if status != 0:
            print((place / "log").read_text()[-3000:])
            return status
    if not memory:
        print(f"{steps} steps are too few to tell")
        return 1
    growth, warm = {}, WARM * steps  # growth of medians, from the first tenth after the start to the last
    for process, series in sorted(memory.items()):
        early = [mib for step, mib in series if warm <= step < 2 * warm]
        late = [mib for step, mib in series if step > 0.9 * series[-1][0]]
        growth[process] = statistics.median(late) - statistics.median(early)
    for process, grown in growth.items():
        print(f"{process}: {memory[process][-1][1]:.0f} MiB, {grown:+.1f} MiB since step {WARM * steps:.0f}")
    result = {
        "machine": machine(), "command": f"bash tests/soak.sh {steps} {model}", "steps": steps,
        "seconds": round(seconds),
        "growth_mib": {process: round(grown, 1) for process, grown in growth.items()},
        "mib": dict(sorted(memory.items())),
    }  # fmt: skip
    (ROOT / f"tools/results/soak_{model}.json").write_text(json.dumps(result) + "\n")
    return int(max(growth.values()) > MOST_GROWTH_MIB)


def _run(place, steps, flags):
    """Exit status of the run; for each process that lived all the time [(step, MiB that only it has)]."""
    command = [sys.executable, "-m", "megatron_ibpo.commands.train", *flags]
    memory = defaultdict(list)
    with (place / "log").open("wb") as log:
        driver = subprocess.Popen(
            [*command, "--run-dir", str(place / "run")], env=environment_within(place), cwd=ROOT,
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            while driver.poll() is None:
                lines = STEP_LINE.findall((place / "log").read_bytes())
                if lines and int(lines[-1][0]) < steps:
                    for name, mib in _memory(driver.pid).items():
                        memory[name].append((int(lines[-1][0]), mib))
                time.sleep(EVERY_S)
        finally:
            driver.kill()
    latest = max((series[-1][0] for series in memory.values()), default=0)
    lived = [name for name, own in memory.items() if own[0][0] < WARM * steps and own[-1][0] == latest]
    return driver.returncode, {name: memory[name] for name in lived}


def _memory(driver):
    processes = below(driver)
    named = {driver: "driver"}
    for kind, found in by_kind(processes).items():
        for process in found:
            index = engine_index(process) if kind == "engine" else None
            named[process.pid] = f"{kind} {process.pid if index is None else index}"
    memory = {}
    for process in [psutil.Process(driver), *processes]:
        with suppress(psutil.Error):
            words = title(process).split()
            name = named.get(process.pid) or f"{os.path.basename(words[0])} {process.pid}"
            memory[name] = round(process.memory_full_info().uss / 2**20, 1)
    return memory


if __name__ == "__main__":
    sys.exit(main())
