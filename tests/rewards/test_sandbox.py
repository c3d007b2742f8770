"""Escapes: what a program in the sandbox tries, and how it ends. After each, the host is as it was."""

import json
import os
import platform
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from megatron_ibpo.rewards.code import CodeExecution
from megatron_ibpo.rewards.executors import check_isolation
from megatron_ibpo.rewards.sandbox import Limits, Process, SandboxError, bubblewrap, seccomp
from megatron_ibpo.rewards.sandbox.control_groups import PREFIX, parents
from megatron_ibpo.rewards.verifier import VERIFIERS
from megatron_ibpo.rewards.workers import WorkerPool
from support.sandboxed import adopts_no_longer, needs_sandbox  # noqa: F401
from support.waiting import eventually, has_ended

pytestmark = needs_sandbox
needs_groups = pytest.mark.skipif(not parents(), reason="this user can make no control groups here")
REPORT = """
import os, sys
def say(what): os.write(1, (str(what) + "\\n").encode())
def tried(action, *arguments):
    try:
        action(*arguments)
    except BaseException as error:
        say(type(error).__name__)
    else:
        say("done")
"""


@pytest.fixture(scope="module", autouse=True)
def what_is_imported_cached_or_mapped_at_the_first_use():
    run("")


def children():
    return set(psutil.Process().children(recursive=True))


def groups_of(owner):
    """Control groups that a process has made."""
    return [group for parent in parents() for group in parent.glob(f"{PREFIX}{owner}-*")]


def groups_in_use():
    return [group for group in groups_of(os.getpid()) if (group / "cgroup.procs").read_text()]


@pytest.fixture(autouse=True)
def host_is_as_it_was():
    """No process, mount, descriptor, directory or process in a control group is left of what a test ran."""

    def state():
        return Path("/proc/self/mountinfo").read_text(), len(os.listdir("/proc/self/fd")), groups_in_use()

    before, others = state(), children()
    yield
    assert children() <= others
    assert state() == before


def run(source, stdin=b"", isolated=True, **limits):
    """The program's end; its prints are lines of `say` and `tried`."""
    program, bounds = REPORT + textwrap.dedent(source), Limits(**{"seconds": 20.0, **limits})
    with Process("program", program, [""], stdin=stdin, limits=bounds, isolated=isolated) as started:
        return started.finish()


def said(source, **limits):
    execution = run(source, **limits)
    assert execution.status == 0, execution
    return execution.stdout.decode().splitlines()


def test_a_program_reaches_nothing_of_the_host(tmp_path):
    secret, abstract, named = str(tmp_path / "secret"), f"\0ibpo-test-{os.getpid()}", str(tmp_path / "socket")
    Path(secret).write_text("42")
    paths = [secret, str(Path.home() / ".ssh"), "/etc/passwd", "/etc/hostname", "/usr/bin"]
    packages = [os.path.join(path, "site-packages") for path in bubblewrap._standard_library()]
    families = [socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET, socket.AF_VSOCK, 38]
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(abstract, family=socket.AF_UNIX),
        socket.create_server(named, family=socket.AF_UNIX),
    ):
        program = f"""
            import ctypes, mmap, socket, subprocess
            for path in {[*paths, "/home", "/work", "/sys", "/run", "/var"]}: tried(os.stat, path)
            os.symlink({str(tmp_path)!r}, "link")
            os.symlink("/proc/1/root", "root")
            tried(os.listdir, "root/etc")
            tried(os.link, "/etc/passwd", "hard")
            for path in ("link/secret", "../" * 20 + {secret!r}): tried(open, path)
            for path in ("/proc/self/mem", "/proc/1/environ"): tried(open, path)
            tried(open, "/proc/sys/kernel/core_pattern", "w")
            tried(socket.socket(socket.AF_UNIX).connect, {named!r})
            say("denied")
            tried(os.fork)
            tried(os.posix_spawn, sys.executable, [sys.executable, "-c", "pass"], {{}})
            tried(subprocess.run, [sys.executable])
            for call in (os.setuid, os.setgid): tried(call, 0)
            tried(os.setgroups, [0])
            tried(os.chown, ".", 0, 0)
            for family in {list(map(int, families))}: tried(socket.socket, family, socket.SOCK_DGRAM)
            tried(socket.create_connection, ("127.0.0.1", {server.getsockname()[1]}))
            tried(os.memfd_create, "x")
            tried(os.write, 0, b"x")
            for size in (0, 2**20): tried(os.ftruncate, 0, size)
            say("others")
            for path in {["/proc", *packages]}: say(os.listdir(path) if os.path.exists(path) else [])
            tried(socket.getaddrinfo, "example.org", 80)
            tried(socket.socket(socket.AF_UNIX).connect, {abstract!r})
            open("file", "w").close()
            os.chmod("file", 0o6777)
            say(ctypes.CDLL(None).prctl(39, 0, 0, 0, 0))  # no new privileges
            tried(mmap.mmap, -1, 2**30)
            tried(open("file", "wb").truncate, 2**30)
            say(sys.stdin.read())
        """
        lines = said(program, stdin=b"given", memory_bytes=512 << 20)
    first, second = lines.index("denied"), lines.index("others")
    assert lines[:first] == ["FileNotFoundError"] * 18
    assert lines[first + 1 : second] == ["PermissionError"] * 18
    ends = ["gaierror", "ConnectionRefusedError", "1", "OSError", "OSError", "given"]
    assert lines[second + 1 :] == ["[]"] * (1 + len(packages)) + ends


