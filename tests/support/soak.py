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
EVERY_S = 5.0
MODELS = {
    "next": "tiny_qwen3_next_ibpo.yaml --tensor-model-parallel-size 1 --expert-model-parallel-size 1",
    "dense": "small_cpu.yaml --hf-checkpoint examples/tiny_qwen3",
}
FLAGS = (
    "--num-trainers 1 --rollout-batch-size 4 --n-samples-per-prompt 4 --num-steps-per-rollout 1 "
    "--max-staleness 1 --eval-num-prompts 0"
)


def main(steps="2000", model="next"):
    end_on_sigterm()
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
                    for process, mib in _memory(trial.driver.pid):
                        memory[process].append((step, mib))
                time.sleep(EVERY_S)
        finally:
            trial.driver.kill()
        if not trial.has_finished():
            sys.exit(trial.log.read_text()[-3000:])
    latest = max((series[-1][0] for series in memory.values()), default=0)
    growth, mib, warm = {}, {}, steps / 10  # until then caches fill
    for process, series in sorted(memory.items()):
        if series[0][0] < warm and series[-1][0] == latest:  # it lived all the time
            early = [own for step, own in series if warm <= step < 2 * warm]
            late = [own for step, own in series if step > 0.9 * latest]
            growth[process] = round(statistics.median(late) - statistics.median(early), 1)
            mib[process] = series
            print(f"{process}: {late[-1]:.0f} MiB, {growth[process]:+.1f} MiB since step {warm:.0f}")
    if not growth:
        sys.exit(f"{steps} steps are too few to tell")
    result = {
        "machine": machine(), "command": f"bash tests/soak.sh {steps} {model}", "steps": steps,
        "seconds": round(time.monotonic() - began), "growth_mib": growth, "mib": mib,
    }  # fmt: skip
    (ROOT / f"tools/results/soak_{model}.json").write_text(json.dumps(result) + "\n")
    sys.exit(max(growth.values()) > MOST_GROWTH_MIB)


def _memory(driver):
    """(name, MiB that only it has) of every process of the run."""
    processes, named = below(driver), {driver: "driver"}
    for kind, found in by_kind(processes).items():
        for process in found:
            index = engine_index(process) if kind == "engine" else None
            named[process.pid] = f"{kind} {process.pid if index is None else index}"
    for process in [psutil.Process(driver), *processes]:
        with suppress(psutil.Error):
            name = named.get(process.pid, f"{process.name()} {process.pid}")
            yield name, round(process.memory_full_info().uss / 2**20, 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
