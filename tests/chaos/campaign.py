import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatch
from pathlib import Path

import psutil

from chaos.episodes_audit import audit_episodes
from chaos.faults import TEARS, Fault, choose, inject, mend, wrong_end
from chaos.journal_audit import audit
from chaos.processes import by_kind, gone_within, of_place, send
from chaos.trial import AGENTS, ENGINES, FLAGS, HANGS_S, RESPONSES, STEPS, StuckError, Trial, within
from megatron_ibpo.cluster.deaths import MOST_DEATHS
from megatron_ibpo.cluster.engines import WITHIN_S
from megatron_ibpo.cluster.ray_session import QUIET
from support.simulated_cluster import simulated_cluster

DISK_MB = 200
STAYS = ("torchinductor_*", "ibpo-*.log")  # torch's cache, and tracebacks of runs whose directory took none
UNFINISHED = (".partial", ".removed", ".tmp", ".old")
MOST_STARTS = 60
NODES, CLUSTER_EVERY, KILLS_ON_A_CLUSTER = 3, 6, 6  # the trainer on one node, engines on the others
LATEST_STEP = STEPS - 4  # a run that is nearly done is left to finish
AT_WORK = rb"pid=(\d+)\).*reset prefix cache"  # comes with every update of weights


class Engines:
    def __init__(self, trial):
        self.logs, self.since, self.starts = trial.run_dir / "logs", time.monotonic(), trial.starts
        self.under_way = {}  # engine → when it was hit, its process then, size of its log then, its record
        self.worked, self.joined = {}, {}  # engine → seconds of work before each death; when it joined last

    def hit(self, index, pid, at, record):
        """Note that this engine, or what holds it, was hit; its record gets the time until one has joined."""
        log = self.logs / f"engine_{index}.log"
        self.worked.setdefault(index, []).append(at - self.joined.get(index, self.since))
        self.under_way[index] = at, pid, log.stat().st_size if log.exists() else 0, record
        record |= {"engines_left": ENGINES - len(self.under_way), "replaced_seconds": None}

    def look(self):
        for index, (at, old, size, record) in list(self.under_way.items()):
            with (self.logs / f"engine_{index}.log").open("rb") as log:
                log.seek(size)
                joined = any(int(pid) != old for pid in re.findall(AT_WORK, log.read()))
            if joined:
                self.joined[index] = time.monotonic()
                record["replaced_seconds"] = round(self.joined[index] - at, 2)
                del self.under_way[index]

    def spared(self):
        """Engines that are not there, and those whose next death would rightly end the run."""
        now, spared = time.monotonic(), set(self.under_way)
        for index, worked in self.worked.items():
            last = [*worked, now - self.joined.get(index, self.since)][-MOST_DEATHS:]
            if len(last) == MOST_DEATHS and sum(last[1:]) < WITHIN_S + 15:  # it measures a little differently
                spared.add(index)
        return spared


def one_run(seed, number, kills, until):
    """A run with at most so many faults, none after `until`, checked: (their records, the run's, place)."""
    rng, began, episodes = random.Random(f"{seed}/{number}"), time.monotonic(), {}
    nodes = NODES if number % CLUSTER_EVERY == CLUSTER_EVERY - 1 and not AGENTS else 1
    with _place() as place:
        trial, records = Trial(place, place / "disk" / "run", seed=rng.randrange(2**31)), []
        trial.failing_disk = failing_disk(place)
        try:
            named = {"kind": "kill", "seed": seed, "run": number}
            environment = within(place) | QUIET | {"RAY_TMPDIR": str(place / "ray")}
            cluster = simulated_cluster(nodes, environment) if nodes > 1 else nullcontext()
            with cluster as trial.cluster:
                most = kills if nodes == 1 else min(kills, KILLS_ON_A_CLUSTER)
                records = [named | record for record in _faults(trial, rng, most, until)]
            trial.problems += _checked(trial, place)
            if AGENTS:
                journal, flags = trial.run_dir / "journal", [*FLAGS, "--seed", str(trial.seed)]
                found, scored, absent = audit_episodes(journal, flags)
                trial.problems += found
                episodes = {"episodes_scored": scored, "episodes_absent": absent}
        except StuckError as error:
            trial.problems.append(str(error))
        finally:
            send(of_place(place), signal.SIGKILL)
        run = {
            "kind": "run", "seed": seed, "run": number, "nodes": nodes, "kills": len(records), "steps": STEPS,
            "starts": trial.starts, "seconds": round(time.monotonic() - began, 1),
            "load": round(os.getloadavg()[0], 1), **episodes, "problems": trial.problems,
        }  # fmt: skip
        if trial.problems:
            kept, but = Path(f"{place}-kept"), shutil.ignore_patterns("sockets")  # which cannot be copied
            shutil.copytree(place, kept, symlinks=True, ignore_dangling_symlinks=True, ignore=but)
            return records, run, kept
    return records, run, place


