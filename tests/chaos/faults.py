import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

import psutil

from chaos.processes import RAY_SERVERS, children, engine_index, send
from chaos.trial import AGENTS, VICTIMS, within
from megatron_ibpo.journal.entries import ClosedBatch, Record, decode, records
from megatron_ibpo.journal.recovery import segment_numbers, segment_path
from megatron_ibpo.weights.formats.run_state import newest_step

KILL, TERM, STOP = "SIGKILL", "SIGTERM", "SIGSTOP"
NEVER_CONTINUED = ("engine", "host", "verifier", "episode")  # nothing replaces a stopped driver or trainer
ENDS_WITHIN_S = 90.0  # in which a run that cannot go on must have ended by itself
HOW = {"disk": ["full"], "failing disk": ["EIO", "EROFS"], "directory": ["deleted"], "start": ["busy"]}


@dataclass
class Fault:
    victim: str  # kind of process, or one of HOW
    signal: str
    process: psutil.Process | None = None
    engine: int | None = None  # index of the engine, where it or the process that holds it is the victim
    engine_pid: int = 0  # process id of that engine
    torn: str | None = None  # file that is torn before the driver is started again, by its name in TEARS

    def __post_init__(self):
        ends, victim = self.signal != STOP, self.victim
        # the run cannot go on: it is to say so in a line, and to end with status 1 by itself
        no_ray = ends and victim in RAY_SERVERS.values()
        self.fails_the_run = no_ray or victim in ("failing disk", "directory")
        self.ends_the_driver = self.fails_the_run or victim == "start" or (ends and victim == "driver")
        # a raylet that is told to end says that its node is lost, and the run may start another Ray
        self.may_go_on = ends and victim == "own raylet"
        # it stands still for good, and only a time-out tells
        self.hangs = not ends and victim in NEVER_CONTINUED


def choose(rng, trial, kinds, spared):
    """A fault at random: first what it hits, then how. On a cluster, a raylet and all that is on its node."""
    if trial.cluster is not None:
        above = {own.pid: own for one in kinds["engine"] for own in one.parents()[1:2]}
        raylets = [own for own in above.values() if own.name() == "raylet"]
        return Fault("raylet", rng.choice([KILL, TERM, STOP]), rng.choice(raylets))
    engines = [one for one in kinds["engine"] if engine_index(one) not in spared]
    hosts = [host for host in kinds["host"] if not spared & {engine_index(one) for one in children(host)}]
    kinds |= {"driver": [psutil.Process(trial.driver.pid)], "engine": engines, "host": hosts}
    if AGENTS:
        victim = rng.choice(VICTIMS)
        signals = [KILL, TERM, STOP] if victim == "episode" else [KILL, TERM]
    else:
        victims = [*sorted(kind for kind, found in kinds.items() if found), "directory", "start"]
        victims += ["disk"] if trial.run_dir.parent.is_mount() else []
        victims += ["failing disk"] if trial.failing_disk is not None else []
        victim, signals = rng.choice(victims), [KILL, TERM, STOP]
    if victim in HOW:
        return Fault(victim, rng.choice(HOW[victim]))
    process = rng.choice(kinds[victim])
    fault = Fault(victim, rng.choice(signals), process)
    if fault.victim == "driver" and fault.signal == KILL and not AGENTS:
        fault.torn = rng.choice([None, *TEARS])
    for one in {"engine": [process], "host": children(process)}.get(victim, []):
        if (index := engine_index(one)) is not None:
            fault.engine, fault.engine_pid = index, one.pid
    return fault


def inject(fault, rng, trial):
    """Let it happen. What would stand still for good goes on after a while: the seconds that this took."""
    if fault.victim == "disk":
        filling, seconds = trial.run_dir.parent / "filling", rng.uniform(1, 4)
        with suppress(OSError), filling.open("wb", buffering=0) as file:
            while file.write(b"x" * 2**20):
                pass
        time.sleep(seconds)
        filling.unlink()
        return seconds
    if fault.victim == "failing disk":
        trial.failing.write_text(str(getattr(errno, fault.signal)))
    elif fault.victim == "directory":
        _delete(trial)
    elif fault.victim == "start":
        trial.driver.kill()
    if fault.process is None:
        return 0.0
    fault.process.send_signal(signal.Signals[fault.signal])
    if fault.signal != STOP and trial.cluster is not None:
        trial.cluster.add_node()  # as a scheduler does
    if fault.signal != STOP or fault.hangs:
        return 0.0
    seconds = rng.uniform(0.5, 4)
    time.sleep(seconds)
    fault.process.send_signal(signal.SIGCONT)
    return seconds


