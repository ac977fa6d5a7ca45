"""Which system calls a sandbox's processes may make: one allow-list, for every backend.

What ordinary development needs (compilers, interpreters, git, debuggers, databases, anything with threads)
and nothing that only administers a machine or that has been a way out of containers. Written down by
purpose, so that it can be audited by reading; a call in no group is refused.

- :func:`profile`: the `linux.seccomp` object of an OCI runtime's configuration;
- :func:`docker_profile`: the same as text, for Docker's `--security-opt seccomp=`.

A refused call fails with EPERM. Where programs have a second way that they take only if the kernel does not
know the first, it fails with ENOSYS instead (:data:`NOT_HERE`). A name that the runtime's libseccomp does
not know is skipped by it, and a call newer than every name here gets ENOSYS from the runtime, so that
a C library newer than this list falls back. Needs Linux 4.8, where a tracer cannot rewrite what the
filter has passed. What a filter cannot see (paths, uids) is for namespaces and capabilities.
"""

from __future__ import annotations

import errno
import json
import platform
from typing import Any

from sandboxes.protocol import SandboxError

ARCHITECTURES = {
    "x86_64": "SCMP_ARCH_X86_64",
    "amd64": "SCMP_ARCH_X86_64",
    "aarch64": "SCMP_ARCH_AARCH64",
    "arm64": "SCMP_ARCH_AARCH64",
}
"""By `platform.machine()`. Each alone, without its 32-bit calls (i386, x32, arm): i386's `socketcall` takes
its arguments from memory, where no filter can look, and would undo the rules for `socket`; the rest is kernel
code that hardly anyone tests. A 32-bit program is killed at its first call."""

# ---- allowed, whatever the arguments ---------------------------------------------------------------------

FILES = """
    open openat openat2 creat close close_range read write readv writev pread64 pwrite64 preadv pwritev
    preadv2 pwritev2 lseek dup dup2 dup3 fcntl flock ioctl pipe pipe2 stat fstat lstat newfstatat statx
    statfs fstatfs access faccessat faccessat2 getdents getdents64 readlink readlinkat getcwd chdir fchdir
    mkdir mkdirat rmdir link linkat symlink symlinkat unlink unlinkat rename renameat renameat2 truncate
    ftruncate fallocate fadvise64 readahead cachestat chmod fchmod fchmodat fchmodat2 chown fchown lchown
    fchownat umask utime utimes utimensat futimesat fsync fdatasync syncfs sync_file_range sendfile
    copy_file_range splice tee getxattr lgetxattr fgetxattr getxattrat setxattr lsetxattr fsetxattr
    setxattrat listxattr llistxattr flistxattr listxattrat removexattr lremovexattr fremovexattr
    removexattrat
"""
"""`ioctl` as a whole: a terminal into which TIOCSTI could type is never shared with a sandbox."""
WAITING = """
    poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2
    eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime timerfd_gettime
    inotify_init inotify_init1 inotify_add_watch inotify_rm_watch
"""
MEMORY = """
    brk mmap munmap mremap mprotect msync mincore madvise mlock mlock2 mlockall munlock munlockall
    memfd_create membarrier mseal map_shadow_stack pkey_alloc pkey_free pkey_mprotect
"""
PROCESSES = """
    fork vfork execve execveat exit exit_group wait4 waitid restart_syscall getpid getppid gettid getpgid
    setpgid getpgrp getsid setsid prctl arch_prctl set_tid_address set_robust_list get_robust_list rseq
    futex futex_waitv futex_wait futex_wake futex_requeue pidfd_open pidfd_send_signal
    getrlimit setrlimit prlimit64 getrusage times getcpu getpriority setpriority ioprio_get ioprio_set
    sched_yield sched_getaffinity sched_setaffinity sched_getattr sched_setattr sched_getparam sched_setparam
    sched_getscheduler sched_setscheduler sched_get_priority_max sched_get_priority_min sched_rr_get_interval
"""
DEBUGGING = "ptrace"
"""gdb and strace; the kernel lets a process trace those of its own uid, and the supervisor has another."""
SIGNALS = """
    kill tkill tgkill rt_sigaction rt_sigprocmask rt_sigpending rt_sigqueueinfo rt_tgsigqueueinfo rt_sigreturn
    rt_sigsuspend rt_sigtimedwait sigaltstack pause alarm
"""
TIME = """
    time gettimeofday clock_gettime clock_getres nanosleep clock_nanosleep getitimer setitimer
    timer_create timer_delete timer_settime timer_gettime timer_getoverrun
"""
"""Reading and waiting. The clock is the host's: there is no namespace that makes setting it harmless."""
IDENTITY = """
    getuid geteuid getgid getegid getresuid getresgid getgroups setuid setgid setreuid setregid setresuid
    setresgid setgroups setfsuid setfsgid capget capset
"""
"""The supervisor changes its uid with these; a command has no capability left to."""
SELF_RESTRAINT = "seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self"
SYSTEM = "uname sysinfo getrandom"
SOCKETS = """
    bind listen accept accept4 connect shutdown getsockname getpeername getsockopt setsockopt
    sendto sendmsg sendmmsg recvfrom recvmsg recvmmsg
"""
"""On a socket that exists; which kinds may be made is among the rules on arguments."""
IPC = """
    shmget shmat shmdt shmctl semget semop semtimedop semctl msgget msgsnd msgrcv msgctl
    mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
"""

