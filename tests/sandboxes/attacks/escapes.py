"""Attacks on the walls: the host's files, devices, kernel and network, and root's powers.

Written so that one that succeeds does no harm: it sets what is already set, reads rather than writes, and
names files that do not exist.
"""

from __future__ import annotations

from tests.sandboxes.attacks.probe import Kind, Probe


def escape(name: str, script: str, *, shell: bool = False) -> Probe:
    return Probe(name, Kind.ESCAPE, script, shell=shell)


FILES = (
    escape(
        "mount and unmount",
        """
os.makedirs("/tmp/m", exist_ok=True)
REMOUNT, BIND, MOVE = 32, 4096, 8192
refused("mount", b"none", b"/tmp/m", b"tmpfs", 0, 0)
refused("mount", b"proc", b"/tmp/m", b"proc", 0, 0)
refused("mount", b"/", b"/tmp/m", b"", BIND, 0)
refused("mount", b"none", b"/proc/sys", b"", REMOUNT | BIND, 0)
refused("mount", b"none", b"/sys", b"", REMOUNT, 0)
refused("mount", b"/proc/sys", b"/tmp/m", b"", MOVE, 0)
refused("mount", b"c", b"/tmp/m", b"cgroup", 0, b"memory")
refused("mount", b"o", b"/tmp/m", b"overlay", 0, b"lowerdir=/usr:/etc")
for path in (b"/proc/kcore", b"/proc/keys", b"/sys/firmware", b"/dev/shm", b"/proc"):
    refused("umount2", path, 2)
""",
    ),
    escape(
        "mount through the new interface",
        """
refused("fsopen", b"tmpfs", 0)
refused("fspick", -100, b"/", 0)
refused("open_tree", -100, b"/", 1)
refused("move_mount", -100, b"/tmp", -100, b"/mnt", 0)
refused("mount_setattr", -100, b"/", 0, bytes(32), 32)
""",
    ),
    escape(
        "change the root directory",
        """
refused("chroot", b"/")
refused("chroot", b"/usr")
refused("pivot_root", b"/", b"/tmp")
""",
    ),
    escape(
        "make device files, or an overlay's deletion mark",
        """
for name, kind, device in (
    ("disk", stat.S_IFBLK, (254, 0)), ("disk", stat.S_IFBLK, (8, 0)), ("memory", stat.S_IFCHR, (1, 1)),
    ("kmsg", stat.S_IFCHR, (1, 11)), ("null", stat.S_IFCHR, (1, 3)), ("deletion mark", stat.S_IFCHR, (0, 0)),
    ("fuse", stat.S_IFCHR, (10, 229)), ("kvm", stat.S_IFCHR, (10, 232)),
):
    forbidden(f"mknod {name}", lambda: os.mknod("/tmp/device", kind | 0o600, os.makedev(*device)))
    refused("mknodat", -100, b"/tmp/device", kind | 0o600 | 0x10000, os.makedev(*device))
os.mkfifo("/tmp/a-pipe-is-fine")
""",
    ),
    escape(
        "open devices of the host",
        """
for folder, _, names in os.walk("/dev"):  # 136 are terminals of its own
    for name in names:
        path = os.path.join(folder, name)
        found = os.lstat(path)
        device = os.major(found.st_rdev), os.minor(found.st_rdev)
        if stat.S_ISBLK(found.st_mode) or (
            stat.S_ISCHR(found.st_mode) and device not in DEVICES and device[0] != 136
        ):
            breach(f"{path} is there")
for name in ("mem", "kmem", "port", "kmsg", "sda", "vda", "fuse", "kvm", "net/tun", "loop0", "userfaultfd"):
    forbidden(name, lambda: os.open(f"/dev/{name}", os.O_RDONLY))
""",
    ),
    escape(
        "write kernel settings in /proc",
        """
for path in (
    "sysrq-trigger", "sys/kernel/core_pattern", "sys/kernel/modprobe", "sys/kernel/hostname",
    "sys/kernel/sysrq", "sys/kernel/panic", "sys/kernel/poweroff_cmd", "sys/kernel/ns_last_pid",
    "sys/kernel/shmall", "sys/kernel/msgmni", "sys/kernel/randomize_va_space", "sys/vm/drop_caches",
    "sys/vm/overcommit_memory", "sys/net/ipv4/ip_forward", "sys/fs/binfmt_misc/register",
    "sys/user/max_user_namespaces", "irq/default_smp_affinity", "mtrr", "bus/pci/devices", "scsi/scsi",
    "acpi/wakeup", "latency_stats", "kcore", "driver/rtc",
):
    path = "/proc/" + path
    if os.path.isfile(path):  # what is hidden reads as /dev/null or as an empty directory
        # Opening is enough: nothing is written, were it possible.
        forbidden(path, lambda: os.open(path, os.O_WRONLY))
""",
    ),
    escape(
        "write anything in /sys",
        """
for folder, folders, names in os.walk("/sys"):
    if folder.count("/") > 4 or folder == "/sys/fs/cgroup":  # groups are an attack of their own
        folders.clear()
    for name in names:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            forbidden(path, lambda: os.open(path, os.O_WRONLY))
""",
    ),
    escape(
        "loosen the limits or run a program of the host by a control group (release_agent)",
        """
for folder, _, names in os.walk("/sys/fs/cgroup"):
    forbidden(f"new group in {folder}", lambda: os.mkdir(folder + "/escape"))
    for name in names:
        path = os.path.join(folder, name)
        forbidden(path, lambda: os.open(path, os.O_WRONLY))
""",
    ),
    escape(
        "open a file by its handle",
        """
space = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
refused("name_to_handle_at", -100, b"/etc/hostname", space, ctypes.byref(ctypes.c_int()), 0)
handle = struct.pack("IiII", 8, 1, 2, 0)  # the root directory of an ext4 disk
refused("open_by_handle_at", os.open("/etc/hostname", os.O_RDONLY), handle, os.O_RDONLY)
""",
    ),
    escape(
        "find a directory of the host that the runtime left open",
        """
root = os.stat("/").st_dev
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        found = os.fstat(number)
    except OSError:
        continue
    if stat.S_ISDIR(found.st_mode):
        breach(f"descriptor {number} is a directory")
for number in range(3, 30):
    path = f"/proc/self/fd/{number}/../../.."
    forbidden(path, lambda: os.stat(path), also=(errno.ENOTDIR,))
climbed = os.stat("/" + "../" * 40)
if (climbed.st_dev, climbed.st_ino) != (root, os.stat("/").st_ino):
    breach("climbed out of the root directory")
""",
    ),
    escape(
        "reach the host's files through other processes",
        """
for pid in filter(str.isdigit, os.listdir("/proc")):
    if int(pid) in (os.getpid(), os.getppid()):
        continue
    try:
        there = os.stat(f"/proc/{pid}/root/.")
    except OSError:
        continue
    if (there.st_dev, there.st_ino) != (os.stat("/").st_dev, os.stat("/").st_ino):
        breach(f"/proc/{pid}/root is elsewhere")
if os.path.exists("/proc/1/root" + os.environ["HOST_FILE"]) or os.path.exists(os.environ["HOST_FILE"]):
    breach("a file of the host is here")
""",
    ),
    escape(
        "forge the overlay's own attributes",
        """
os.makedirs("/tmp/opaque", exist_ok=True)
for name in ("overlay.opaque", "overlay.redirect", "overlay.metacopy"):
    forbidden(name, lambda: os.setxattr("/tmp/opaque", "trusted." + name, b"y"), also=(errno.EOPNOTSUPP,))
capability = struct.pack("5I", 0x02000001, 1 << 21, 0, 0, 0)
forbidden("file capability", lambda: os.setxattr("/tmp/opaque", "security.capability", capability))
""",
    ),
    escape(
        "watch the whole file system (fanotify)",
        'refused("fanotify_init", 0, 0)\nrefused("fanotify_init", 0x200, 0)',
    ),
)

