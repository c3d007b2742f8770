import os
import re
import subprocess
import sys
import time
from typing import Any

from chaos.processes import below, gone_within, of_place, shared_memory_of
from support.paths import ROOT

STEPS = int(os.environ.get("CHAOS_STEPS", "80"))
RESPONSES = 4
HANGS_S = 5.0  # after which something that does nothing is taken to hang
AGENTS = os.environ.get("CHAOS_AGENTS") == "1"  # responses are episodes, and VICTIMS alone are hit
VICTIMS = os.environ.get("CHAOS_VICTIMS", "driver driver engine engine engine episode zygote").split()
ENGINES = 2 if "engine" in VICTIMS else 1
TASK = ("tiny_qwen3_agent.yaml", "tiny_qwen3_agent") if AGENTS else ("small_cpu.yaml", "tiny_qwen3")
FLAGS = [
    "--config", str(ROOT / "examples/recipes" / TASK[0]), "--hf-checkpoint", str(ROOT / "examples" / TASK[1]),
    *f"--num-trainers 1 --no-colocate --rollout-num-gpus {ENGINES} --max-staleness 1".split(),
    *f"--num-rollout {STEPS} --rollout-batch-size 4 --n-samples-per-prompt {RESPONSES}".split(),
    *("--num-steps-per-rollout", "1", "--eval-num-prompts", "0", "--journal-keep", "100"),
    *f"--save-interval 5 --step-timeout {HANGS_S} --engine-stall-timeout {HANGS_S}".split(),
    *f"--update-weight-timeout {HANGS_S} --reward-timeout {HANGS_S}".split(),
]  # fmt: skip
ORPHANS_S = 10.0  # in which what a dead driver has started must have ended by itself
STUCK_S = 900.0  # without a step; on a busy machine a start alone takes minutes


def within(place):
    """The environment of what a run in `place` starts, by which it is found again."""
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return os.environ | quiet | {"TMPDIR": str(place / "tmp")}


class StuckError(RuntimeError):
    """The run makes no step."""


class Trial:
    def __init__(self, place, run_dir, seed, flags=FLAGS, starts=0):
        """`place`: of temporary files and logs; its name is in the environment of all that is started."""
        self.place, self.run_dir, self.seed, self.flags = place, run_dir, seed, flags
        self.driver: Any = None
        self.starts, self.spawned = starts, 0.0  # number of its starts, and when the last was
        self.cluster: Any = None  # simulated cluster that it runs on; None for this machine alone
        self.failing_disk = None  # the library that lets a disk fail, where it could be compiled
        self.failing = place / "failing"  # while it exists the disk fails, with the error that it holds
        self.problems, self.shared_memory = [], set()  # segments that its processes had
        self.busy = []  # processes that compute for nothing, until the driver has made a step

    @property
    def log(self):
        return self.place / f"driver_{self.starts:03d}.log"

    def start(self):
        self.starts += 1
        goes_on = ["--load", str(self.run_dir)] if self.run_dir.exists() else []
        command = [sys.executable, "-m", "megatron_ibpo.commands.train", *self.flags, *goes_on]
        command += ["--seed", str(self.seed), "--run-dir", str(self.run_dir)]
        command += [] if self.cluster is None else ["--ray-address", self.cluster.address]
        how: dict = {"env": within(self.place), "cwd": ROOT, "stdin": subprocess.DEVNULL}
        if self.failing_disk is not None:
            how["env"] |= {"CHAOS_FAILING": str(self.failing), "CHAOS_BELOW": f"{self.run_dir}/"}
            how["env"] |= {"LD_PRELOAD": str(self.failing_disk)}
        with self.log.open("wb") as log:
            how |= {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
            self.driver = subprocess.Popen(command, **how)
        self.spawned = time.monotonic()

    def relieve(self):
        for process in self.busy:
            process.kill()
            process.wait()
        self.busy = []

    def ended(self):
        return self.driver.poll()

    def processes(self):
        """All but the driver; their shared memory is noted."""
        found = below(self.driver.pid) if self.cluster is None else of_place(self.place)
        self.shared_memory |= shared_memory_of(found)
        return found

    def step(self):
        """The last step that the present driver has completed; 0 before its first."""
        steps = re.findall(rb"^step (\d+)/\d+ .* [\d.]+ s \(", self.log.read_bytes(), re.MULTILINE)
        return int(steps[-1]) if steps else 0

    def wait_for_step(self, step, look=lambda: None):
        latest, since = -1, time.monotonic()
        while (now := self.step()) < step and self.ended() is None:
            if now != latest:
                latest, since = now, time.monotonic()
            if time.monotonic() - since > STUCK_S:
                raise StuckError(f"no step for {STUCK_S:.0f} s after step {now}, see {self.log}")
            look()
            time.sleep(0.05)

    def wait_for_end(self, seconds=300.0, *, must=True):
        try:
            self.driver.wait(seconds)
        except subprocess.TimeoutExpired:
            if must:
                raise StuckError(f"the driver does not end, see {self.log}") from None

    def has_finished(self):
        return self.ended() == 0

    def orphans_end(self):
        """The seconds until all that the driver had started was gone; what is not is a problem."""
        if self.cluster is not None:
            return 0.0
        seconds, left = gone_within(self.place, ORPHANS_S)
        if left:
            self.problems.append(f"{ORPHANS_S:.0f} s after the driver's end there runs: {left}")
            gone_within(self.place, ORPHANS_S)
        return seconds
