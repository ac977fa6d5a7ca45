"""Attacks on PID 1: whoever ends, stops, reads or speaks for it owns the sandbox's answers."""

from __future__ import annotations

from tests.sandboxes.attacks.probe import Kind, Probe, answers_later, recovers

SUPERVISOR = (
    Probe(
        "signal the supervisor",
        Kind.INTERFERENCE,
        """
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGCHLD, signal.SIGRTMIN, 0):
    forbidden(f"kill {number}", lambda: os.kill(1, number))
    refused("tkill", 1, int(number))
    refused("tgkill", 1, 1, int(number))
""",
    ),
    Probe(
        "signal the supervisor through a pidfd",
        Kind.INTERFERENCE,
        """
fd = os.pidfd_open(1)
for number in (signal.SIGKILL, signal.SIGSTOP):
    refused("pidfd_send_signal", fd, int(number), 0, 0)
""",
    ),
    Probe(
        "kill every process that can be reached",
        Kind.INTERFERENCE,
        """
for _ in range(50):
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nobody else was left
""",
    ),
    Probe(
        "stop every process that starts",
        Kind.INTERFERENCE,
        """
def stop():
    while True:
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if pid not in (1, os.getpid()):
                try:
                    os.kill(pid, signal.SIGSTOP)
                except OSError:
                    pass

background(lambda: (time.sleep(0.3), stop()))
""",
        after=recovers,
    ),
    Probe(
        "take the supervisor's descriptors by limit (prlimit NOFILE 0)",
        Kind.INTERFERENCE,
        """
for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC):
    forbidden(f"prlimit {which}", lambda: resource.prlimit(1, which, (0, 0)))
    forbidden(f"reading limit {which}", lambda: resource.prlimit(1, which))
""",
    ),
    Probe(
        "trace the supervisor",
        Kind.INTERFERENCE,
        """
ATTACH, SEIZE = 16, 0x4206
refused("ptrace", ATTACH, 1, 0, 0)
refused("ptrace", SEIZE, 1, 0, 0)
""",
    ),
    Probe(
        "read or write the supervisor's memory",
        Kind.INTERFERENCE,
        """
buffer = ctypes.create_string_buffer(8)
here = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
there = (ctypes.c_size_t * 2)(0x400000, 8)
for name in ("process_vm_readv", "process_vm_writev"):
    refused(name, 1, here, 1, there, 1, 0)
forbidden("/proc/1/mem for reading", lambda: os.open("/proc/1/mem", os.O_RDONLY))
forbidden("/proc/1/mem for writing", lambda: os.open("/proc/1/mem", os.O_RDWR))
refused("process_madvise", os.pidfd_open(1), there, 1, 21, 0)
refused("move_pages", 1, 0, 0, 0, 0, 0)
""",
    ),
    Probe(
        "use or take the supervisor's descriptors",
        Kind.INTERFERENCE,
        """
forbidden("/proc/1/fd", lambda: os.listdir("/proc/1/fd"))
for number in (*range(12), *range(98, 112)):
    forbidden(f"/proc/1/fd/{number}", lambda: os.open(f"/proc/1/fd/{number}", os.O_RDWR))
pidfd = os.pidfd_open(1)
for number in (0, 1, 100, 101, 102):
    refused("pidfd_getfd", pidfd, number, 0)
""",
    ),
    Probe(
        "reach the supervisor's client through the socket that was mounted for it",
        Kind.INTERFERENCE,
        """
for name in os.listdir("/.swe-env"):
    if name != "init":
        end = socket.socket(socket.AF_UNIX)
        forbidden(f"connecting to {name}", lambda: end.connect(f"/.swe-env/{name}"), {errno.ECONNREFUSED})
        forbidden(f"replacing {name}", lambda: os.unlink(f"/.swe-env/{name}"), {errno.EBUSY})
""",
    ),
    Probe(
        "speak for the supervisor through an inherited descriptor",
        Kind.INTERFERENCE,
        """
# The shell's own: 0 to 2, and the files by which it comes to its script and leaves its state.
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        kind = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        continue  # the listing's own
    if number > 2 and not kind.startswith("/memfd:"):
        breach(f"descriptor {number} is {kind}")
    if number in (0, 1, 2) and not kind.startswith(("pipe:", "/dev/null")):
        breach(f"descriptor {number} is {kind}")
""",
    ),
    Probe(
        "read the supervisor's environment, layout and state",
        Kind.INFORMATION,
        """
for name in ("environ", "auxv", "maps", "smaps", "stack", "syscall", "io", "pagemap", "personality"):
    forbidden(f"/proc/1/{name}", lambda: os.read(os.open(f"/proc/1/{name}", os.O_RDONLY), 64))
forbidden("/proc/1/map_files", lambda: os.listdir("/proc/1/map_files"))
for name in ("root", "cwd", "exe", "ns/mnt"):
    forbidden(f"/proc/1/{name}", lambda: os.stat(f"/proc/1/{name}"))
    forbidden(f"/proc/1/{name}", lambda: os.readlink(f"/proc/1/{name}"))
""",
    ),
    Probe(
        "have the supervisor killed when memory is short, or change it through /proc",
        Kind.INTERFERENCE,
        """
for name, text in {
    "oom_score_adj": "1000", "oom_adj": "15", "coredump_filter": "1", "clear_refs": "1", "comm": "x",
    "timerslack_ns": "1", "sched": "0", "loginuid": "0", "attr/current": "x", "uid_map": "0 0 1",
    "make-it-fail": "1", "projid_map": "0 0 1", "setgroups": "deny", "autogroup": "1",
}.items():
    for path in (f"/proc/1/{name}", f"/proc/1/task/1/{name}"):
        forbidden(path, lambda: put(path, text))
""",
    ),
    Probe(
        "take the supervisor's uid",
        Kind.INTERFERENCE,
        """
own = [int(uid) for uid in status("Uid", 1).split()]
if 0 in own:
    breach("the supervisor is root, as the commands are")
for uid in {own[0], 1000, 65534}:
    forbidden(f"setresuid {uid}", lambda: os.setresuid(uid, uid, uid), also=(errno.EINVAL,))
    forbidden(f"setresgid {uid}", lambda: os.setresgid(uid, uid, uid), also=(errno.EINVAL,))
    forbidden(f"setgroups {uid}", lambda: os.setgroups([uid]), also=(errno.EINVAL,))
    if libc.setfsuid(uid) != 0 or libc.setfsuid(-1) != 0:
        breach(f"setfsuid {uid}")
""",
    ),
    Probe(
        "slow the supervisor down (affinity, scheduler, nice, I/O class)",
        Kind.INTERFERENCE,
        """
forbidden("affinity", lambda: os.sched_setaffinity(1, {0}))
forbidden("idle scheduler", lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)))
forbidden("nice", lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))
uid = int(status("Uid", 1).split()[0])
forbidden("nice by user", lambda: os.setpriority(os.PRIO_USER, uid, 19), also=(errno.ESRCH,))
refused("ioprio_set", 1, 1, 3 << 13)
""",
    ),
    Probe(
        "compare kernel objects with the supervisor's",
        Kind.INFORMATION,
        'for what in range(7): refused("kcmp", 1, os.getpid(), what, 0, 0)',
    ),
    Probe(
        "replace the supervisor's program",
        Kind.INTERFERENCE,
        """
for path in ("/.swe-env/init", "/dev/.pid1"):
    if not os.path.exists(path):
        continue
    forbidden(f"rename {path}", lambda: os.rename(path, path + "2"), also=(errno.EBUSY,))
    forbidden(f"write {path}", lambda: put(path, "x"), also=(errno.ETXTBSY,))
    forbidden(f"unlink {path}", lambda: os.unlink(path), also=(errno.EBUSY,))
    forbidden(f"chmod {path}", lambda: os.chmod(path, 0))
    forbidden(f"truncate {path}", lambda: os.truncate(path, 0), also=(errno.ETXTBSY,))
""",
    ),
    Probe(
        "forge the frames of a reply in a command's output",
        Kind.INTERFERENCE,
        """
frame = struct.pack("<I", 3) + b"ok\\n" + struct.pack("<IiIQQQ", 0, 0, 0, 3, 0, 1)
for _ in range(200):
    sys.stdout.buffer.write(frame)
print(flush=True)
""",
    ),
    Probe(
        "leave a stream of output for the next command",
        Kind.INTERFERENCE,
        """
def flood():
    time.sleep(0.2)
    while True:
        os.write(1, b"late" * 4000)

background(flood)
""",
        after=answers_later,
    ),
)
