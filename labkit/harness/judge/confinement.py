"""What a process gives up before it calls foreign code: files, other processes, the network, memory beyond a limit.

It is run by the worker, without the rest of labkit, so it imports only Python's own library. Each measure returns
whether the kernel of the system offers it; none needs the rights of an administrator. Linux on x86-64 has all of them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
from collections.abc import Callable, Sequence

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long

# Landlock, of uapi/linux/landlock.h.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
RULE_PATH_BENEATH = 1
EXECUTE, READ_FILE, READ_DIR = 1 << 0, 1 << 2, 1 << 3
FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # by the first ABI that has them
NET_ABI, NET_RIGHTS = 4, 0b11
SCOPE_ABI, SCOPES = 6, 0b11  # no sockets and signals to processes outside

# prctl.h, and seccomp: uapi/linux/seccomp.h, bpf_common.h
SET_SECCOMP, FILTER_MODE = 22, 2
SET_NO_NEW_PRIVS = 38
SET_DUMPABLE = 4
X86_64 = 0xC000003E
ALLOW, KILL_PROCESS, NO_SUCH_CALL = 0x7FFF0000, 0x80000000, 0x00050000 | 38
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in the description of a system call
X32 = 0x40000000  # numbers from here on belong to another calling convention
CLONE_THREAD = 0x00010000
CLONE, CLONE3, TGKILL, PRLIMIT = 56, 435, 234, 302
FORBIDDEN = {
    "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "kill": 62, "tkill": 200, "rt_sigqueueinfo": 129,
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_open": 434, "pidfd_getfd": 438,
    "socket": 41, "socketpair": 53, "connect": 42, "setrlimit": 160, "mount": 165, "unshare": 272, "setns": 308,
    "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "keyctl": 250, "shmget": 29,
    "mq_open": 240, "clock_settime": 227, "settimeofday": 164, "adjtimex": 159, "setpriority": 141,
}  # fmt: skip


MOST_FILE = 1 << 20  # bytes; what it prints as an error goes to a file in memory


def limit_resources(memory_bytes: int, processor_s: int) -> str:
    """Limits the memory beyond what the process has by now, its processor time, its files and core dumps."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        present = int(statm.read().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, present + memory_bytes)
    _limit(resource.RLIMIT_CPU, processor_s)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, MOST_FILE)
    return "limits of memory, processor time and files"


def _limit(which: int, most: int) -> None:
    hard = resource.getrlimit(which)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (most, most))


def drop_capabilities() -> str | None:
    """Gives up the rights of an administrator, if the process has them."""
    header = struct.pack("II", 0x20080522, 0)
    nothing = bytes(24)
    capset = 126
    return None if LIBC.syscall(capset, header, nothing) else "no rights of an administrator"


def hide_files(readable: Sequence[str]) -> str | None:
    """Leaves only these files and folders readable, and no connection and no signal to other processes."""
    abi = LIBC.syscall(CREATE_RULESET, None, 0, 1)
    if abi < 1:
        return None
    rights = max(mask for first, mask in FILE_RIGHTS.items() if abi >= first)
    handled = struct.pack("QQQ", rights, NET_RIGHTS if abi >= NET_ABI else 0, SCOPES if abi >= SCOPE_ABI else 0)
    size = 24 if abi >= SCOPE_ABI else 16 if abi >= NET_ABI else 8
    ruleset = LIBC.syscall(CREATE_RULESET, handled, size, 0)
    if ruleset < 0:
        return None
    for path in readable:
        try:
            file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        allowed = EXECUTE | READ_FILE | (READ_DIR if os.path.isdir(path) else 0)
        rule = struct.pack("=Qi", allowed, file)
        LIBC.syscall(ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0)
        os.close(file)
    LIBC.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    refused = LIBC.syscall(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return None if refused else f"Landlock {abi}"


def forbid_calls() -> str | None:
    """Ends the process when it starts another one, opens a connection, or reaches for another process. Threads are
    allowed.
    """
    if platform.machine() != "x86_64":
        return None
    program = _program()
    instructions = b"".join(program)
    memory = ctypes.create_string_buffer(instructions, len(instructions))
    filter_ = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(memory))
    LIBC.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return None if LIBC.prctl(SET_SECCOMP, FILTER_MODE, filter_, 0, 0) else "seccomp"


def _program() -> list[bytes]:
    """The filter of system calls, as instructions of BPF: a jump leaves out this number of the next ones."""

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    def unless(*test: bytes) -> list[bytes]:
        """Ends the process unless the tests leave its last two instructions out."""
        return [*test, step(RETURN, KILL_PROCESS), step(RETURN, ALLOW)]

    kill = step(RETURN, KILL_PROCESS)
    program = [
        step(LOAD, ARCHITECTURE),
        step(EQUAL, X86_64, if_true=1),
        kill,
        step(LOAD, NUMBER),
        step(AT_LEAST, X32, if_false=1),
        kill,
        step(EQUAL, CLONE3, if_false=1),  # its flags lie in memory, which a filter cannot read; libc then takes clone
        step(RETURN, NO_SUCH_CALL),
    ]
    for number in FORBIDDEN.values():
        program += [step(EQUAL, number, if_false=1), kill]
    threads = unless(step(LOAD, ARGUMENTS), step(ANY_BIT, CLONE_THREAD, if_true=1))
    own = unless(step(LOAD, ARGUMENTS), step(EQUAL, os.getpid(), if_true=1))
    read_only = unless(step(LOAD, ARGUMENTS + 16), step(EQUAL, 0, if_true=1))  # no new limit
    for number, test in ((CLONE, threads), (TGKILL, own), (PRLIMIT, read_only)):
        program += [step(EQUAL, number, if_false=len(test)), *test]
    return [*program, step(RETURN, ALLOW)]


def confine(readable: Sequence[str], memory_bytes: int, processor_s: int) -> list[str]:
    """Gives all of it up. Returns the names of the measures that are in force."""
    LIBC.prctl(SET_DUMPABLE, 0, 0, 0, 0)
    measures: list[Callable[[], str | None]] = [
        lambda: limit_resources(memory_bytes, processor_s),
        drop_capabilities,
        lambda: hide_files(readable),
        forbid_calls,
    ]
    return [name for measure in measures if (name := measure()) is not None]
