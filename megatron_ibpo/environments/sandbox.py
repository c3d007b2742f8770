"""The sandbox of --environment-sandbox: bubblewrap around the zygote of an environment, and so around its
episodes.

A program that a model wrote gets less than this from `rewards.sandbox`. An environment is code that the user
chose, and needs Python's packages, files and child processes.
"""

import os
import sys
from pathlib import Path

from megatron_ibpo.config import user_directory
from megatron_ibpo.rewards.sandbox.bubblewrap import bubblewrap

TEMPORARY = "/tmp"
"""Temporary directory inside, in memory."""
OWNER = "1"
"""Process id, inside, of the parent of the command."""
_HIDDEN = (TEMPORARY, "/var/tmp", "/run")
"""Directories that hold sockets of other programs, which a read-only file system does not keep from use."""


def sandboxed(command: list[str]) -> list[str]:
    """Return the command that runs another one in the sandbox: without network and other processes, and with
    a file system that is read-only except for an empty temporary directory.

    Raises:
        SandboxError: bubblewrap is not installed.
    """
    wrapped = [bubblewrap(), "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
    wrapped += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    for path in filter(os.path.isdir, _HIDDEN):
        wrapped += ["--tmpfs", path]
    for path in _needed():
        wrapped += ["--ro-bind", path, path]
    return [*wrapped, "--setenv", "TMPDIR", TEMPORARY, "--", *command]


def _needed() -> list[str]:
    """Return the hidden directories from which Python imports."""
    directories = {os.path.abspath(path) for path in [sys.prefix, str(user_directory()), *sys.path]}
    hidden = [path for path in sorted(directories) if any(map(Path(path).is_relative_to, _HIDDEN))]
    return [path for path in hidden if os.path.exists(path) and path not in _HIDDEN]
