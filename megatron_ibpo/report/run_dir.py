"""The one directory of a run: created, checked, locked and described before work starts; and the wait for
room on its disk."""

import errno
import fcntl
import json
import logging
import math
import os
import shlex
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from megatron_ibpo.basics.versions import installed_versions, warn_on_differences
from megatron_ibpo.config import Config, ConfigError, read_yaml, write_config
from megatron_ibpo.config.run import RunConfig
from megatron_ibpo.data import Tokenizer, load_tokenizer
from megatron_ibpo.data.tokenizer import TOKENIZER_FILES

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
CONFIG_FILE = "config.yaml"
PREDICTION_FILE = "prediction.json"
"""Seconds of a step and of its parts, predicted before the first one."""
SKILL_FILE = "operator_skill.json"
"""File with the success rates of the policy's corrections, and of another try, before the first step."""
_TOKENIZER = "tokenizer"
"""Directory with the tokenizer of the run's model, and that model's files without its weights."""
_SEGMENTS = "journal/*.journal"
_WORK = (_SEGMENTS, "checkpoints/*", SKILL_FILE)
"""Files that appear with the first sample, the first checkpoint and the first measurement."""
_SPARE_BYTES = 64 * 1024**2
"""Bytes kept free for logs, metrics and curves."""


def prepare_run_dir(config: Config, *, checkpoint_bytes: int = 0) -> Path:
    """Create the run's directory, with config.yaml, versions.json, and the model's tokenizer and
    configuration for later readers.

    Args:
        checkpoint_bytes: as in `check_disk`.

    Raises:
        ConfigError: the directory cannot be made or written, already holds another run's work, or its disk
            has too little room.
    """
    run_dir = config.run.run_dir
    continues = config.run.load is not None
    if holds_work(run_dir) and not continues:
        raise ConfigError(
            f"--run-dir: {run_dir} already holds a run; choose another directory, or continue that run's "
            f"training with --load {run_dir}"
        )
    probe = run_dir / f".writable.{os.getpid()}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--run-dir: {run_dir} cannot be written: {error.strerror}") from error
    check_disk(config.run, checkpoint_bytes)
    write_config(config, run_dir / CONFIG_FILE)
    if (hf_dir := config.model.hf_checkpoint) is not None:
        (run_dir / _TOKENIZER).mkdir(exist_ok=True)
        for name in (*TOKENIZER_FILES, "config.json", "generation_config.json"):
            if (hf_dir / name).is_file():
                shutil.copyfile(hf_dir / name, run_dir / _TOKENIZER / name)
    versions = installed_versions()
    warn_on_differences(versions)
    written = json.dumps(versions | {"command": " ".join(sys.argv)}, indent=2)
    (run_dir / "versions.json").write_text(written + "\n", encoding="utf-8")
    return run_dir


def check_disk(run: RunConfig, checkpoint_bytes: int) -> None:
    """Refuse a run whose disk has too little room.

    Args:
        checkpoint_bytes: space for the checkpoints kept at one time (`weights.formats.run_state`).

    Raises:
        ConfigError: with the bytes that there are and those that are needed.
    """
    run_dir, needed = run.run_dir, _SPARE_BYTES
    if run.save:  # a resumed run overwrites what it has
        files = (path for part in ("checkpoints", "hf*") for path in run_dir.glob(f"{part}/**/*"))
        needed += max(0, checkpoint_bytes - sum(path.stat().st_size for path in files if path.is_file()))
    free = shutil.disk_usage(run_dir).free
    if free < needed:
        raise ConfigError(
            f"--run-dir: the disk of {run_dir} has {free / 1024**3:.2f} GiB free, checkpoints and logs need "
            f"{needed / 1024**3:.2f} GiB more; free some room, choose another --run-dir, lower "
            "--keep-checkpoints, or pass --no-save"
        )


def holds_work(run_dir: Path) -> bool:
    """Return whether anything was measured, sampled or trained in a run's directory. Otherwise its start
    failed, and a new run may take its place."""
    metrics = run_dir / METRICS_FILE
    measured = metrics.exists() and metrics.stat().st_size > 0
    return measured or any(next(run_dir.glob(work), None) is not None for work in _WORK)


def run_settings(run_dir: Path) -> dict[str, Any]:
    """Return the settings that a run was made with, all keys resolved. Raises ValueError if `run_dir` is not
    a run's directory, or its settings cannot be read."""
    path = run_dir / CONFIG_FILE
    if not path.exists():
        raise ValueError(f"{run_dir.absolute()} holds no {CONFIG_FILE}: is it the directory of a run?")
    settings = read_yaml(path, str(path))
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: must hold `key: value` lines, holds a {type(settings).__name__}")
    return settings


def run_tokenizer(run_dir: Path) -> Tokenizer:
    """Return the tokenizer that a run was made with, from the run's own directory. Raises ValueError if there
    is none, or it cannot be read."""
    return load_tokenizer(run_dir / _TOKENIZER)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: it is complete or absent, whenever the run ends."""
    with atomic_path(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write `path` to; it is renamed at the end of the block."""
    path.parent.mkdir(exist_ok=True)  # not its parents: a deleted run directory stays deleted
    unfinished = path.with_suffix(".tmp")
    try:
        yield unfinished
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    unfinished.replace(path)


