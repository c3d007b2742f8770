"""Runs with faults, one after the other, and what is checked after each."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from chaos.episodes_audit import audit_episodes
from chaos.faults import TEARS, Fault, choose, inject, mend, wrong_end
from chaos.journal_audit import audit
from chaos.processes import by_kind, end_all, gone_within
from chaos.replacements import Engines, NewTrainer, Replacement
from chaos.trial import AGENTS, FLAGS, HANGS_S, RESPONSES, STEPS, StuckError, Trial, environment_within
from megatron_ibpo.cluster.ray_session import QUIET
from support.simulated_cluster import SimulatedCluster, simulated_cluster

Record = dict[str, Any]
DISK_MB = 200
CACHE = "torchinductor_"  # torch's own, for all processes of a user: it stays
TRACEBACK = "ibpo-*.log"
"""Of a driver whose run's directory could not take it; the driver has said where it is."""
UNFINISHED = (".partial", ".removed", ".tmp", ".old")
MOST_STARTS = 60
ENDS_SOON_S = 5.0  # seconds for a driver that ends at once if it cannot continue
NODES, CLUSTER_EVERY, KILLS_ON_A_CLUSTER = 3, 6, 6
"""Every sixth run is on a simulated cluster: the trainer on one node, an engine on each of the others."""
LATEST_STEP = STEPS - 4  # a run that is nearly done is left to finish


def one_run(seed: int, number: int, kills: int, until: float) -> tuple[list[Record], Record, Path]:
    """A run with at most so many faults, checked."""
    rng = random.Random(f"{seed}/{number}")
    began = time.monotonic()
    nodes = NODES if number % CLUSTER_EVERY == CLUSTER_EVERY - 1 and not AGENTS else 1
    with _place() as place:
        trial = Trial(place, place / "disk" / "run", seed=rng.randrange(2**31))
        trial.failing_disk = failing_disk(place)
        try:
            named = {"kind": "kill", "seed": seed, "run": number}
            with _cluster(place, nodes) as trial.cluster:
                most = kills if trial.cluster is None else min(kills, KILLS_ON_A_CLUSTER)
                records = [named | record for record in _faults(trial, rng, most, until)]
            problems = trial.problems + _checked(trial, place)
            episodes = _episodes_checked(trial, problems) if AGENTS else {}
        except StuckError as error:
            records, problems, episodes = [], [*trial.problems, str(error)], {}
        finally:
            end_all(place)
        run = {
            "kind": "run", "seed": seed, "run": number, "nodes": nodes, "kills": len(records), "steps": STEPS,
            "starts": trial.starts, "seconds": round(time.monotonic() - began, 1),
            "load": round(os.getloadavg()[0], 1), **episodes, "problems": problems,
        }  # fmt: skip
        if problems:
            kept, but = Path(f"{place}-kept"), shutil.ignore_patterns("sockets")  # which cannot be copied
            shutil.copytree(place, kept, symlinks=True, ignore_dangling_symlinks=True, ignore=but)
            return records, run, kept
    return records, run, place


def _faults(trial: Trial, rng: random.Random, kills: int, until: float) -> list[Record]:
    records: list[Record] = []
    trial.start()
    trial.wait_for_step(1)
    engines = Engines(trial.run_dir / "logs", time.monotonic())
    replacements: list[tuple[Record, Replacement]] = []
    while trial.step() < LATEST_STEP and len(records) < kills and time.monotonic() < until:
        time.sleep(rng.uniform(0, 2))
        engines.look()
        if trial.ended() is not None:
            break
        starts, step, at = trial.starts, trial.step(), time.monotonic()
        try:
            fault = choose(rng, trial, by_kind(trial.processes()), engines.spared())
            held = inject(fault, rng, trial)
        except psutil.NoSuchProcess:  # it was on its way out
            continue
        under_way = None
        if fault.engine is not None:
            under_way = engines.hit(fault.engine, fault.engine_pid, at)
        record = _recovered(fault, step, at, held, rng, trial, engines)
        records.append(record)
        if under_way is not None:
            replacements.append((record, under_way))
        print(f"{len(records)}: {json.dumps(record)}", flush=True)
        if trial.starts > starts:
            engines = Engines(trial.run_dir / "logs", time.monotonic())
    while not trial.has_finished():
        trial.wait_for_step(STEPS, engines.look)
        trial.wait_for_end()
        if not trial.has_finished():
            _started_again(trial, Fault("nobody", "nothing"), time.monotonic(), rng)
    for record, replacement in replacements:
        record["engine_start_seconds"] = _rounded(replacement.start_seconds)
        record["replaced_seconds"] = _rounded(replacement.seconds)
    return records