def _faults(trial, rng, kills, until):
    """Inject up to `kills` faults, each after a step was made since the one before; then the run's end."""
    trial.start()
    trial.wait_for_step(1)
    engines, records = Engines(trial), []
    while trial.step() < LATEST_STEP and len(records) < kills and time.monotonic() < until:
        time.sleep(rng.uniform(0, 2))
        engines.look()
        if trial.ended() is not None:
            break
        step, at = trial.step(), time.monotonic()
        try:
            fault = choose(rng, trial, by_kind(trial.processes()), engines.spared())
            held = inject(fault, rng, trial)
        except (psutil.NoSuchProcess, IndexError):  # it was on its way out, or there is none
            continue
        records.append(_recovered(fault, step, at, held, rng, trial, engines))
        print(f"{len(records)}: {json.dumps(records[-1])}", flush=True)
        if trial.starts > engines.starts:
            engines = Engines(trial)
    while not trial.has_finished():
        trial.wait_for_step(STEPS, engines.look)
        trial.wait_for_end()
        if not trial.has_finished():
            _started_again(trial, Fault("nobody", "nothing"), time.monotonic(), rng)
    return records


def _recovered(fault, step, at, held, rng, trial, engines):
    """See the run go on after a fault at time `at`, kept up for `held` seconds; `step` was the last."""
    record = {
        "victim": fault.victim, "signal": fault.signal, "after_step": step,
        "driver_age": round(at - trial.spawned, 1), "held_seconds": round(held, 2),
    }  # fmt: skip
    if fault.hangs:
        record["time_out_seconds"] = HANGS_S
    if fault.engine is not None:
        engines.hit(fault.engine, fault.engine_pid, at, record)

    def look():
        engines.look()
        if trial.busy and trial.step():
            trial.relieve()

    if fault.may_go_on:
        trial.wait_for_end(5.0, must=False)  # it ends at once if it cannot continue
    elif fault.ends_the_driver:
        trial.wait_for_end()
    while True:
        trial.wait_for_step(step + 1, look)
        if trial.ended() is None or trial.has_finished():
            break
        record |= _started_again(trial, fault, at, rng)
    record["recovery_seconds"] = round(time.monotonic() - at - held, 2)
    return record


def _started_again(trial, fault, at, rng):
    """What the driver, which has ended, left, and what was done before it was started again."""
    status, ended = trial.ended(), time.monotonic() - at
    trial.problems += wrong_end(fault, status, ended, trial.log.read_text(errors="replace"))
    trial.relieve()
    if trial.starts >= MOST_STARTS:
        raise StuckError(f"the driver was started {trial.starts} times, and the run is not done")
    told = {"driver_status": status, "orphans_seconds": round(trial.orphans_end(), 1)}
    if fault.fails_the_run:
        told["ended_seconds"] = round(ended, 1)
    trial.problems += mend(fault, trial)
    if fault.torn is not None:
        told |= {"torn": fault.torn, "how": TEARS[fault.torn](trial, rng)}
        fault.torn = None
    trial.start()
    return told


def _checked(trial, place):
    _, left = gone_within(place, 10)
    problems = [f"still running: {left}"] if left else []
    lying = [name for name in os.listdir(place / "tmp") if not any(fnmatch(name, one) for one in STAYS)]
    lying += trial.shared_memory & set(os.listdir("/dev/shm"))
    lying += [str(path) for path in trial.run_dir.rglob("*") if path.name.endswith(UNFINISHED)]
    problems += [f"left lying about: {sorted(lying)}"] if lying else []
    state = json.loads((trial.run_dir / f"checkpoints/step_{STEPS:06d}/run_state.json").read_text())
    journal = trial.run_dir / "journal"
    problems += audit(journal, steps=STEPS, responses=RESPONSES, sampling=state["sampling"])
    replay = Trial(place, place / "disk" / "replay", seed=trial.seed, starts=1000)
    shutil.copytree(journal, replay.run_dir / "journal")
    replay.start()
    replay.wait_for_step(STEPS)
    replay.wait_for_end()
    if not replay.has_finished():
        said = replay.log.read_text(errors="replace").strip()[-300:]
        return [*problems, f"the replay of the journal ended with {replay.ended()}: {said}"]
    rows = [json.loads(line) for line in (replay.run_dir / "metrics.jsonl").read_text().splitlines()]
    sampled = [row["step"] for row in rows if row["kind"] == "step" and "groups_replayed" not in row]
    if sampled:
        problems.append(f"the replay of the journal sampled anew at steps {sampled}")
    weights = [sorted((one.run_dir / "hf").glob("*.safetensors")) for one in (trial, replay)]
    ours, replayed = ([(file.name, file.read_bytes()) for file in files] for files in weights)
    if ours != replayed:
        problems.append("the run's last weights differ from those of a clean replay of its journal")
    return problems


@contextmanager
def _place():
    """A directory of a short name, for sockets, with a small disk for the run's files where one may mount."""
    place = Path(tempfile.mkdtemp(prefix="c-", dir="/tmp"))
    disk = place / "disk"
    disk.mkdir()
    (place / "tmp").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "none", str(disk)]
    mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    if not mounted:
        print("no small disk: only root may mount one, so no disk gets full", flush=True)
    try:
        yield place
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(disk)], check=False)
        shutil.rmtree(place, ignore_errors=True)


def failing_disk(place):
    library, source = place / "failing_disk.so", Path(__file__).with_name("failing_disk.c")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        print("no C compiler: no disk fails", flush=True)
        return None
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library
