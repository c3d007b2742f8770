"""The filters of system calls in the sandbox, as classic BPF programs: of programs, and of a process that
only computes. Source: seccomp(2), linux/seccomp.h, linux/filter.h; numbers of asm/unistd_64.h,
asm-generic/unistd.h.

To a program, calls that reach around the namespaces, or at much kernel code that it has no use for, are
refused with EPERM. So is starting processes, so that the address space of one bounds its memory, and memory
outside of any address space. Of sockets only those of the unix domain may be made, since some families
(vsock) are not held by a network namespace. Calls that came with Linux 5.17 or later do not exist, nor does
clone3, whose arguments a filter cannot see; the C library then takes the older ones.
"""

import errno
import platform
import struct

_REFUSED = {
    "x86_64": {
        "acct": 163, "add_key": 248, "adjtimex": 159, "bpf": 321, "chroot": 161, "clock_adjtime": 305,
        "clock_settime": 227, "delete_module": 176, "fanotify_init": 300, "finit_module": 313, "fork": 57,
        "fsconfig": 431, "fsmount": 432, "fsopen": 430, "fspick": 433, "init_module": 175,
        "io_uring_enter": 426, "io_uring_register": 427, "io_uring_setup": 425, "ioperm": 173, "iopl": 172,
        "kcmp": 312, "kexec_file_load": 320, "kexec_load": 246, "keyctl": 250, "lookup_dcookie": 212,
        "mbind": 237, "memfd_create": 319, "memfd_secret": 447, "migrate_pages": 256, "modify_ldt": 154,
        "mount": 165, "mount_setattr": 442, "move_mount": 429, "move_pages": 279, "mq_open": 240,
        "msgget": 68, "name_to_handle_at": 303, "open_by_handle_at": 304, "open_tree": 428,
        "perf_event_open": 298, "personality": 135, "pidfd_getfd": 438, "pivot_root": 155,
        "process_madvise": 440, "process_vm_readv": 310, "process_vm_writev": 311, "ptrace": 101,
        "quotactl": 179, "quotactl_fd": 443, "reboot": 169, "request_key": 249, "semget": 64,
        "set_mempolicy": 238, "setns": 308, "settimeofday": 164, "shmget": 29, "swapoff": 168,
        "swapon": 167, "syslog": 103, "umount2": 166, "unshare": 272, "userfaultfd": 323, "vfork": 58,
        "vhangup": 153,
    },
    "aarch64": {
        "acct": 89, "add_key": 217, "adjtimex": 171, "bpf": 280, "chroot": 51, "clock_adjtime": 266,
        "clock_settime": 112, "delete_module": 106, "fanotify_init": 262, "finit_module": 273,
        "fsconfig": 431, "fsmount": 432, "fsopen": 430, "fspick": 433, "init_module": 105,
        "io_uring_enter": 426, "io_uring_register": 427, "io_uring_setup": 425, "kcmp": 272,
        "kexec_file_load": 294, "kexec_load": 104, "keyctl": 219, "lookup_dcookie": 18, "mbind": 235,
        "memfd_create": 279, "memfd_secret": 447, "migrate_pages": 238, "mount": 40, "mount_setattr": 442,
        "move_mount": 429, "move_pages": 239, "mq_open": 180, "msgget": 186, "name_to_handle_at": 264,
        "open_by_handle_at": 265, "open_tree": 428, "perf_event_open": 241, "personality": 92,
        "pidfd_getfd": 438, "pivot_root": 41, "process_madvise": 440, "process_vm_readv": 270,
        "process_vm_writev": 271, "ptrace": 117, "quotactl": 60, "quotactl_fd": 443, "reboot": 142,
        "request_key": 218, "semget": 190, "set_mempolicy": 237, "setns": 268, "settimeofday": 170,
        "shmget": 194, "swapoff": 225, "swapon": 224, "syslog": 116, "umount2": 39, "unshare": 97,
        "userfaultfd": 282, "vhangup": 58,
    },
}  # fmt: skip
_COMPUTING = {
    "x86_64": {
        "access": 21, "brk": 12, "clock_getres": 229, "clock_gettime": 228, "close": 3, "exit": 60,
        "exit_group": 231, "fstat": 5, "futex": 202, "getcwd": 79, "getdents64": 217, "getegid": 108,
        "geteuid": 107, "getgid": 104, "getpid": 39, "getrandom": 318, "getrusage": 98, "gettid": 186,
        "gettimeofday": 96, "getuid": 102, "lseek": 8, "lstat": 6, "madvise": 28, "mmap": 9, "mprotect": 10,
        "mremap": 25, "munmap": 11, "newfstatat": 262, "pread64": 17, "read": 0, "readlink": 89,
        "readlinkat": 267, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
        "sched_getaffinity": 204, "sched_yield": 24, "sigaltstack": 131, "stat": 4, "statx": 332,
        "sysinfo": 99, "time": 201, "uname": 63, "write": 1,
    },
    "aarch64": {
        "brk": 214, "clock_getres": 114, "clock_gettime": 113, "close": 57, "exit": 93, "exit_group": 94,
        "faccessat": 48, "fstat": 80, "futex": 98, "getcwd": 17, "getdents64": 61, "getegid": 177,
        "geteuid": 175, "getgid": 176, "getpid": 172, "getrandom": 278, "getrusage": 165, "gettid": 178,
        "gettimeofday": 169, "getuid": 174, "lseek": 62, "madvise": 233, "mmap": 222, "mprotect": 226,
        "mremap": 216, "munmap": 215, "newfstatat": 79, "pread64": 67, "read": 63, "readlinkat": 78,
        "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139, "sched_getaffinity": 123,
        "sched_yield": 124, "sigaltstack": 132, "statx": 291, "sysinfo": 179, "uname": 160, "write": 64,
    },
}  # fmt: skip
"""Calls of a process that computes, imports modules and reads files. None reaches another process."""
_OPENAT = {"x86_64": 257, "aarch64": 56}
_WRITING = 0o1 | 0o2 | 0o100 | 0o1000 | 0o2000
"""Flags with which a file is opened to be written or made: O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_APPEND."""
_CLONE = {"x86_64": 56, "aarch64": 220}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE3 = 435
_LAST_KNOWN = 450
"""Last call of Linux 5.17. The numbers of later calls are the same on every processor."""
_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020000
_AF_UNIX = 1

