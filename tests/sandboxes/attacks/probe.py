"""What a probe is: an attack that is run inside a sandbox and says itself how it went.

A script prints a line `BREACH: ...` for whatever it managed to do and should not have, and the harness adds
`HELD` as its last line. A script that reaches neither (a typo, a missing tool) has shown nothing, and that is
an error of the bank: an attack that failed for the wrong reason must not count as a defence.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import trio

from sandboxes.protocol import Sandbox, SandboxError, SandboxLost

Check = Callable[[Sandbox], Awaitable[str]]
"""What is wrong with a sandbox after a probe; "" when it is well."""

ANSWER_SECONDS = 8.0
"""Within this a sandbox answers, even one that is being attacked on a busy machine [s]."""


class Kind(StrEnum):
    ESCAPE = "escape"
    RESOURCE = "resource"
    INTERFERENCE = "interference"
    INFORMATION = "information"


async def answers(sandbox: Sandbox) -> str:
    """Commands run, in the session and outside it."""
    for session in (True, False):
        result = await sandbox.run("echo ok", timeout=ANSWER_SECONDS, session=session)
        if result.output != b"ok\n":
            return f"`echo ok` (session={session}) gave {result.exit_code} and {result.text[:200]!r}"
    return ""


async def answers_later(sandbox: Sandbox) -> str:
    """For what takes a moment to begin."""
    await trio.sleep(0.5)
    return await answers(sandbox)


async def answers_apart(sandbox: Sandbox) -> str:
    """For attacks on the session, which is the agent's own: commands outside it run."""
    result = await sandbox.run("echo ok", timeout=ANSWER_SECONDS, session=False)
    return "" if result.output == b"ok\n" else f"`echo ok` gave {result.exit_code} and {result.text[:200]!r}"


async def responds(sandbox: Sandbox) -> str:
    """For attacks on what a shell needs, which is the agent's own: a call comes back, whatever it says."""
    await sandbox.run("echo ok", timeout=ANSWER_SECONDS, session=False)
    return ""


async def recovers(sandbox: Sandbox) -> str:
    """For attacks on whatever starts: one call runs into its deadline, which ends them, and no more."""
    until = trio.current_time() + ANSWER_SECONDS
    while not (await sandbox.run("echo ok", timeout=1)).timed_out:
        if trio.current_time() > until:
            return "every call was answered: the attack never began"
    return await answers(sandbox)


async def moves_files(sandbox: Sandbox) -> str:
    """For attacks on the image's programs, which are the agent's own: files need none of them."""
    await sandbox.write("/root/after", b"\0ok")
    return "" if await sandbox.read("/root/after") == b"\0ok" else "a file came back changed"


async def is_swept(sandbox: Sandbox) -> str:
    """kill_all leaves nothing but PID 1 and what was started since."""
    await sandbox.kill_all()
    left = await sandbox.run("for d in /proc/[0-9]*; do echo ${d#/proc/}; done | grep -vx -e 1 -e $$")
    # The subshell of the pipe, grep, and the shell that waits for the next command.
    return "" if len(left.text.split()) <= 3 else f"processes {left.text.split()} outlived kill_all"


def refuses(path: str, *numbers: int) -> Check:
    """Reading a path fails with one of these errors, soon."""

    async def check(sandbox: Sandbox) -> str:
        try:
            with trio.fail_after(ANSWER_SECONDS):
                await sandbox.read(path, limit=1 << 20)
        except OSError as error:
            if error.errno in numbers:
                return await answers(sandbox)
            return f"reading {path} gave {error}"
        except SandboxLost:
            raise
        except SandboxError as error:
            return f"reading {path} gave {error}"
        return f"{path} could be read"

    return check


@dataclass(frozen=True)
class Probe:
    """One attack. Python unless `shell`."""

    name: str
    """What is attempted, in the words of the table."""
    kind: Kind
    script: str
    shell: bool = False
    neighbour: str = ""
    """A second script (Python), for another sandbox while the first one's effects last: it breaches too."""
    may_die: bool = False
    """The script may be killed or run into its deadline: what counts is the sandbox afterwards."""
    timeout: float = 10.0
    after: Check = answers
    ruins: bool = False
    """The sandbox is of no use to the next probe."""


@dataclass(frozen=True)
class Outcome:
    held: bool | None
    """None: the probe itself is broken."""
    why: str = ""