def _recovered(fault, step, at, held, rng, trial, engines) -> Record:
    record: Record = {
        "victim": fault.victim, "signal": fault.signal, "after_step": step,
        "driver_age": round(at - trial.spawned, 1), "held_seconds": round(held, 2),
    }  # fmt: skip
    if fault.hangs:
        record["time_out_seconds"] = HANGS_S
    if fault.engine is not None:
        record["engines_left"] = engines.working()
    trainer = NewTrainer(trial.pid()) if fault.victim == "trainer" else None

    def look() -> None:
        engines.look()
        if trainer is not None:
            trainer.look()
        if trial.busy and trial.step():
            trial.relieve()

    if fault.may_go_on:
        trial.ends_within(ENDS_SOON_S)
    elif fault.ends_the_driver:
        trial.wait_for_end()
    while True:
        trial.wait_for_step(step + 1, look)
        if trial.ended() is None or trial.has_finished():
            break
        record |= _started_again(trial, fault, at, rng)
    record["recovery_seconds"] = round(time.monotonic() - at - held, 2)
    if "driver_status" in record:
        record["start_seconds"] = _rounded(trial.start_seconds)
    elif trainer is not None:
        record["start_seconds"] = _rounded(trainer.start_seconds)
    return record


def _started_again(trial: Trial, fault: Fault, at: float, rng: random.Random) -> Record:
    status, ended = trial.ended(), time.monotonic() - at
    trial.problems += wrong_end(fault, status, ended, trial.log.read_text(errors="replace"))
    trial.relieve()
    if trial.starts >= MOST_STARTS:
        raise StuckError(f"the driver was started {trial.starts} times, and the run is not done")
    orphans = trial.orphans_end()
    told: Record = {"driver_status": status, "orphans_seconds": round(orphans, 1)}
    if fault.fails_the_run:
        told["ended_seconds"] = round(ended, 1)
    trial.problems += mend(fault, trial)
    if fault.torn is not None:
        told |= {"torn": fault.torn, "how": TEARS[fault.torn](trial, rng)}
        fault.torn = None
    trial.start()
    return told


def _checked(trial: Trial, place: Path) -> list[str]:
    _, left = gone_within(place, 10)
    problems = [f"still running: {left}"] if left else []
    problems += _lying_about(trial, place)
    state = json.loads((trial.run_dir / f"checkpoints/step_{STEPS:06d}/run_state.json").read_text())
    journal = trial.run_dir / "journal"
    problems += audit(journal, steps=STEPS, responses=RESPONSES, sampling=state["sampling"])
    replay = Trial(place, place / "disk" / "replay", seed=trial.seed, starts=1000)
    shutil.copytree(journal, replay.run_dir / "journal")
    replay.start()
    replay.wait_for_step(STEPS)
    replay.wait_for_end()
    if not replay.has_finished():
        return [*problems, f"the replay of the journal ended with {replay.ended()}: {replay.last_words()}"]
    rows = [json.loads(line) for line in (replay.run_dir / "metrics.jsonl").read_text().splitlines()]
    sampled = [row["step"] for row in rows if row["kind"] == "step" and "groups_replayed" not in row]
    if sampled:
        problems.append(f"the replay of the journal sampled anew at steps {sampled}")
    if _weights(trial.run_dir) != _weights(replay.run_dir):
        problems.append("the run's last weights differ from those of a clean replay of its journal")
    return problems


def _episodes_checked(trial: Trial, problems: list[str]) -> Record:
    found, scored, absent = audit_episodes(trial.run_dir / "journal", [*FLAGS, "--seed", str(trial.seed)])
    problems += found
    return {"episodes_scored": scored, "episodes_absent": absent}


def _lying_about(trial: Trial, place: Path) -> list[str]:
    temporary = [
        path.name
        for path in (place / "tmp").iterdir()
        if not path.name.startswith(CACHE) and not path.match(TRACEBACK)
    ]
    shared = sorted(trial.shared_memory & set(os.listdir("/dev/shm")))
    partial = [str(path) for path in trial.run_dir.rglob("*") if path.name.endswith(UNFINISHED)]
    return [f"left lying about: {names}" for names in (temporary, shared, partial) if names]


def _weights(run_dir: Path) -> dict[str, str]:
    files = sorted((run_dir / "hf").glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@contextmanager
def _place() -> Iterator[Path]:
    """A directory for a run and all that belongs to it, with a small disk of its own for the run's files
    where this user may mount one. Its path is short: that of a socket may have 107 bytes."""
    place = Path(tempfile.mkdtemp(prefix="c-", dir="/tmp"))
    disk = place / "disk"
    disk.mkdir()
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


def failing_disk(place: Path) -> Path | None:
    library, source = place / "failing_disk.so", Path(__file__).with_name("failing_disk.c")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        print("no C compiler: no disk fails", flush=True)
        return None
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@contextmanager
def _cluster(place: Path, nodes: int) -> Iterator[SimulatedCluster | None]:
    if nodes == 1:
        yield None
        return
    (place / "tmp").mkdir()
    environment = environment_within(place) | QUIET | {"RAY_TMPDIR": str(place / "ray")}
    with simulated_cluster(nodes, environment) as cluster:
        yield cluster


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
