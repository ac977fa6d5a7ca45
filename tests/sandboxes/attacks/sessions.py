"""Attacks on the next tool call. The session is the agent's own to spoil; what the harness runs outside it,
and files, are not."""

from __future__ import annotations

from tests.sandboxes.attacks.probe import (
    Check,
    Kind,
    Probe,
    answers,
    answers_apart,
    is_swept,
    moves_files,
    responds,
)


def session(name: str, script: str, *, after: Check = answers_apart, ruins: bool = True) -> Probe:
    return Probe(name, Kind.INTERFERENCE, script, shell=True, after=after, ruins=ruins)


SESSIONS = (
    session(
        "leave variables that run code (BASH_ENV, ENV, PROMPT_COMMAND, PS4)",
        """
echo 'echo pwned; exit 9' >/tmp/evil
export BASH_ENV=/tmp/evil ENV=/tmp/evil PROMPT_COMMAND='echo pwned' PS4='$(echo pwned)' SHELLOPTS BASHOPTS
""",
    ),
    session("leave LD_PRELOAD and LD_LIBRARY_PATH", "export LD_PRELOAD=/tmp/evil.so LD_LIBRARY_PATH=/tmp"),
    session(
        "shadow programs by PATH",
        """
mkdir -p /tmp/bin
for name in sh bash echo git cat env; do
    printf '#!/bin/true\\n' >/tmp/bin/$name
    chmod +x /tmp/bin/$name
done
export PATH=/tmp/bin
""",
    ),
    session(
        "shadow builtins by exported functions",
        """
echo() { printf pwned; }; eval() { :; }; read() { :; }; exec() { :; }; trap() { :; }; command() { :; }
export -f echo eval read exec trap command
""",
    ),
    session(
        "write the saved state of the session",
        """
for fd in 62 63; do { echo 'echo pwned; exit 9' >/proc/self/fd/$fd; } 2>/dev/null; done
trap - EXIT
""",
    ),
    session("delete the working directory", "cd /work && rm -rf /work", after=answers),
    session("take the modes off the root directory", "chmod 000 / /tmp /root /usr", after=responds),
    session("delete the image", "rm -rf /usr /lib* /bin /sbin /etc 2>/dev/null", after=responds),
    Probe(
        "replace the image's programs (sh, bash, the loader's settings)",
        Kind.INTERFERENCE,
        """
for path in ("/bin/bash", "/usr/bin/bash", "/bin/sh", "/usr/bin/sh", "/usr/bin/cat"):
    if os.path.lexists(path):
        os.unlink(path)
    with open(path, "w") as file:
        file.write("#!/nowhere\\n")
    os.chmod(path, 0o755)
open("/etc/ld.so.preload", "w").write("/nowhere.so\\n")
""",
        after=moves_files,
        ruins=True,
    ),
    Probe(
        "outlive kill_all (daemons, stopped, traced and unkillable-looking processes)",
        Kind.INTERFERENCE,
        """
for number in range(1, 32):
    if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)

def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)

def traced():
    child = os.fork()
    if child == 0:
        libc.ptrace(0, 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
    libc.ptrace(0x4206, child, 0, 0x100000)
    time.sleep(600)

def respawns():
    while True:
        if os.fork():
            os._exit(0)
        os.setsid()

def waits_in_vfork():
    libc.vfork()
    time.sleep(600)

for work in (stopped, traced, respawns, lambda: time.sleep(600), waits_in_vfork):
    background(work)
time.sleep(0.5)
""",
        after=is_swept,
    ),
)