def wrong_end(fault, status, seconds, said):
    """What is wrong with how a driver ended so many seconds after a fault."""
    what = f"{fault.signal} of {fault.victim}"
    last = said.strip().splitlines()[-1][-300:] if said.strip() else ""
    if status == 2:
        return [f"{what} ended the run as if its input were bad: {last}"]
    if not fault.ends_the_driver:
        return [f"{what} ended the run with {status}: {last}"]
    if not fault.fails_the_run:
        return []
    problems = []
    if status != 1:
        problems.append(f"{what} ended the run with {status}, not 1: {last}")
    if seconds > ENDS_WITHIN_S:
        problems.append(f"after {what} the run took {seconds:.0f} s to end")
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    # Ray ends a process whose raylet is gone, in its own words where that is before the watcher sees it
    in_rays_words = fault.victim == "own raylet" and not errors
    if (len(errors) != 1 and not in_rays_words) or "Traceback" in said:
        found = f"{len(errors)} lines of what is wrong, and a traceback {said.count('Traceback')} times"
        problems.append(f"after {what} the run said {found}: {last}")
    return problems


def mend(fault, trial):
    """Put right what a fault has left, before the driver is started again; what is wrong with that."""
    trial.failing.unlink(missing_ok=True)
    if fault.victim == "start":
        computing, own = [sys.executable, "-c", "while True: pass"], within(trial.place)
        trial.busy = [subprocess.Popen(computing, env=own) for _ in range(8)]
    if not (copy := trial.run_dir.with_name("kept")).exists():
        return []
    made_again = trial.run_dir.exists()
    shutil.rmtree(trial.run_dir, ignore_errors=True)
    copy.rename(trial.run_dir)
    return [f"{trial.run_dir} was deleted, and the run made it again"] if made_again else []


def _delete(trial):
    """Delete the run's directory. A copy of one moment is kept beside it, to go on from."""
    everything = [psutil.Process(trial.driver.pid), *trial.processes()]
    send(everything, signal.SIGSTOP)
    shutil.copytree(trial.run_dir, trial.run_dir.with_name("kept"), symlinks=True)
    shutil.rmtree(trial.run_dir)
    send(everything, signal.SIGCONT)


def _tear_journal(trial, rng):
    """Cut off some bytes at the end of the journal, as a loss of power does; none that a checkpoint needs."""
    directory = trial.run_dir / "journal"
    newest = newest_step(trial.run_dir)
    saved = 0 if newest is None else int(newest.name.removeprefix("step_"))
    path = segment_path(directory, max(segment_numbers(directory)))
    first, size = 0, path.stat().st_size
    for found in (found for found in records(path) if isinstance(found, Record)):
        entry = decode(found.payload)
        if first == 0 or (isinstance(entry, ClosedBatch) and entry.step <= saved):
            first = found.offset + 16 + len(found.payload)
    if first >= size:
        return "nothing to cut off"
    left = rng.randrange(first, size)
    os.truncate(path, left)
    return f"{size - left} of {size} bytes of {path.name} cut off"


def _tear_checkpoint(trial, rng):
    """The newest checkpoint never got its name, and a file of it is half written."""
    newest = newest_step(trial.run_dir)
    if newest is None:
        return "there was none"
    partial = newest.with_name(f".{newest.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    newest.rename(partial)
    file = rng.choice(sorted(path for path in partial.rglob("*") if path.is_file()))
    os.truncate(file, rng.randrange(file.stat().st_size))
    return f"{newest.name} is partial, {file.name} cut off"


TEARS = {"journal": _tear_journal, "checkpoint": _tear_checkpoint}
