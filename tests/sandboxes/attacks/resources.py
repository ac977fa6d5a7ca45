"""Attacks on what the machine has: each takes all it can get, and then the sandbox, the sandbox beside it and
the host must go on. Most go on in the background while the next command is asked for."""

from __future__ import annotations

import errno

from tests.sandboxes.attacks.probe import Kind, Probe, refuses

NEIGHBOUR_WORKS = """
import threading
threads = [threading.Thread(target=time.sleep, args=(0.01,)) for _ in range(8)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
if subprocess.run(["git", "--version"], capture_output=True).returncode:
    breach("the neighbour cannot run git")
"""

DISK = """
# What is as large as a disk of the host, is that disk: let alone, but for a little to see that it is let.
found = os.statvfs(PATH)
sizes, counts = (set(map(int, os.environ[name].split())) for name in ("HOST_DISKS", "HOST_INODES"))
folder = os.path.join(PATH, "fill")
os.makedirs(folder, exist_ok=True)
"""

FILL = (
    DISK
    + """
if found.f_blocks * found.f_frsize in sizes:
    with open(folder + "/0", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 16 << 20)
    os.unlink(folder + "/0")
    breach(f"{found.f_blocks * found.f_frsize >> 30} GiB may be filled")
else:
    try:
        for number in range((found.f_bavail * found.f_frsize >> 24) + 2):
            with open(f"{folder}/{number}", "wb") as file:
                os.posix_fallocate(file.fileno(), 0, 16 << 20)
        breach("the disk does not fill")
    except OSError as error:
        print(error)
"""
)

FILL_INODES = (
    DISK
    + """
if found.f_files in counts or not 0 < found.f_files < 1 << 20:  # some disks count as they go
    for number in range(1000):
        os.close(os.open(f"{folder}/{number}", os.O_CREAT))
    breach(f"{found.f_files} files may be made")
else:
    try:
        for number in range(found.f_files + 1000):
            os.close(os.open(f"{folder}/{number}", os.O_CREAT))
        breach("the files do not come to an end")
    except OSError as error:
        print(error)
subprocess.run(["rm", "-rf", folder])
"""
)

# Each empty file takes a kilobyte of the kernel's memory, which stays when every process is dead. A shell is
# small, so that when it is killed there is hardly room to start anything.
SQUEEZE = """
FILL = '''
for folder in /dev /dev/shm /dev/mqueue; do
    ( i=0; while :; do i=$((i + 1)); : >$folder/$i || exit; done ) 2>/dev/null
done
echo HELD
'''
os.execvp("sh", ["sh", "-c", FILL])
"""

SHM_FILES = """
found = os.statvfs("/dev/shm")
if found.f_blocks * found.f_frsize > int(os.environ["MEMORY"]):
    breach("/dev/shm is larger than the memory limit")
try:
    for number in range(64):
        with open(f"/dev/shm/{number}", "wb") as file:
            for _ in range(16):
                file.write(b"x" * (1 << 20))
    breach("a gigabyte was kept")
except OSError as error:
    print(error)
"""

SEGMENTS = """
libc.shmat.restype = ctypes.c_void_p
for key in range(4096):
    segment = libc.shmget(0x5000 + key, ctypes.c_size_t(4 << 20), 0o1600)
    if segment < 0:
        break
    address = libc.shmat(segment, None, 0)
    ctypes.memset(ctypes.c_void_p(address), 1, 4 << 20)
    libc.shmdt(ctypes.c_void_p(address))
"""

QUEUES = """
for key in range(40000):
    queue = libc.msgget(0x6000 + key, 0o1600)
    if queue < 0:
        break
    while libc.msgsnd(queue, struct.pack("q", 1), ctypes.c_size_t(0), 0o4000) == 0:
        pass  # an empty message takes the kernel 64 bytes
for key in range(40000):
    if libc.semget(0x7000 + key, 32000, 0o1600) < 0 and libc.semget(0x7000 + key, 100, 0o1600) < 0:
        break
realtime = ctypes.CDLL("librt.so.1")
for number in range(1000):
    queue = realtime.mq_open(f"/q{number}".encode(), os.O_CREAT | os.O_RDWR, 0o600, None)
    if queue < 0:
        break
    for _ in range(10):
        realtime.mq_send(queue, bytes(8192), ctypes.c_size_t(8192), 0)
"""


def resource(
    name: str, script: str, *, neighbour: str = NEIGHBOUR_WORKS, timeout: float = 3.0, ruins: bool = False
) -> Probe:
    return Probe(name, Kind.RESOURCE, script, neighbour=neighbour, may_die=True, timeout=timeout, ruins=ruins)


