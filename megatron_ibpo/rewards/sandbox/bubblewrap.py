"""The command that builds a sandbox: bubblewrap (`bwrap`) with every namespace, and a root that holds only
Python. Source: bwrap(1), user_namespaces(7)."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

NOBODY = 65534
"""User id of a program: a user that owns nothing. The kernel limits the threads of a user, but not of
root."""
WORKING_DIRECTORY = "/tmp"
ENVIRONMENT = {
    "PATH": "/nonexistent",
    "HOME": WORKING_DIRECTORY,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same program has the same reward each time
    "PYTHONUTF8": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "MALLOC_ARENA_MAX": "2",  # others each reserve 64 MiB of the address space, which is bounded
}
INSTALL = "install bubblewrap (Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap)"
_DEVICES = ("/dev/null",)


class SandboxError(Exception):
    """The sandbox itself failed, or cannot be had; this says nothing about the program."""


def bubblewrap() -> str:
    """Return the path of bwrap. Raises SandboxError if it is not installed."""
    path = shutil.which("bwrap", path=os.environ.get("PATH", os.defpath) + ":/usr/bin:/usr/local/bin")
    if path is None:
        raise SandboxError(f"the sandbox needs the program bwrap, which is not on the PATH: {INSTALL}")
    return path


@functools.cache
def python() -> str:
    """Return the interpreter for programs: the one under this process's virtual environment, without its
    packages."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def bare_python_command(stub: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that starts Python fastest: no working directory on the path (-P), no `site` (-S),
    and no packages of the user (-s)."""
    return [python(), "-P", "-S", "-s", "-c", stub, *arguments]


def bubblewrap_command(
    info: int,
    block: int,
    seccomp: int,
    disk_bytes: int,
    packages: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    as_root: bool,
) -> list[str]:
    """Return bwrap with its arguments; the command to run inside comes after them.

    Args:
        info: descriptor to which bwrap writes the process id of the sandbox's first process.
        block: descriptor on which the sandbox waits until its users are mapped.
        seccomp: descriptor of the filter.
        disk_bytes: capacity of the working directory.
        packages: files and directories of installed packages that the program can read as well.
        environment: variables besides those of ENVIRONMENT.
        as_root: start the program as root of the user namespace, able only to become another user.
    """
    command = [bubblewrap(), "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net"]
    command += ["--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
    command += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    if as_root:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    command += ["--clearenv"]
    # there is no cache of them inside
    libraries = {"LD_LIBRARY_PATH": ":".join(sorted(_library_directories()))}
    for name, value in (ENVIRONMENT | libraries | dict(environment or {})).items():
        command += ["--setenv", name, value]
    # before what is shown: Python and its packages may be below it
    command += ["--perms", "1777", "--size", str(disk_bytes), "--tmpfs", WORKING_DIRECTORY]
    for path in _parents((*visible_paths(), *_DEVICES, *packages)):
        command += ["--perms", "0755", "--dir", path]  # bwrap would make them for root alone
    for path in visible_paths():
        command += ["--ro-bind", path, path]
    for path in _hidden_paths():
        command += ["--tmpfs", path]
    for path in packages:
        command += ["--ro-bind", path, path]
    for path in _hidden_paths():
        command += ["--remount-ro", path]
    for path in _DEVICES:
        command += ["--dev-bind", path, path]
    command += ["--chdir", WORKING_DIRECTORY, "--remount-ro", "/"]
    command += ["--info-fd", str(info), "--userns-block-fd", str(block), "--seccomp", str(seccomp), "--"]
    return command


@functools.cache
def visible_paths() -> tuple[str, ...]:
    """Return the host's files and directories that a program can read: the interpreter, its standard library,
    and the directories of the shared libraries that these need."""
    paths = {python(), *_standard_library(), *_library_directories()}
    existing = sorted(path for path in paths if os.path.exists(path))
    return tuple(
        path
        for path in existing
        if not any(path != parent and Path(path).is_relative_to(parent) for parent in existing)
    )


@functools.cache
def _standard_library() -> frozenset[str]:
    """Return the directories of the interpreter itself, also under a virtual environment."""
    base = {"platbase": sys.base_exec_prefix, "base": sys.base_prefix}
    return frozenset(sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib"))


def packages_of(name: str) -> tuple[str, ...]:
    """Return the files and directories of an installed distribution and of those that it requires. Raises
    SandboxError if it is not installed as files of its own."""
    pending, visited, paths = [name], set[str](), set[str]()
    while pending:
        try:
            distribution = importlib.metadata.distribution(pending.pop())
        except importlib.metadata.PackageNotFoundError:  # for another system
            continue
        if distribution.name in visited:
            continue
        visited.add(distribution.name)
        lines = (distribution.read_text("RECORD") or "").splitlines()  # `files` takes ten times as long
        tops = {line.partition(",")[0].partition("/")[0] for line in lines} - {"..", "__pycache__", ""}
        paths |= {str(distribution.locate_file(top)) for top in tops}
        required = [text for text in distribution.requires or () if "extra ==" not in text]
        pending += [word[0] for text in required if (word := re.match(r"[\w.-]+", text))]
    existing = tuple(sorted(filter(os.path.exists, paths)))
    if not existing:
        raise SandboxError(f"the files of the package {name} are not known, so a sandbox cannot show them")
    return existing


def _parents(paths: Sequence[str]) -> list[str]:
    return sorted({str(parent) for path in paths for parent in Path(path).parents} - {"/"})


def _hidden_paths() -> list[str]:
    """Return the packages installed next to the standard library."""
    directories = [os.path.join(path, "site-packages") for path in sorted(_standard_library())]
    return [path for path in directories if os.path.isdir(path)]


@functools.cache
def _library_directories() -> frozenset[str]:
    """Return the directories of libraries that Python and the standard library's extensions link to."""
    extensions = (file for path in _standard_library() for file in Path(path, "lib-dynload").glob("*.so"))
    listed = subprocess.run(
        ["ldd", python(), *map(str, extensions)], capture_output=True, text=True, timeout=60, check=False
    ).stdout
    libraries = {word for line in listed.splitlines() for word in line.split() if word.startswith("/")}
    return frozenset(os.path.dirname(path) for path in libraries if not path.endswith(":"))