KERNEL = (
    escape(
        "enter new namespaces",
        """
for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80):
    refused("unshare", flag)
    if flag != 0x80:
        result, error = call("clone", flag | 17, 0, 0, 0, 0)
        if result == 0:
            os._exit(0)
        if result > 0 or error != errno.EPERM:
            breach(f"clone with {flag:#x} gave {result}")
result, error = call("clone3", struct.pack("11Q", 0x10000000, *[0] * 3, 17, *[0] * 6), 88)
if result == 0:
    os._exit(0)
if result > 0 or error != errno.ENOSYS:
    breach(f"clone3 gave {result} {error}")
""",
    ),
    escape(
        "join other namespaces",
        """
for kind in ("mnt", "net", "pid", "user", "uts", "ipc", "cgroup"):
    fd = os.open(f"/proc/self/ns/{kind}", os.O_RDONLY)
    refused("setns", fd, 0)
refused("setns", os.pidfd_open(1), 0x20000)
""",
    ),
    escape(
        "load programs into the kernel (bpf)",
        """
for command in (0, 5, 11, 18):
    refused("bpf", command, ctypes.create_string_buffer(128), 128)
""",
    ),
    escape(
        "load or unload kernel modules",
        """
refused("init_module", b"", 0, b"")
refused("finit_module", os.open("/etc/hostname", os.O_RDONLY), b"", 0)
refused("delete_module", b"no_such_module", 0o4000)
""",
    ),
    escape(
        "use performance counters",
        'refused("perf_event_open", struct.pack("IIQ", 1, 112, 0) + bytes(96), 0, -1, -1, 0)',
    ),
    escape(
        "stall the kernel in page faults (userfaultfd)",
        'refused("userfaultfd", 0)\nrefused("userfaultfd", 1)',
    ),
    escape(
        "make system calls unseen (io_uring)",
        """
refused("io_uring_setup", 4, ctypes.create_string_buffer(120))
refused("io_uring_enter", -1, 0, 0, 0, 0)
refused("io_uring_register", -1, 0, 0, 0)
""",
    ),
    escape(
        "make 32-bit system calls, past the filter",
        """
# socketcall(SYS_SOCKET, {AF_ALG, SOCK_SEQPACKET, 0}): its arguments lie in memory, below 4 GiB.
def attempt(code):
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    run = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.write(writer, struct.pack("q", run()))
        os._exit(0)
    os.close(writer)
    got = os.read(reader, 8)
    os.waitpid(child, 0)
    return struct.unpack("q", got)[0] if got else None

if X86:
    # getpid by int 0x80, then by the x32 number
    for what, code in {
        "i386": b"\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3",
        "x32": b"\\xb8" + struct.pack("<I", 0x40000000 + 39) + b"\\x0f\\x05\\xc3",
    }.items():
        result = attempt(code)
        # An int in the register's lower half, read as one.
        if result is not None and ctypes.c_int(result & 0xFFFFFFFF).value >= 0:
            breach(f"{what} getpid gave {result}")
    if attempt(b"\\xb8\\x27\\0\\0\\0\\x0f\\x05\\xc3") is None:
        raise SystemExit("the 64-bit getpid did not work either: this attack proves nothing")
""",
    ),
    escape(
        "let a tracer rewrite a refused call",
        """
# A child stops at getppid; we turn it into unshare(CLONE_NEWUSER). The filter must see what really runs.
TRACEME, GETREGS, SETREGS, SYSCALL, CONT = 0, 12, 13, 24, 7
if X86:
    child = os.fork()
    if child == 0:
        libc.ptrace(TRACEME, 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        result = libc.syscall(ctypes.c_long(110), ctypes.c_long(0x10000000))
        os._exit(7 if result == 0 else 8)
    os.waitpid(child, 0)
    registers = (ctypes.c_ulonglong * 27)()
    changed = False
    for _ in range(400):
        libc.ptrace(SYSCALL, child, 0, 0)
        _, state = os.waitpid(child, 0)
        if os.WIFEXITED(state):
            break
        libc.ptrace(GETREGS, child, 0, ctypes.byref(registers))
        if registers[15] == 110 and registers[10] == ctypes.c_ulonglong(-38).value:
            registers[15] = 272
            libc.ptrace(SETREGS, child, 0, ctypes.byref(registers))
            changed = True
    if not changed:
        raise SystemExit("the tracer saw no getppid: this attack proves nothing")
    if os.WEXITSTATUS(state) != 8:
        breach(f"the rewritten call gave status {state}")
""",
    ),
    escape(
        "map pages at will (vmsplice, modify_ldt, personality)",
        """
reader, writer = os.pipe()
refused("vmsplice", writer, (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8), 1, 0)
refused("modify_ldt", 1, ctypes.create_string_buffer(16), 16)
refused("personality", 0x0400000)
refused("personality", 0x100000 | 0x0400000)
""",
    ),
    escape("reach ports of the hardware", 'refused("iopl", 3)\nrefused("ioperm", 0x80, 1, 1)'),
    escape(
        "restart or replace the kernel",
        """
CAD_OFF = 0  # would only turn Ctrl-Alt-Del off
refused("reboot", 0xFEE1DEAD, 672274793, CAD_OFF, 0)
refused("kexec_load", 0, 17, 0, 0)
refused("kexec_file_load", -1, -1, 0, b"", 0)
""",
    ),
    escape(
        "set the clock",
        """
now = time.time()
spec = struct.pack("qq", int(now), int(now % 1 * 1e9))
refused("clock_settime", 0, spec)
refused("settimeofday", struct.pack("qq", int(now), int(now % 1 * 1e6)), 0)
refused("adjtimex", struct.pack("I", 0x2) + bytes(300))
refused("clock_adjtime", 0, struct.pack("I", 0x2) + bytes(300))
""",
    ),
    escape(
        "rename the machine",
        """
name = socket.gethostname().encode()
refused("sethostname", name, len(name))
refused("setdomainname", b"(none)", 6)
""",
    ),
    escape(
        "manage swap, quotas and accounting",
        """
refused("swapon", b"/no/such", 0)
refused("swapoff", b"/no/such")
refused("quotactl", 0x800007 << 8, b"/no/such", 0, 0)
refused("acct", b"/no/such")
""",
    ),
    escape(
        "use kernel keyrings",
        """
refused("add_key", b"user", b"probe", b"x", 1, -3)
refused("request_key", b"user", b"probe", 0, -3)
for command in (0, 1, 6, 11):
    refused("keyctl", command, -5, 0, 0, 0)
""",
    ),
    escape(
        "write the runtime's or the host's programs through /proc/self/exe",
        """
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        target = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        continue
    if "runc" in target or "containerd" in target or "crun" in target:
        breach(f"process {pid} runs {target}")
""",
    ),
)

