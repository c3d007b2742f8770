"""Skips tests that run programs in sandboxes where there can be none, and says why."""

import ctypes
import shutil
import subprocess

import pytest

_PR_SET_CHILD_SUBREAPER = 36
WHY_NOT: str | None = "no bubblewrap here: apt-get install bubblewrap"
if bwrap := shutil.which("bwrap"):  # asked alone, so that a fault of our own is a failure and no skipped test
    command = [bwrap, "--unshare-all", "--ro-bind", "/", "/", "true"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    WHY_NOT = None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"
needs_sandbox = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


@pytest.fixture(scope="module", autouse=True)
def adopts_no_longer():
    """A process that starts sandboxes adopts orphans. Other tests look for those of their own elsewhere."""
    yield
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)