_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT, _THIRD_ARGUMENT = 0, 4, 16, 32
"""Offsets in struct seccomp_data; both architectures are little-endian."""


def seccomp_filter(machine: str | None = None, *, forks: bool = False) -> bytes:
    """Return the filter of a program, which may fork or not, as an array of struct sock_filter. Raises
    ValueError for another machine than x86_64 and aarch64, as `platform.machine()` names this one."""
    machine, program = _start(machine)
    refused, missing = _refuse(errno.EPERM), _refuse(errno.ENOSYS)
    program += _when(_AT_LEAST, _LAST_KNOWN + 1, missing)
    program += _when(_EQUAL, _CLONE3, missing)
    for number in sorted(_REFUSED[machine].values()):
        program += _when(_EQUAL, number, refused)
    program += [
        _step(_EQUAL, _CLONE[machine], skip_if_false=4),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_ANY_BIT, _CLONE_NEW, skip_if_false=1)
        if forks
        else _step(_ANY_BIT, _CLONE_THREAD, skip_if_true=1),
        refused,
        _step(_RETURN, _ALLOW),
        _step(_EQUAL, _SOCKET[machine], skip_if_false=3),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_EQUAL, _AF_UNIX, skip_if_true=1),
        refused,
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def computing_filter(machine: str | None = None) -> bytes:
    """Return the filter of a process that only computes: it reads files and its open descriptors, and can
    open no file to write it, nor start a process or thread, signal one, wait, or make a socket. Raises as
    `seccomp_filter`."""
    machine, program = _start(machine)
    refused = _refuse(errno.EPERM)
    for number in sorted(_COMPUTING[machine].values()):
        program += _when(_EQUAL, number, _step(_RETURN, _ALLOW))
    program += [
        _step(_EQUAL, _OPENAT[machine], skip_if_false=3),
        _step(_LOAD, _THIRD_ARGUMENT),
        _step(_ANY_BIT, _WRITING, skip_if_true=1),
        _step(_RETURN, _ALLOW),
        refused,
    ]
    return b"".join(program)


def _start(machine: str | None) -> tuple[str, list[bytes]]:
    """Return the machine, and the first steps of a filter, after which the number of the call is loaded."""
    machine = machine or platform.machine()
    if machine not in _REFUSED:
        raise ValueError(f"the sandbox has no system call filter for {machine}; it has {', '.join(_REFUSED)}")
    return machine, [
        _step(_LOAD, _ARCH),
        _step(_EQUAL, _AUDIT_ARCH[machine], skip_if_true=1),
        _step(_RETURN, _KILL),  # 32-bit calls have other numbers
        _step(_LOAD, _NUMBER),
    ]


def _when(test: int, value: int, action: bytes) -> list[bytes]:
    return [_step(test, value, skip_if_false=1), action]


def _refuse(error: int) -> bytes:
    return _step(_RETURN, 0x00050000 | error)


def _step(code: int, value: int, skip_if_true: int = 0, skip_if_false: int = 0) -> bytes:
    """Return one instruction; a test skips one of the two numbers of instructions."""
    return struct.pack("<HBBI", code, skip_if_true, skip_if_false, value)