POWERS = (
    escape(
        "have capabilities",
        """
for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
    if int(status(name), 16):
        breach(f"{name} is {status(name)}")
if status("NoNewPrivs") != "1" or status("Seccomp") != "2":
    breach("no_new_privs or the filter is off")
""",
    ),
    escape(
        "regain capabilities by execve, fork or the ambient set",
        """
PR_CAP_AMBIENT, RAISE, SETUID, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS = 47, 2, 7, 28, 38
bounding = int(status("CapBnd"), 16)
for capability in range(41):
    if libc.prctl(PR_CAP_AMBIENT, RAISE, capability, 0, 0) == 0:
        breach(f"ambient {capability}")
    one = 1 << capability
    data = struct.pack("6I", one & 0xFFFFFFFF, one & 0xFFFFFFFF, 0, one >> 32, one >> 32, 0)
    refused("capset", struct.pack("Ii", 0x20080522, 0), data)
    inheritable = struct.pack("6I", 0, 0, one & 0xFFFFFFFF, 0, 0, one >> 32)
    call("capset", struct.pack("Ii", 0x20080522, 0), inheritable)  # may pass; must give nothing
    got = subprocess.check_output(["grep", "-E", "^Cap(Prm|Eff)", "/proc/self/status"], text=True)
    if any(int(line.split()[1], 16) for line in got.splitlines()):
        breach(f"execve gave {got.split()}")
if libc.prctl(PR_SET_SECUREBITS, 0, 0, 0, 0) == 0:
    breach("securebits could be set")
if libc.prctl(PR_SET_NO_NEW_PRIVS, 0, 0, 0, 0) == 0:
    breach("no_new_privs could be cleared")
""",
    ),
    escape(
        "regain powers by a setuid program",
        """
import shutil
shutil.copy("/usr/bin/python3", "/tmp/setuid")
forbidden("chown to another", lambda: os.chown("/tmp/setuid", 65533, 65533), also=(errno.EINVAL,))
os.chmod("/tmp/setuid", 0o6755)
show = "import os; print(os.getresuid(), open('/proc/self/status').read().split('CapEff:')[1].split()[0])"
done = subprocess.run(["/tmp/setuid", "-c", show], capture_output=True, text=True)
if done.stdout.strip() != "(0, 0, 0) 0000000000000000":
    breach(f"a setuid program ran as {done.stdout}")
""",
    ),
    escape(
        "become another user",
        """
for uid in (1, 33, 1000, 65534):
    forbidden(f"uid {uid}", lambda: os.setuid(uid), also=(errno.EINVAL,))
    forbidden(f"gid {uid}", lambda: os.setgid(uid), also=(errno.EINVAL,))
    forbidden(f"owner {uid}", lambda: os.chown("/tmp", uid, uid), also=(errno.EINVAL,))
""",
    ),
    escape(
        "ignore the modes of files",
        """
open("/tmp/locked", "w").close()
os.chmod("/tmp/locked", 0)
forbidden("reading mode 000", lambda: open("/tmp/locked").read())
forbidden("writing mode 000", lambda: open("/tmp/locked", "w"))
""",
    ),
    escape(
        "type into a terminal (TIOCSTI)",
        """
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
own, terminal = os.openpty()
for path in (*glob.glob("/dev/pts/*"), "/dev/tty", "/dev/console"):
    if path in (os.ttyname(terminal), "/dev/pts/ptmx"):
        continue
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        continue
    breach(f"{path} is somebody's terminal")
for fd in (0, 1, 2):
    forbidden(f"TIOCSTI on {fd}", lambda: fcntl.ioctl(fd, TIOCSTI, b"x"), also=(errno.ENOTTY,))
    forbidden(f"TIOCLINUX on {fd}", lambda: fcntl.ioctl(fd, TIOCLINUX, b"\\x03"), also=(errno.ENOTTY,))
""",
    ),
)

