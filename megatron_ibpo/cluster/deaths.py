"""The death of a process of the run: its error, and how it ended, as far as that can be known afterwards."""

import re
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

NOTE_PEAK_EVERY_S = 2.0
_BY_THE_RUN = "killed by `ray.kill`"
"""Ray's text for a process that `Host.kill` ended."""
_NO_WORD = "connection error code 2"
"""Ray's text for a process whose socket closed, after SIGKILL and crashes alike."""

MOST_DEATHS = 3
"""Deaths of one process without progress in between that stop the run, because starting it again does not
fix the cause."""


class ProcessDiedError(RuntimeError):
    """A process of the run ended, or did not answer in time."""


def exit_reason(message: str, logs: Path | None) -> str:
    """Return the text that follows the name of an ended process in a message.

    Args:
        message: text of Ray's RayActorError.
        logs: Ray's logs on this node; None if the process ran on another one.
    """
    pid, address = _named(message, "pid"), _named(message, "ip")
    which = f" (process {pid} on {address})" if pid and address else ""
    if "receives a SIGTERM" in message:
        return f"was ended by SIGTERM{which}"
    if _BY_THE_RUN in message:
        return f"was ended by the run itself{which}"
    if _NO_WORD not in message:
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        return f"has ended{which}: {lines[-1] if lines else 'the reason is not known'}"
    if logs is not None and pid and (crash := _crash(logs, pid)):
        return f"crashed with {crash}{which}"
    or_crashed = "" if logs is not None else ", or crashed in native code"
    return f"was killed by SIGKILL{or_crashed}{which}. {_about_memory(logs, pid)}"


def record_peak_memory(logs: Path, pid: int) -> None:
    """Keep writing this process's peak memory to the disk, for messages after its end."""

    def forever() -> None:
        with suppress(OSError):  # no /proc, or Ray has ended
            while match := re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text()):
                (logs / f"peak-{pid}").write_text(match[1])
                time.sleep(NOTE_PEAK_EVERY_S)

    threading.Thread(target=forever, name="peak", daemon=True).start()


def _about_memory(logs: Path | None, pid: str | None) -> str:
    about = "Most often that is the kernel's out-of-memory killer"
    if logs is None or pid is None:
        return f"{about}: see dmesg on that node"
    with suppress(OSError):
        if match := re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE):
            kills = "nothing" if match[1] == "0" else match[1]
            about += f", which has killed {kills} on this machine since it was started"
    with suppress(OSError, ValueError):
        peak, total = int((logs / f"peak-{pid}").read_text()) * 1024, psutil.virtual_memory().total
        about += f"; its memory had reached {peak / 1024**3:.1f} of {total / 1024**3:.1f} GiB"
    return about


def _crash(logs: Path, pid: str) -> str | None:
    """Return the signal that Ray's handler in the process recorded; it sees every signal but SIGKILL."""
    for log in logs.glob(f"worker-*-{pid}.err"):
        if match := re.search(r"\*\*\* (SIG[A-Z]+) received", log.read_text(errors="replace")):
            return match[1]
    return None


def _named(message: str, name: str) -> str | None:
    match = re.search(rf"^\s*{name}: (\S+)$", message, re.MULTILINE)
    return match[1] if match else None
