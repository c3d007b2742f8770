import time
from pathlib import Path


def eventually(holds, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.2)
    return False


def has_ended(pid):
    """Return whether a process is over; a zombie that was not waited for is."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
