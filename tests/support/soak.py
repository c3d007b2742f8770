"""See tests/soak.sh."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
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
MODELS = {
    "next": (
        *("--config", str(ROOT / "examples/recipes/tiny_qwen3_next_ibpo.yaml")),
        *("--tensor-model-parallel-size", "1", "--expert-model-parallel-size", "1"),
    ),
    "dense": (
        *("--config", str(ROOT / "examples/recipes/small_cpu.yaml")),
        *("--hf-checkpoint", str(ROOT / "examples/tiny_qwen3")),
    ),
}
FLAGS = [
    *("--num-trainers", "1", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4"),
    *("--num-steps-per-rollout", "1"),
    *("--max-staleness", "1", "--eval-num-prompts", "0"),
]
Series = list[tuple[int, float]]  # (step, MiB that only this process has), as time goes by


def main() -> int:
    end_on_sigterm()
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    model = sys.argv[2] if len(sys.argv) > 2 else "next"
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        place = Path(name)
        (place / "tmp").mkdir()
        began = time.monotonic()
        status, memory = _run(place, steps, MODELS[model])
        seconds = time.monotonic() - began
        if status != 0:
            print((place / "log").read_text()[-3000:])
            return status
    if not memory:
        print(f"{steps} steps are too few to tell")
        return 1
    growth = {process: _growth(series, WARM * steps) for process, series in memory.items()}
    for process, grown in sorted(growth.items()):
        print(f"{process}: {memory[process][-1][1]:.0f} MiB, {grown:+.1f} MiB since step {WARM * steps:.0f}")
    result = {
        "machine": machine(), "command": f"bash tests/soak.sh {steps} {model}", "steps": steps,
        "seconds": round(seconds),
        "growth_mib": {process: round(grown, 1) for process, grown in sorted(growth.items())},
        "mib": dict(sorted(memory.items())),
    }  # fmt: skip
    (ROOT / f"tools/results/soak_{model}.json").write_text(json.dumps(result) + "\n")
    return int(max(growth.values()) > MOST_GROWTH_MIB)


def _run(place: Path, steps: int, of_model: Sequence[str]) -> tuple[int, dict[str, Series]]:
    command = [
        sys.executable, "-m", "megatron_ibpo.commands.train", *of_model, *FLAGS, "--num-rollout", str(steps),
    ]  # fmt: skip
    memory: dict[str, Series] = defaultdict(list)
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
    whole = {
        name: series
        for name, series in memory.items()
        if series[0][0] < WARM * steps and series[-1][0] == latest
    }
    return driver.returncode, whole


def _memory(driver: int) -> dict[str, float]:
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


def _growth(series: Series, warm: float) -> float:
    last = series[-1][0]
    early = [mib for step, mib in series if warm <= step < 2 * warm]
    late = [mib for step, mib in series if step > 0.9 * last]
    return statistics.median(late) - statistics.median(early)


if __name__ == "__main__":
    sys.exit(main())
