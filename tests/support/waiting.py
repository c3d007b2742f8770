"""Waits for what another process does in its own time."""

import time


def eventually(holds, seconds):
    """Return whether `holds()` came true within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.2)
    return False