def test_the_sandbox_has_a_read_only_root_and_fresh_folder():
    lines = said("""
        say(sorted(os.listdir("/")))
        for path in ("/file", "/dev/file", os.__file__, sys.executable, "/lib64/file"):
            tried(lambda: open(path, "a"))
    """)
    seen = {Path(path).parts[1] for path in (*bubblewrap.visible_paths(), "/dev", "/tmp")}
    assert lines[0] == str(sorted(seen))
    assert set(lines[1:]) <= {"OSError", "PermissionError"}
    for _ in range(2):
        assert said("say(os.listdir()); open('left', 'w').write('x')") == ["[]"], "it is new each time"


def test_packages_are_seen_wherever_they_are_installed(
    tmp_path,
):
    installed = Path("/tmp", f"ibpo-package-{os.getpid()}"), tmp_path / "elsewhere"
    for directory in installed:
        directory.mkdir()
        (directory / "shown.py").write_text(f"PLACE = {str(directory)!r}")
        source = f"import os, sys; sys.path.append({str(directory)!r}); import shown; print(shown.PLACE)"
        with Process(
            "program", source, [""], limits=Limits(), packages=[str(directory / "shown.py")]
        ) as process:
            execution = process.finish()
        shutil.rmtree(directory)
        assert execution.stdout.decode().strip() == str(directory), execution.stderr


def test_no_variable_or_descriptor_goes_in_and_signals_stay_in(monkeypatch, tmp_path):
    monkeypatch.setenv("IBPO_SECRET", "42")
    with open(tmp_path / "secret", "w+") as file, ExitStack() as many:
        os.set_inheritable(file.fileno(), True)
        for _ in range(300):  # as in a run with many workers
            many.callback(os.close, os.dup(file.fileno()))
        program = f"""
            import resource, signal
            say(sorted(os.environ)); say(sys.argv); say(sys.flags.no_site)
            held = []
            for number in range(4096):
                try: os.fstat(number); held.append(number)
                except OSError: pass
            say(held)
            say((os.getpid() < 10, os.getppid() in (0, 1)))
            say(resource.getrlimit(resource.RLIMIT_CPU))  # bounds the time without anyone watching
            tried(resource.setrlimit, resource.RLIMIT_CPU, (99, 99))
            for pid in {[os.getpid(), os.getppid(), 1]}: tried(os.kill, pid, 0)
            signal.signal(signal.SIGTERM, lambda *_: None)
            for group in (0, 1, -1): tried(os.kill, group, signal.SIGTERM)  # which does not end this process
        """
        lines = said(program, seconds=2)
    assert set(eval(lines[0])) <= set(bubblewrap.ENVIRONMENT) | {"LD_LIBRARY_PATH", "PWD", "LC_CTYPE"}
    assert lines[1:7] == ["['program.py']", "1", "[0, 1, 2]", "(True, True)", "(3, 3)", "ValueError"]


@needs_groups
def test_a_sandboxs_control_groups_are_reused_without_remains():
    with Process("program", "import time; time.sleep(60)", [""], limits=Limits(tasks=5)) as started:
        bounds = {
            path.name: int(path.read_text())
            for group in groups_in_use()
            for path in (*group.glob("memory.limit_in_bytes"), *group.glob("*.max"))
            if path.read_text().strip().isdigit()
        }
        assert 1 << 30 < max(bounds.values()) < 5 << 28
        assert bounds.get("pids.max", 9) == 9
        own = Path(f"/proc/{started.first}/cgroup").read_text().splitlines()
        inside = {line.split(":", 2)[2].rpartition("/")[2] for line in own}
        assert {group.name for group in groups_in_use()} <= inside
        with Process("program", "import time; time.sleep(60)", [""], limits=Limits(tasks=5)):
            assert len(groups_in_use()) == 2 * len(parents())
    source = """
        with open("filled", "wb") as file:
            file.write(bytes(15 << 20))
        say(len(bytearray(400 << 20)))
    """
    groups = set()
    for _ in range(2):
        assert said(source, tasks=6, memory_bytes=512 << 20) == ["419430400"]
        groups.add(tuple(groups_of(os.getpid())))
    assert len(groups) == 1