def jsonable(value: Any, shorten: Callable[[float], float] = float) -> Any:
    """Return a value that JSON can represent: non-finite numbers are null, unknown objects are text.

    Args:
        shorten: applied to every finite float.
    """
    if isinstance(value, dict):
        return {str(key): jsonable(item, shorten) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item, shorten) for item in value]
    if isinstance(value, float):
        return shorten(value) if math.isfinite(value) else None
    return value if isinstance(value, int | str | None) else str(value)


def how_to_go_on(run_dir: Path, training: str = "train") -> str:
    """Return what to do after a run that did not finish: the command that resumes it, if it left a
    checkpoint or a journal; the same command, if it left nothing.

    Args:
        training: the command of ibpo that trained.
    """
    if not holds_work(run_dir):
        return "nothing was sampled yet: the same command starts the run again"
    steps = sorted((run_dir / "checkpoints").glob("step_*"))
    if not steps and not any(run_dir.glob(_SEGMENTS)):
        return "The run cannot be resumed: it saved no checkpoint (--save-interval saves while it runs)."
    launcher = Path(__file__).resolve().parents[2] / "tools/ibpo.sh"
    program = ["bash", str(launcher)] if launcher.exists() else ["ibpo"]  # outside a clone
    absolute_dir = run_dir.absolute()
    command = shlex.join(
        [*program, training, "--config", str(absolute_dir / CONFIG_FILE), "--load", str(absolute_dir)]
    )
    from_where = f"after step {int(steps[-1].name.removeprefix('step_'))}" if steps else "from the journal"
    return (
        f"To resume {from_where} (on several nodes: start the script on every node with --load "
        f"{absolute_dir}):\n  {command}"
    )


LOCK_FILE = "run.lock"

log = logging.getLogger(__name__)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold `run_dir`, which is created, until the end of the block or of this process, however it ends.

    The kernel holds the lock; the file stays and only names the holder. On NFS the lock works across machines
    if the file system supports locks; if it does not, a line says so. Raises ConfigError: another run holds
    it, which is named; or it cannot be written.
    """
    path = run_dir / LOCK_FILE
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")  # not truncated: it may name another holder
    except OSError as error:
        raise ConfigError(f"--run-dir: {run_dir} cannot be written: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                holder = path.read_text(encoding="utf-8").strip() or "another process"
                raise ConfigError(
                    f"--run-dir: {run_dir} is in use by {holder}; wait for that run, stop it, or choose "
                    "another directory"
                ) from None
            log.warning(
                "%s: locks do not work here (%s), so a second run in this directory would not be noticed",
                run_dir,
                error.strerror,
            )
        else:
            file.truncate(0)
            started = time.strftime("%Y-%m-%d %H:%M:%S %z")
            file.write(f"process {os.getpid()} on {socket.gethostname()}, since {started}\n")
            file.flush()
        yield


T = TypeVar("T")

LOOK_EVERY_S = 2.0


class DiskFullError(RuntimeError):
    """The disk stayed full for as long as --disk-wait."""


def is_full(error: OSError) -> bool:
    """Return whether the error means that the disk, or the user's share of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@dataclass
class DiskWait:
    """The wait of a run for room on its disk. Safe to use from several threads.

    All writers share one deadline, which counts from the first write that found no room until one finds some.
    So a run whose responses arrive one by one ends once, not after a wait for each.
    """

    wait: float
    """Limit in seconds."""
    say: Callable[[str], object]
    """Called when the waiting begins and when it ends."""
    look_every: float = LOOK_EVERY_S
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _full_since: float | None = None
    _waiting: int = 0
    """Number of writes that are waiting."""

    def write(self, write: Callable[[], T]) -> T:
        """Return the result of `write`, retried while the disk is full.

        Args:
            write: leaves no partial file under a final name when it fails, and may be called again.

        Raises:
            DiskFullError: the disk has been full for `wait` seconds.
        """
        since = math.inf  # small writes that find room do not extend the wait of a large one
        try:
            while True:
                try:
                    result = write()
                except OSError as error:
                    if not is_full(error):
                        raise
                    since = min(since, self._refused(error, is_new=since == math.inf))
                    if self.now() - since >= self.wait:
                        raise DiskFullError(
                            f"the disk stayed full for {self.wait:g} s (--disk-wait): {error}"
                        ) from None
                    self.sleep(self.look_every)
                    continue
                self._succeeded(waited=since < math.inf)
                return result
        finally:
            if since < math.inf:
                with self._lock:
                    self._waiting -= 1

    def _refused(self, error: OSError, *, is_new: bool) -> float:
        """Return the time since when the disk has been full."""
        with self._lock:
            self._waiting += is_new
            is_first = self._full_since is None
            since = self.now() if self._full_since is None else self._full_since
            self._full_since = since
        if is_first:
            self.say(
                f"the disk is full ({error}): the run waits up to {self.wait:g} s for space (--disk-wait)"
            )
        return since

    def _succeeded(self, *, waited: bool) -> None:
        with self._lock:
            if self._waiting and not waited:  # a small write's success says nothing about those that wait
                return
            since, self._full_since = self._full_since, None
        if since is not None:
            self.say(f"the disk has space again after {self.now() - since:.0f} s; the run continues")


def require_room(directory: Path, num_bytes: int) -> None:
    """Raise OSError, as a full disk does, unless this much is free."""
    if shutil.disk_usage(directory).free < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