NETWORK = (
    escape(
        "connect out (TCP, UDP, DNS, metadata service, the host's own addresses)",
        """
NOWHERE = (errno.ENETUNREACH, errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.EHOSTUNREACH)
METADATA, BRIDGE, HOST = "169.254.169.254", "172.17.0.1", os.environ["HOST_ADDRESS"]
for address in ("192.0.2.1", "1.1.1.1", METADATA, BRIDGE, HOST, "10.0.2.2", "127.0.0.1"):
    for port in (53, 80, 443, int(os.environ["HOST_PORT"])):
        forbidden(f"{address}:{port}", lambda: socket.create_connection((address, port), 3), also=NOWHERE)
    if not address.startswith("127."):
        datagram = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        forbidden(f"datagram to {address}", lambda: datagram.sendto(b"x", (address, 53)), also=NOWHERE)
for address in ("2001:db8::1", "2606:4700:4700::1111"):
    lost = (*NOWHERE, errno.EAFNOSUPPORT)
    forbidden(address, lambda: socket.create_connection((address, 443), 3), also=lost)
try:
    breach(f"a name has the address {socket.getaddrinfo('example.com', 80)[0][4]}")
except socket.gaierror:
    pass
extra = [name for _, name in socket.if_nameindex() if name not in ("lo", "sit0", "tunl0", "ip6tnl0")]
if extra:
    breach(f"there are interfaces {extra}")
""",
    ),
    escape(
        "make raw and packet sockets",
        """
for family, kind, protocol in ((2, 3, 1), (2, 3, 255), (10, 3, 58), (17, 3, 0x300), (17, 2, 0x300)):
    forbidden(f"socket {family} {kind}", lambda: socket.socket(family, kind, protocol))
""",
    ),
    escape(
        "use the kernel's cryptography by socket (AF_ALG)",
        """
for kind in (socket.SOCK_SEQPACKET, socket.SOCK_DGRAM, socket.SOCK_RAW):
    forbidden(f"AF_ALG {kind}", lambda: socket.socket(38, kind, 0))
""",
    ),
    escape(
        "talk to the hypervisor (AF_VSOCK)",
        """
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    forbidden(f"AF_VSOCK {kind}", lambda: socket.socket(40, kind, 0))
""",
    ),
    escape(
        "make sockets of rare families",
        """
for family in range(48):
    if family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK):
        continue
    for kind in range(1, 6):
        # From the filter, not for want of a module: EAFNOSUPPORT would be another machine's opening.
        try:
            socket.socket(family, kind, 0)
        except OSError as error:
            if error.errno != errno.EPERM:
                breach(f"family {family} reached the kernel: {error}")
        else:
            breach(f"family {family}")
    try:
        socket.socketpair(family, socket.SOCK_STREAM, 0)
    except OSError as error:
        if error.errno != errno.EPERM:
            breach(f"a pair of family {family} reached the kernel: {error}")
""",
    ),
    escape(
        "configure the network by netlink",
        """
for protocol in range(1, 23):
    forbidden(f"netlink {protocol}", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol))
route = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
NEWLINK, REQUEST, ACK = 16, 1, 4
body = struct.pack("BxHiII", 0, 0, 1, 1, 1)  # bring lo up, were it down
route.send(struct.pack("IHHII", 16 + len(body), NEWLINK, REQUEST | ACK, 1, 0) + body)
[result] = struct.unpack_from("i", route.recv(4096), 16)
if -result not in (errno.EPERM, errno.EOPNOTSUPP):
    breach(f"changing an interface gave {result}")
""",
    ),
    escape(
        "connect to sockets of the host (abstract, Docker, containerd)",
        """
client = socket.socket(socket.AF_UNIX)
forbidden("abstract", lambda: client.connect("\\0" + os.environ["HOST_SOCKET"]), also=(errno.ECONNREFUSED,))
for path in ("/var/run/docker.sock", "/run/containerd/containerd.sock", "/run/dbus/system_bus_socket"):
    forbidden(path, lambda: socket.socket(socket.AF_UNIX).connect(path))
""",
    ),
)

ESCAPES = (*FILES, *KERNEL, *POWERS, *NETWORK)