@needs_groups
def test_the_control_groups_of_a_verifier_end_with_it():
    label = json.dumps({"inputs": [""], "outputs": ["3"]})
    others = children()
    with WorkerPool([VERIFIERS["code"]], size=1, timeout=60.0) as pool:
        asked = "", "```python\nprint(3)\n```", label, CodeExecution().as_metadata()
        assert pool.submit(VERIFIERS["code"], asked).result(60).value == 1.0
        (verifier,) = [child.pid for child in children() - others if child.cmdline()[1] == "-m"]
        assert len(groups_of(verifier)) == len(parents())
    assert groups_of(verifier) == []


@needs_groups
@pytest.mark.slow  # for the time that so many files take, whose names and nodes are memory of the kernel's
def test_a_flood_of_empty_files_hits_the_memory_limit():
    source = "for number in range(10_000_000): open(str(number), 'w').close()"
    execution = run(source, seconds=120, memory_bytes=128 << 20)
    assert (execution.status, execution.reached) == (128 + signal.SIGKILL, None)


def test_endless_growth_ends_alone_and_at_its_limit():
    for grow, error, least, most, limits in (
        ("bool(_thread.start_new_thread(time.sleep, (3600,)))", "RuntimeError", 8, 31, {"tasks": 32}),
        ("held.append(b'x' * 2**24) or 2**24", "MemoryError", 2**26, 2**28 - 1, {"memory_bytes": 2**28}),
        ("file.write(bytes(2**20))", "OSError", 2**20, 2**23, {"disk_bytes": 2**23}),
        ("len(os.pipe())", "OSError", 2, 63, {}),
    ):
        source = f"""
            import _thread, time
            _thread.stack_size(32768)
            file, held, size = open("file", "wb", buffering=0), [], 0
            try:
                while True: size += {grow}
            except {error}:
                held.clear()
                say(size)
            os._exit(0)
        """
        (size,) = said(source, **limits)
        assert least <= int(size) <= most


def test_nothing_a_program_does_stretches_the_time_limit():
    for closes in (False, True):
        source = f"""
            import signal, threading
            for number in range(1, 65):
                try: signal.signal(number, signal.SIG_IGN)
                except (OSError, ValueError): pass
            for _ in range(4): threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()
            say("ignoring")
            if {closes}: os.closerange(0, 3)
            while True: pass
        """
        started, execution = time.monotonic(), run(source, seconds=1)
        assert (execution.reached, execution.stdout) == ("time", b"ignoring\n"), closes
        assert time.monotonic() - started < 15, closes


def test_system_calls_around_the_namespaces_are_refused():
    numbers = {  # on x86-64
        "keyctl": 250, "bpf": 321, "mount": 165, "unshare": 272, "setns": 308, "perf_event_open": 298,
        "io_uring_setup": 425, "userfaultfd": 323, "ptrace": 101, "process_vm_readv": 310, "clone3": 435,
        "memfd_create": 319, "open_by_handle_at": 304, "shmget": 29, "open_tree_attr": 467,
    }  # fmt: skip
    lines = said(f"""
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        def called(*arguments):
            ctypes.set_errno(0)
            say((libc.syscall(*arguments), ctypes.get_errno()))
        for number in {list(numbers.values())}: called(number, 0, 0, 0, 0, 0)
        for flags in (0x10000000, 0x00020000, 0x40000000, 0x11): called(56, flags, 0, 0, 0, 0)  # for threads
    """)
    refused = ["(-1, 38)" if name in ("clone3", "open_tree_attr") else "(-1, 1)" for name in numbers]
    assert lines == refused + ["(-1, 1)"] * 4


def test_a_flood_of_output_is_cut_and_fills_no_memory():
    for stream, seconds, reached in ((1, 20, "output"), (2, 0.5, "time")):
        before = psutil.Process().memory_info().rss
        flood = f"while True: os.write({stream}, b'x' * 65536)"
        execution = run(flood, seconds=seconds, output_bytes=1 << 20)
        assert execution.reached == reached
        assert len(execution.stdout) <= (1 << 20) + (1 << 16), (stream, seconds, reached)
        assert len(execution.stderr) <= 4096, (stream, seconds, reached)
        assert psutil.Process().memory_info().rss - before < 64 << 20, (stream, seconds, reached)


