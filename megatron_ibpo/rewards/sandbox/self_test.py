"""Test that the sandbox holds on this machine, before it runs any code of a model."""

from __future__ import annotations

import json
import tempfile

from megatron_ibpo.rewards.sandbox.bubblewrap import NOBODY, SandboxError
from megatron_ibpo.rewards.sandbox.process import Limits, Process

_HINT = (
    "It needs bubblewrap (apt-get install bubblewrap) and user namespaces; docs/code_rewards.md says how to "
    "allow them, also in a container. Or name a server that runs the code (--code-executor URL) or, only "
    "where the machine itself may be lost, give --unsafe-code-execution."
)
_PROBE = """
import json, os, resource, socket

def refused(action, *arguments):
    try:
        action(*arguments)
    except OSError:
        return True
    return False

def fork():
    if os.fork() == 0:
        os._exit(0)

print(json.dumps({
    "runs as nobody": (os.getuid(), os.getgid()) == (%(nobody)d, %(nobody)d),
    "has process numbers of its own": os.getpid() < 10,
    "sees no file of the host": refused(open, %(file)r) and refused(os.listdir, "/proc"),
    "cannot write to its root": refused(open, "/file", "w"),
    "can write to its directory": os.getcwd() == "/tmp" and not refused(open, "file", "w"),
    "cannot start processes": refused(fork),
    "has no network": refused(socket.socket, socket.AF_INET),
    "has a bounded address space": resource.getrlimit(resource.RLIMIT_AS)[1] == %(memory)d,
    "has a bounded number of threads": resource.getrlimit(resource.RLIMIT_NPROC)[1] == %(tasks)d,
    "has no environment": "PATH" not in os.environ or os.environ["PATH"] == "/nonexistent",
    "has no more descriptors": refused(os.fstat, 3),
}))
"""


def check_isolation() -> None:
    """Run a program in a sandbox that tries each forbidden action. Takes about 0.2 s.

    Raises:
        SandboxError: one succeeded, or there is no sandbox; with what to do.
    """
    limits = Limits()
    with tempfile.NamedTemporaryFile() as file:
        probe = _PROBE % {
            "nobody": NOBODY,
            "file": file.name,
            "memory": limits.memory_bytes,
            "tasks": limits.tasks,
        }
        try:
            with Process("program", probe, [""], limits=Limits(seconds=30)) as process:
                execution = process.finish()
        except SandboxError as error:
            raise SandboxError(f"{error}. {_HINT}") from None
    try:
        findings: dict[str, bool] = json.loads(execution.stdout)
    except ValueError:
        output = execution.stderr.strip() or f"status {execution.status}"
        raise SandboxError(f"the sandbox cannot run Python: {output}. {_HINT}") from None
    if broken := [action for action, holds in findings.items() if not holds]:
        raise SandboxError(f"the sandbox does not isolate: this check failed: a program {broken[0]}. {_HINT}")