RESOURCES = (
    resource(
        "fork bomb",
        """
def bomb():
    while True:
        try:
            os.fork()
        except OSError:
            time.sleep(0.001)

background(bomb)
time.sleep(1)
""",
    ),
    Probe(
        "fork bomb of a shell",
        Kind.RESOURCE,
        "f() { f | f & }; f; sleep 1",
        shell=True,
        neighbour=NEIGHBOUR_WORKS,
        may_die=True,
        timeout=1.5,
    ),
    resource(
        "take all memory",
        """
taken = []
for _ in range(64):
    block = mmap.mmap(-1, 64 << 20)
    block.write(b"x" * (64 << 20))
    taken.append(block)
    if len(taken) > 2 * int(os.environ["MEMORY"]) >> 26:
        breach("twice the memory limit was taken")
        break
""",
        timeout=15,
    ),
    resource(
        "take all memory again and again, in many processes",
        """
def take():
    while True:
        child = os.fork()
        if child == 0:
            block = bytearray(1 << 30)
            os._exit(0)
        os.waitpid(child, 0)

for _ in range(8):
    background(take)
time.sleep(1)
""",
    ),
    resource("keep memory in files of /dev/shm", SHM_FILES, timeout=15),
    resource("keep memory in System V segments", SEGMENTS),
    resource("keep memory in message queues and semaphores", QUEUES, timeout=15),
    resource("keep kernel memory in empty files of /dev", SQUEEZE, timeout=20, ruins=True),
    resource(
        "keep memory in every way at once, and have the supervisor killed for want of it",
        SHM_FILES + SEGMENTS + QUEUES + SQUEEZE,
        timeout=30,
        ruins=True,
    ),
    resource("fill the disk", 'PATH = "/root"' + FILL, timeout=30, ruins=True),
    resource("fill /tmp", 'PATH = "/tmp"' + FILL, timeout=30, ruins=True),
    resource("use up the disk's files (inodes)", 'PATH = "/root"' + FILL_INODES, timeout=30, ruins=True),
    resource(
        "write a file past the size limit, or a huge sparse one",
        """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = int(os.environ["FILE_SIZE"])
with open("/root/huge", "wb") as file:
    forbidden("a terabyte by truncate", lambda: os.ftruncate(file.fileno(), 1 << 40), also=(errno.EFBIG,))
    file.seek(limit + 1)
    forbidden("writing past the limit", lambda: os.write(file.fileno(), b"x"), also=(errno.EFBIG,))
for which in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE):
    hard = resource.getrlimit(which)[1]
    try:
        resource.setrlimit(which, (hard, hard + 1))
        breach(f"limit {which} could be raised")
    except (ValueError, OSError):
        pass
os.unlink("/root/huge")
""",
    ),
    resource(
        "leave core dumps",
        """
os.makedirs("/tmp/crash", exist_ok=True)
if os.fork() == 0:
    os.chdir("/tmp/crash")
    os.abort()
_, state = os.wait()
if os.WCOREDUMP(state) or os.listdir("/tmp/crash"):
    breach("a core was dumped")
""",
    ),
    resource(
        "open every descriptor there is",
        """
def hoard():
    try:
        while True:
            os.open("/dev/null", os.O_RDONLY)
    except OSError as error:
        pass
    time.sleep(60)

if resource.getrlimit(resource.RLIMIT_NOFILE)[1] > 1 << 16:
    breach("a process may open " + str(resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
for _ in range(12):
    background(hoard)
time.sleep(1)
""",
    ),
    resource(
        "hide descriptors in messages in flight",
        """
def hide():
    kept = []
    fd = os.open("/dev/null", os.O_RDONLY)
    while True:
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        kept.append((left, right))
        left.setblocking(False)
        try:
            while True:
                socket.send_fds(left, [b"x"], [fd] * 250)
        except OSError:
            if len(kept) > 200:
                break
    time.sleep(60)

background(hide)
time.sleep(1)
""",
    ),
    resource(
        "hoard the kernel's memory in pipes",
        """
def hoard():
    held = []
    try:
        while True:
            pair = os.pipe()
            held.append(pair)
            os.set_blocking(pair[1], False)
            os.write(pair[1], bytes(65536))
    except OSError:
        pass
    time.sleep(60)

for _ in range(8):
    background(hoard)
time.sleep(1)
""",
    ),
    resource(
        "use up the buffers of everybody's pipes",
        """
# pipe-user-pages-soft counts by uid: past it, new pipes of that uid are one or two pages small.
def hoard():
    held = [os.pipe() for _ in range(1500)]
    time.sleep(60)

background(hoard)
time.sleep(0.5)
""",
        neighbour="""
reader, writer = os.pipe()
size = fcntl.fcntl(writer, 1032)  # F_GETPIPE_SZ
if size < 65536:
    breach(f"the neighbour's pipes hold {size} bytes")
""",
    ),
    resource(
        "use up everybody's file watches (inotify)",
        """
def hoard():
    held = [libc.inotify_init1(0) for _ in range(3000)]
    time.sleep(60)

for _ in range(4):
    background(hoard)
time.sleep(0.3)
""",
        neighbour="""
if any(libc.inotify_init1(0) < 0 for _ in range(16)):
    breach("the neighbour cannot watch files: " + os.strerror(ctypes.get_errno()))
""",
    ),
    resource(
        "use up everybody's message queues",
        """
realtime = ctypes.CDLL("librt.so.1")
for number in range(200):
    if realtime.mq_open(f"/m{number}".encode(), os.O_CREAT | os.O_RDWR, 0o600, None) < 0:
        break
""",
        neighbour="""
realtime = ctypes.CDLL("librt.so.1", use_errno=True)
if realtime.mq_open(b"/mine", os.O_CREAT | os.O_RDWR, 0o600, None) < 0:
    breach("the neighbour cannot make a message queue: " + os.strerror(ctypes.get_errno()))
realtime.mq_unlink(b"/mine")
""",
        ruins=True,
    ),
    resource(
        "use up everybody's timers and queued signals",
        """
def hoard():
    timer = ctypes.c_void_p()
    while libc.timer_create(1, None, ctypes.byref(timer)) == 0:
        pass
    open("/tmp/no-more", "w").close()
    while True:  # and what others give back
        libc.timer_create(1, None, ctypes.byref(timer))

background(hoard)
while not os.path.exists("/tmp/no-more"):
    time.sleep(0.05)
""",
        timeout=20,
        neighbour="""
timer = ctypes.c_void_p()
if any(libc.timer_create(1, None, ctypes.byref(timer)) for _ in range(100)):
    breach("the neighbour cannot make timers: " + os.strerror(ctypes.get_errno()))
""",
    ),
    resource(
        "use up the machine's asynchronous I/O contexts",
        """
context = ctypes.c_ulong(0)
refused("io_setup", 1024, ctypes.byref(context))
""",
    ),
    resource(
        "lock memory",
        """
block = mmap.mmap(-1, 128 << 20)
where = ctypes.addressof(ctypes.c_char.from_buffer(block))
if libc.mlock(ctypes.c_void_p(where), ctypes.c_size_t(128 << 20)) == 0:
    breach("128 MiB were locked")
""",
    ),
    resource(
        "flood with zombies",
        """
def flood():
    while True:
        try:
            if os.fork() == 0:
                os._exit(0)
        except OSError:
            time.sleep(0.01)

background(flood)
time.sleep(1)
""",
    ),
    resource(
        "flood with threads",
        """
import threading
def flood():
    threading.stack_size(65536)
    while True:
        try:
            threading.Thread(target=time.sleep, args=(60,)).start()
        except RuntimeError:
            time.sleep(0.01)

background(flood)
time.sleep(1)
""",
    ),
    resource(
        "burn CPU in many processes",
        """
def burn():
    while True:
        pass

for _ in range(24):
    background(burn)
time.sleep(0.5)
""",
    ),
    resource(
        "raise one's priority (nice, real time, I/O class)",
        """
forbidden("nice -1", lambda: os.setpriority(os.PRIO_PROCESS, 0, -1))
for policy in (os.SCHED_FIFO, os.SCHED_RR):
    forbidden(f"policy {policy}", lambda: os.sched_setscheduler(0, policy, os.sched_param(1)))
refused("ioprio_set", 1, 0, 1 << 13)
forbidden("less likely to be killed", lambda: put("/proc/self/oom_score_adj", "-1"))
""",
    ),
    resource(
        "flood with output",
        """
def flood():
    while True:
        os.write(1, bytes(65536))

background(flood)
flood()
""",
        timeout=1.5,
    ),
    resource(
        "nest directories too deep to name",
        """
os.chdir("/tmp")
for _ in range(3000):
    os.mkdir("d")
    os.chdir("d")
""",
    ),
    Probe(
        "hold up a read with a lease, a lock, a FIFO or an endless file",
        Kind.RESOURCE,
        """
def hold():
    fd = os.open("/tmp/leased", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    time.sleep(60)

background(hold)
time.sleep(0.3)
""",
        after=refuses("/tmp/leased", errno.EAGAIN),
    ),
    Probe(
        "put an endless device in the place of a file",
        Kind.RESOURCE,
        'os.symlink("/dev/zero", "/tmp/endless")',
        after=refuses("/tmp/endless", errno.EINVAL),
    ),
    Probe(
        "put a FIFO in the place of a file",
        Kind.RESOURCE,
        'os.mkfifo("/tmp/waits")',
        after=refuses("/tmp/waits", errno.EINVAL),
    ),
)