@pytest.mark.parametrize("planted", [False, True])
def test_tests_and_program_are_in_two_sandboxes(planted):
    """What HumanEval-style tests compare with is not in the program's process, wherever it looks. It
    would find it: it does where it has it itself."""
    program = f"""
        import gc, sys
        own = [{19731793 if planted else 0}]
        def f(x):
            kinds = (str, list, dict, tuple)
            found = [o for o in gc.get_objects() if isinstance(o, kinds) and "39713791"[::-1] in repr(o)]
            frame = sys._getframe()
            while frame:
                found += [name for name in frame.f_locals if "39713791"[::-1] in repr(frame.f_locals[name])]
                frame = frame.f_back
            return len(found) > 0
    """
    ours, theirs = socket.socketpair()
    with ours, theirs, Process("serve", textwrap.dedent(program), stdin=theirs.fileno(), limits=Limits(20)):
        tests = f"secret = [19731793]\nassert f(1) == {planted}"
        with Process("check", tests, [""], stdin=ours.fileno(), limits=Limits(20)) as checker:
            theirs.close()
            ours.close()
            execution = checker.finish()
    assert (execution.status, execution.stdout) == (0, b"passed\n"), execution


def test_the_sandbox_and_its_groups_end_with_their_owner():
    """Also where the owner is killed, as a verifier that takes too long is."""

    def left():
        parents.cache_clear()  # so that they are looked for again, which removes what nobody owns
        return groups_of(owner.pid)

    script = """
        import time
        from megatron_ibpo.rewards.sandbox import Limits, Process
        started = Process("program", "import time; time.sleep(600)", [""], limits=Limits(seconds=600))
        print(started.first, flush=True)
        time.sleep(600)
    """
    command, others = [sys.executable, "-c", textwrap.dedent(script)], children()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as owner:
        first = int(owner.stdout.readline())
        assert len(groups_of(owner.pid)) == len(parents())
        owner.kill()
    assert eventually(lambda: has_ended(first), 30), "the sandbox lives on"
    for orphan in children() - others:  # this process adopts them
        orphan.wait(30)
    assert eventually(lambda: left() == [], 10)


def test_a_missing_or_leaking_sandbox_is_an_error(monkeypatch, tmp_path):
    allow_all = struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000)
    with monkeypatch.context() as patched:  # processes can be started, without the filter of system calls
        patched.setattr("megatron_ibpo.rewards.sandbox.process._filter", lambda _: allow_all)
        with pytest.raises(SandboxError, match="cannot start processes"):
            check_isolation()
    with monkeypatch.context() as patched:
        patched.setattr(bubblewrap.shutil, "which", lambda *_, **__: None)
        with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
            check_isolation()
    broken = tmp_path / "bwrap"
    monkeypatch.setattr(bubblewrap, "bubblewrap", lambda: str(broken))
    monkeypatch.setattr("megatron_ibpo.rewards.sandbox.process._SETUP_TIMEOUT", 1.0)
    for does, says in (
        ("echo 'bwrap: no permission' >&2; exit 1", "no permission"),
        ("exec sleep 60", "cannot be built"),
    ):
        broken.write_text(f"#!/bin/sh\n{does}\n")
        broken.chmod(0o755)
        started = time.monotonic()
        with pytest.raises(SandboxError, match=says):
            run("")
        assert time.monotonic() - started < 30, (does, says)
        with pytest.raises(SandboxError, match="user namespaces"):
            check_isolation()


def test_limits_also_hold_without_a_sandbox():
    assert run("while True: pass", isolated=False, seconds=0.3).reached == "time"
    assert run("b'x' * 2**30", isolated=False, memory_bytes=256 << 20).status == 1


@pytest.mark.parametrize(
    "machine", sorted({platform.machine(), "aarch64"})
)  # x86-64 alone has headers of its own
def test_the_numbers_of_calls_are_those_of_the_kernels_headers(machine):
    header = "asm/unistd_64.h" if machine == "x86_64" else "asm-generic/unistd.h"
    has = ["-D__BITS_PER_LONG=64", "-D__ARCH_WANT_MEMFD_SECRET", "-D__ARCH_WANT_NEW_STAT"]
    words = ["g++", "-E", "-dM", *has, "-include", header, "-x", "c++", "/dev/null"]
    macros = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    number_of = dict(re.findall(r"#define (__NR\w+) (\w+)", macros))  # some by way of another name
    names = {name.removeprefix("__NR_"): number_of.get(at, at) for name, at in number_of.items()}
    numbers = {name: int(at) for name, at in names.items() if at.isdigit()}
    for calls in (seccomp._REFUSED[machine], seccomp._COMPUTING[machine]):
        assert {name: numbers.get(name) for name in calls} == calls
    single = {"clone": seccomp._CLONE, "socket": seccomp._SOCKET, "openat": seccomp._OPENAT}
    assert {name: of[machine] for name, of in single.items()} == {name: numbers[name] for name in single}
