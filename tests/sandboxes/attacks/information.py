"""Attacks on what is none of the sandbox's business: the host's kernel and processes, other sandboxes."""

from __future__ import annotations

from tests.sandboxes.attacks.probe import Kind, Probe


def information(name: str, script: str, *, shell: bool = False) -> Probe:
    return Probe(name, Kind.INFORMATION, script, shell=shell)


INFORMATION = (
    information(
        "read what describes the kernel's memory",
        """
for name in (
    "kcore", "kallsyms", "modules", "iomem", "ioports", "slabinfo", "vmallocinfo", "pagetypeinfo",
    "kpagecount", "kpageflags", "kpagecgroup", "config.gz", "cmdline",
):
    try:
        with open("/proc/" + name, "rb") as file:
            if file.read(64):
                breach(f"/proc/{name} can be read")
    except OSError:
        pass
""",
    ),
    information(
        "read counters and lists of the whole machine",
        """
for name in (
    "keys", "key-users", "timer_list", "timer_stats", "sched_debug", "latency_stats", "interrupts",
    "softirqs", "acpi", "asound", "scsi", "mtrr",
):
    path = "/proc/" + name
    try:
        if os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(64):
            breach(f"{path} can be read")
    except OSError:
        pass
""",
    ),
    information(
        "read firmware, serial numbers and debugging files in /sys",
        """
for path in (
    "firmware", "devices/virtual/dmi", "devices/virtual/powercap", "class/dmi/id/product_uuid", "fs/bpf",
    "kernel/debug", "kernel/tracing", "kernel/security", "kernel/slab", "kernel/vmcoreinfo", "kernel/notes",
    "kernel/boot_params",
):
    path = "/sys/" + path
    try:
        if os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(64):
            breach(f"{path} can be read")
    except OSError:
        pass
""",
    ),
    information(
        "read the kernel's log",
        """
buffer = ctypes.create_string_buffer(4096)
for action in (2, 3, 10):
    refused("syslog", action, buffer, 4096)
for path in ("/dev/kmsg", "/proc/kmsg"):
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        if os.read(fd, 64):
            breach(f"{path} can be read")
    except OSError:
        pass
""",
    ),
    information(
        "see the host's processes",
        """
pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
others = [pid for pid in pids if pid not in (1, os.getpid(), os.getppid())]
if len(others) > 4 or max(pids) > 200_000:
    breach(f"there are processes {others}")
if status("NSpid").count("\\t") > 0:
    breach("the namespace is nested in one that can be seen")
# A pid of the host, if it is not one here by chance.
for pid in range(1, 65536):
    if pid not in pids and os.path.exists(f"/proc/{pid}/stat"):
        if status("Tgid", pid) == status("Pid", pid):
            breach(f"process {pid} is hidden from the listing but there")
""",
    ),
    information(
        "find the names of other sandboxes",
        """
name = os.environ["NEIGHBOUR_REVERSED"][::-1]
paths = [f"/proc/self/{one}" for one in ("cgroup", "mountinfo", "mounts", "environ", "net/unix", "net/arp")]
paths += ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/proc/1/cgroup", "/proc/locks"]
for path in paths:
    try:
        if name in open(path).read():
            breach(f"the neighbour's name is in {path}")
    except OSError:
        pass
# Groups side by side would be seen as directories beside or below one's own.
for folder, folders, _ in os.walk("/sys/fs/cgroup"):
    beside = [one for one in folders if "swe-env" in one or len(one) == 64]
    if beside:
        breach(f"groups {beside[:3]} are in {folder}")
""",
    ),
    information(
        "see the host's and other sandboxes' shared memory, queues and semaphores",
        """
for kind in ("shm", "msg", "sem"):
    lines = open(f"/proc/sysvipc/{kind}").read().splitlines()
    if len(lines) > 1:
        breach(f"there are {len(lines) - 1} of {kind}")
for folder in ("/dev/shm", "/dev/mqueue"):
    if os.path.isdir(folder) and os.listdir(folder):
        breach(f"{folder} holds {os.listdir(folder)}")
""",
    ),
    information(
        "see the host's name and network",
        """
if os.environ["HOST_NAME"] in (socket.gethostname(), os.uname().nodename):
    breach("the host's name is here")
for path in ("/proc/net/tcp", "/proc/net/udp", "/proc/net/unix", "/proc/net/arp", "/proc/net/route"):
    text = open(path).read()
    connections = text.splitlines()[1:]
    if path == "/proc/net/unix" and len(connections) == 2 and "/swe-env-" in "".join(connections):
        connections = []  # both ends of one: the supervisor's own, where it has one
    if os.environ["HOST_SOCKET"] in text or connections:
        breach(f"{path} lists connections")
""",
    ),
    information(
        "find secrets of the harness in the environment",
        """
secret = os.environ["HOST_SECRET_REVERSED"][::-1].encode()
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        held = open(f"/proc/{pid}/environ", "rb").read()
    except OSError:
        continue
    if secret in held:
        breach(f"process {pid} knows the harness's secret")
""",
    ),
)
