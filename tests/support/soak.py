"""See tests/soak.sh."""

import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import psutil
from chaos.processes import below, by_kind, end_on_sigterm, engine_index
from chaos.trial import Trial

from megatron_ibpo.basics.versions import machine
from support.paths import ROOT

MOST_GROWTH_MIB = 20.0
WARM = 0.1  # of the steps, in which caches fill: growth counts from there on
EVERY_S = 5.0
MODELS = {
    "next": "tiny_qwen3_next_ibpo.yaml --tensor-model-parallel-size 1 --expert-model-parallel-size 1",
    "dense": "small_cpu.yaml --hf-checkpoint examples/tiny_qwen3",
}
FLAGS = (
    "--num-trainers 1 --rollout-batch-size 4 --n-samples-per-prompt 4 --num-steps-per-rollout 1 "
    "--max-staleness 1 --eval-num-prompts 0"
)


def main():
    end_on_sigterm()
    steps, model = [*sys.argv[1:], *("2000", "next")[len(sys.argv) - 1 :]]
    flags = f"--config examples/recipes/{MODELS[model]} {FLAGS} --num-rollout {steps}".split()
    began, steps = time.monotonic(), int(steps)
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        place = Path(name)
        (place / "tmp").mkdir()
        trial, memory = Trial(place, place / "run", seed=0, flags=flags), defaultdict(list)
        trial.start()
        try:
            while trial.ended() is None:
                if 0 < (step := trial.step()) < steps:
                    for process, mib in _memory(trial.driver.pid).items():
                        memory[process].append((step, mib))
                time.sleep(EVERY_S)
        finally:
            trial.driver.kill()
        if not trial.has_finished():
            print(trial.log.read_text()[-3000:])
            return 1
    latest = max((series[-1][0] for series in memory.values()), default=0)
    memory = {  # process that lived all the time → [(step, MiB that only it has)]
        process: series
        for process, series in sorted(memory.items())
        if series[0][0] < WARM * steps and series[-1][0] == latest
    }
    if not memory:
        print(f"{steps} steps are too few to tell")
        return 1
    growth, warm = {}, WARM * steps  # growth of medians, from the first tenth after the start to the last
    for process, series in memory.items():
        early = [mib for step, mib in series if warm <= step < 2 * warm]
        late = [mib for step, mib in series if step > 0.9 * series[-1][0]]
        growth[process] = round(statistics.median(late) - statistics.median(early), 1)
        print(f"{process}: {series[-1][1]:.0f} MiB, {growth[process]:+.1f} MiB since step {warm:.0f}")
    result = {
        "machine": machine(), "command": f"bash tests/soak.sh {steps} {model}", "steps": steps,
        "seconds": round(time.monotonic() - began), "growth_mib": growth, "mib": memory,
    }  # fmt: skip
    (ROOT / f"tools/results/soak_{model}.json").write_text(json.dumps(result) + "\n")
    return int(max(growth.values()) > MOST_GROWTH_MIB)


def _memory(driver):
    processes = below(driver)
    named, memory = {driver: "driver"}, {}
    for kind, found in by_kind(processes).items():
        for process in found:
            index = engine_index(process) if kind == "engine" else None
            named[process.pid] = f"{kind} {process.pid if index is None else index}"
    for process in [psutil.Process(driver), *processes]:
        with suppress(psutil.Error):
            name = named.get(process.pid, f"{process.name()} {process.pid}")
            memory[name] = round(process.memory_full_info().uss / 2**20, 1)
    return memory


if __name__ == "__main__":
    sys.exit(main())