async def attack(probe: Probe, sandbox: Sandbox, neighbour: Sandbox, env: Mapping[str, str]) -> Outcome:
    """Run a probe and look at the sandbox afterwards."""
    try:
        found = await _run(sandbox, probe.script, probe, env)
        if found.held and probe.neighbour:
            beside = await _run(neighbour, probe.neighbour, None, env)
            found = beside if not beside.held else found
        wrong = await probe.after(sandbox)
        if wrong and found.held is not None:
            return Outcome(False, wrong)
        await sandbox.kill_all()
    except SandboxLost as error:
        return Outcome(False, str(error))
    return found


async def _run(sandbox: Sandbox, script: str, probe: Probe | None, env: Mapping[str, str]) -> Outcome:
    shell, may_die, timeout = (probe.shell, probe.may_die, probe.timeout) if probe else (False, False, 10.0)
    if shell:
        done = await sandbox.run(f"{SHELL_PRELUDE}\n{script}\nbuiltin echo HELD", timeout=timeout, env=env)
    else:
        whole = f"{PYTHON_PRELUDE}\n{script}\nprint('HELD', flush=True)\n"
        done = await sandbox.run("exec python3 -", stdin=whole.encode(), timeout=timeout, env=env)
    lines = done.text.splitlines()
    breaches = [line for line in lines if line.startswith("BREACH: ")]
    if breaches:
        return Outcome(False, "; ".join(line.removeprefix("BREACH: ") for line in breaches)[:400])
    if "HELD" in lines or (may_die and (done.timed_out or done.exit_code > 128)):
        return Outcome(True)
    return Outcome(None, f"the script ended with {done.exit_code}: {done.text[-600:]}")


SHELL_PRELUDE = """
must_fail() {
    "$@" >/dev/null 2>&1
    case $? in 0) echo "BREACH: $*" ;; 126 | 127) echo "no $1 here"; exit 1 ;; esac
}
"""

DEVICES = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)}
"""null, zero, full, random, urandom, tty, ptmx."""

# System call numbers: x86-64, then 64-bit ARM; None where a machine has no such call.
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "capset": (126, 91),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "clone": (56, 220),
    "clone3": (435, 435),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_setup": (206, 0),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mknodat": (259, 33),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "tgkill": (234, 131),
    "tkill": (200, 130),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vmsplice": (278, 75),
}

PYTHON_PRELUDE = f"""
import ctypes, errno, fcntl, glob, mmap, os, platform, resource, signal, socket, stat, struct, subprocess
import sys, time

X86 = platform.machine() == "x86_64"
NUMBERS = {NUMBERS!r}
DEVICES = {DEVICES!r}
REFUSED = {{errno.EPERM, errno.EACCES, errno.ENOSYS}}
libc = ctypes.CDLL(None, use_errno=True)


def breach(what):
    print("BREACH:", what, flush=True)


def call(name, *arguments):
    "A system call by name: (result, errno)."
    number = NUMBERS[name][0 if X86 else 1]
    if number is None:
        return -1, errno.ENOSYS
    sent = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result = libc.syscall(ctypes.c_long(number), *sent)
    return result, ctypes.get_errno() if result < 0 else 0


def refused(name, *arguments, also=()):
    "The call must be refused. Another error means that it got past the door."
    result, error = call(name, *arguments)
    if result >= 0 or error not in REFUSED | set(also):
        breach(f"{{name}} returned {{result}} {{errno.errorcode.get(error, '')}}")


def forbidden(what, action, also=()):
    "The same for anything that raises OSError."
    try:
        value = action()
    except OSError as error:
        if error.errno not in REFUSED | {{errno.EROFS, errno.ENOENT}} | set(also):
            breach(f"{{what}}: {{error}}")
    else:
        breach(f"{{what}} gave {{str(value)[:80]}}")


def put(path, text):
    fd = os.open(path, os.O_WRONLY)
    try:
        return os.write(fd, text.encode())
    finally:
        os.close(fd)


def background(work):
    "Go on in a process that outlives the command."
    if os.fork() == 0:
        os.setsid()
        try:
            work()
        finally:
            os._exit(0)


def status(name, pid="self"):
    return dict(line.split(":", 1) for line in open(f"/proc/{{pid}}/status"))[name].strip()
"""