GROUPS = (
    FILES,
    WAITING,
    MEMORY,
    PROCESSES,
    DEBUGGING,
    SIGNALS,
    TIME,
    IDENTITY,
    SELF_RESTRAINT,
    SYSTEM,
    SOCKETS,
    IPC,
)
ALLOWED = tuple(name for group in GROUPS for name in group.split())

# ---- allowed with some arguments -------------------------------------------------------------------------

NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET: kernel code for root, opened to anyone."""
FILE_KIND, KINDS = 0xF000, {"unspecified": 0, "fifo": 0x1000, "regular": 0x8000, "socket": 0xC000}
"""mknod without devices. That includes 0:0, which needs no capability and is an overlay's "deleted" mark."""
PERSONALITIES = {
    "linux": 0x0,
    "32-bit uname": 0x8,
    "uname 2.6": 0x20000,
    "32-bit uname 2.6": 0x20008,
    "no address randomisation (gdb)": 0x40000,
    "query": 0xFFFFFFFF,
}
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
NETLINK_ROUTE = 0
"""What getifaddrs() and name lookup ask. Other protocols configure firewalls, audit and device events."""

# ---- refused, in a way of their own ----------------------------------------------------------------------

NOT_HERE = """
    clone3 io_uring_setup io_uring_enter io_uring_register io_setup io_destroy io_submit io_cancel
    io_getevents io_pgetevents process_vm_readv process_vm_writev process_madvise process_mrelease vmsplice
    memfd_secret keyctl add_key request_key statmount listmount open_tree_attr file_getattr file_setattr
    lsm_get_self_attr lsm_set_self_attr lsm_list_modules set_mempolicy_home_node
"""
"""ENOSYS, so that programs go the older way. clone3 hides its flags in memory, out of a filter's sight; glibc
then uses clone. io_uring makes system calls that no filter sees. The contexts of io_setup are counted for the
whole machine: one sandbox could take them all. Keyrings know no namespaces."""
NO_OP = "sync"
"""Succeeds at once. It would wait for every disk of the host, to save what is about to be thrown away."""


def profile(machine: str | None = None) -> dict[str, Any]:
    """The allow-list as `linux.seccomp` of an OCI configuration, for this machine or the one named.

    Raises `SandboxError` on a machine whose calls nobody has looked at.
    """
    machine = machine or platform.machine()
    architecture = ARCHITECTURES.get(machine.lower())
    if architecture is None:
        raise SandboxError(f"no system call filter for {machine}: use an x86-64 or a 64-bit ARM machine")
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.EPERM,
        "architectures": [architecture],
        "syscalls": [
            _allow(*ALLOWED),
            _allow("clone", where=[_masked(0, NEW_NAMESPACES, 0)]),
            *(_allow("mknod", where=[_masked(1, FILE_KIND, kind)]) for kind in KINDS.values()),
            *(_allow("mknodat", where=[_masked(2, FILE_KIND, kind)]) for kind in KINDS.values()),
            *(_allow("personality", where=[_equal(0, value)]) for value in PERSONALITIES.values()),
            *(_allow("socket", where=[_equal(0, family)]) for family in (AF_UNIX, AF_INET, AF_INET6)),
            _allow("socket", where=[_equal(0, AF_NETLINK), _equal(2, NETLINK_ROUTE)]),
            _allow("socketpair", where=[_equal(0, AF_UNIX)]),
            _answer(errno.ENOSYS, NOT_HERE),
            _answer(0, NO_OP),
        ],
    }


def docker_profile() -> str:
    """The same in Docker's format, which reads an OCI object as it is but keeps it in a string."""
    return json.dumps(profile())


def _allow(*names: str, where: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A rule that lets calls pass when every condition holds. Several rules for one call are alternatives."""
    rule: dict[str, Any] = {"names": list(names), "action": "SCMP_ACT_ALLOW"}
    return {**rule, "args": where} if where else rule


def _answer(number: int, names: str) -> dict[str, Any]:
    return {"names": names.split(), "action": "SCMP_ACT_ERRNO", "errnoRet": number}


def _equal(index: int, value: int) -> dict[str, Any]:
    # Of an int the kernel reads the lower half, and a caller may leave anything in the upper one.
    return _masked(index, 0xFFFFFFFF, value)


def _masked(index: int, mask: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}
