"""The list of system calls: what is on it, and that ordinary programs do not miss anything."""

from __future__ import annotations

import errno
import json
from typing import Any

import pytest

from sandboxes.isolation import MASKED_PATHS, rlimits, sysctls
from sandboxes.protocol import Limits, Sandbox, SandboxError
from sandboxes.seccomp import ALLOWED, NEW_NAMESPACES, NOT_HERE, docker_profile, profile
from tests.sandboxes.conftest import Sandboxed

NEVER = """
    mount umount2 pivot_root chroot fsopen fsmount fsconfig fspick move_mount open_tree mount_setattr
    unshare setns clone3 bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register
    init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff acct quotactl
    keyctl add_key request_key name_to_handle_at open_by_handle_at process_vm_readv process_vm_writev vmsplice
    pidfd_getfd kcmp syslog settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname iopl
    ioperm modify_ldt fanotify_init lookup_dcookie move_pages migrate_pages mbind io_setup vhangup
"""


def rules(name: str, machine: str = "x86_64") -> list[dict[str, Any]]:
    return [rule for rule in profile(machine)["syscalls"] if name in rule["names"]]


@pytest.mark.parametrize("name", NEVER.split())
def test_what_administers_a_machine_is_allowed_nowhere(name: str) -> None:
    assert not [rule for rule in rules(name) if rule["action"] == "SCMP_ACT_ALLOW"]


def test_every_call_is_in_one_group() -> None:
    named = [*ALLOWED, *NOT_HERE.split(), "sync"]
    assert len(named) == len(set(named))


def test_what_is_allowed_by_argument_is_not_allowed_without() -> None:
    for name in ("clone", "mknod", "mknodat", "personality", "socket", "socketpair"):
        assert name not in ALLOWED
        assert all(rule["args"] for rule in rules(name))


def test_clone_with_a_namespace_is_refused() -> None:
    [rule] = rules("clone")
    [condition] = rule["args"]
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert flag & condition["value"] != condition["valueTwo"]
    assert condition["value"] == NEW_NAMESPACES


def test_programs_that_know_a_second_way_are_sent_there() -> None:
    assert [rule["errnoRet"] for rule in rules("clone3")] == [errno.ENOSYS]
    assert profile()["defaultErrnoRet"] == errno.EPERM


@pytest.mark.parametrize(
    ("machine", "architecture"),
    [("x86_64", "X86_64"), ("AMD64", "X86_64"), ("aarch64", "AARCH64"), ("arm64", "AARCH64")],
)
def test_only_the_machines_own_calls(machine: str, architecture: str) -> None:
    assert profile(machine)["architectures"] == [f"SCMP_ARCH_{architecture}"]


def test_an_unknown_machine_is_said_to_be_one() -> None:
    with pytest.raises(SandboxError, match="no system call filter for riscv64"):
        profile("riscv64")


def test_docker_gets_the_same_list() -> None:
    assert json.loads(docker_profile()) == profile()


def test_what_stays_without_a_process_is_a_part_of_the_memory() -> None:
    limits = Limits(memory=64 << 20)
    assert int(sysctls(limits)["kernel.shmall"]) * 4096 == 16 << 20
    assert rlimits(limits)["core"] == 0
    assert len(set(MASKED_PATHS)) == len(MASKED_PATHS)


WORKS = """
import asyncio, fcntl, mmap, multiprocessing, os, select, signal, socket, subprocess, tempfile, threading
from multiprocessing import shared_memory

threads = [threading.Thread(target=len, args=("",)) for _ in range(16)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
with multiprocessing.Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
block = shared_memory.SharedMemory(create=True, size=4096)
block.close(), block.unlink()
multiprocessing.Queue(), multiprocessing.Semaphore(), multiprocessing.Lock()
assert asyncio.run(asyncio.sleep(0, 5)) == 5

server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
client.sendall(b"x")
assert server.accept()[0].recv(1) == b"x"
left, right = socket.socketpair()
socket.send_fds(left, [b"x"], [0])
assert socket.getaddrinfo("localhost", 80)
epoll = select.epoll()
epoll.register(right, select.EPOLLIN)
assert epoll.poll(1)

assert subprocess.run(["true"], preexec_fn=os.setsid, process_group=None).returncode == 0
assert os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)[1] == 0
pid = os.fork()
pid or os._exit(3)
assert os.waitstatus_to_exitcode(os.waitid(os.P_PIDFD, os.pidfd_open(pid), os.WEXITED).si_status << 8) == 3
signal.setitimer(signal.ITIMER_REAL, 100)
os.openpty(), os.memfd_create("m"), os.getrandom(1), os.eventfd(1), os.mkfifo("/tmp/fifo"), os.sync()
os.sched_setaffinity(0, os.sched_getaffinity(0)), os.nice(1), os.cpu_count(), os.getloadavg()
with tempfile.TemporaryFile() as file:
    fcntl.lockf(file, fcntl.LOCK_EX), os.posix_fallocate(file.fileno(), 0, 10), os.fsync(file.fileno())
    mmap.mmap(file.fileno(), 10).flush()
os.setxattr("/work", "user.x", b"1"), os.utime("/work"), os.chown("/work", 0, 0)
os.link("/tmp/fifo", "/tmp/hard")
print("all of it")
"""


@pytest.mark.docker
def test_ordinary_python_works(sandboxed: Sandboxed) -> None:
    async def body(sandbox: Sandbox) -> str:
        return (await sandbox.run("python3 -", stdin=WORKS.encode())).text

    assert sandboxed(body) == "all of it\n"


@pytest.mark.docker
def test_git_and_pytest_work(sandboxed: Sandboxed) -> None:
    script = """
git init -q . && git config user.name t && git config user.email t@localhost
printf 'def test_it(tmp_path):\\n    assert tmp_path\\n' >test_it.py
git add -A && git commit -qm one && git gc -q && git clone -q . /tmp/copy && git -C /tmp/copy log --format=%s
python3 -m pytest -q /tmp/copy | tail -1 | cut -d' ' -f1-2
"""

    async def body(sandbox: Sandbox) -> str:
        return (await sandbox.run(script)).text

    assert sandboxed(body) == "one\n1 passed\n"
