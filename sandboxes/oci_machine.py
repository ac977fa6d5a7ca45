"""What this machine has of what sandboxes without a daemon need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from sandboxes.binaries import binary
from sandboxes.protocol import SandboxError

STATE = Path(os.environ.get("SWE_ENV_STATE") or "/var/lib/swe-env").absolute()
"""Where images are kept."""
CGROUPS = Path("/sys/fs/cgroup")
OLDEST_CRUN = (1, 8)
"""That this was tried with."""


def lacking(state: Path = STATE) -> str:
    """What this machine lacks to run sandboxes without a daemon, with the cure; "" if nothing.

    `state` is where images are kept.
    """
    if os.uname().sysname != "Linux":
        return "it needs Linux"
    if os.geteuid() != 0:
        return "it needs root: use --sandbox docker"
    if runtime() is None:
        return "crun and runc are missing: `apt-get install crun`"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "the kernel has no overlay file system: `modprobe overlay`"
    if not cgroups_writable():
        return "control groups cannot be written: run where they can be, or use --sandbox docker"
    there = next(folder for folder in (state, *state.parents) if folder.is_dir())
    try:
        if reason := unusable(there):
            return f"{reason}: set SWE_ENV_STATE to a directory on ext4, or use --sandbox docker"
    except SandboxError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or there}: {error.strerror}: make room there"
    return ""


def runtime() -> str | None:
    """Path of the container runtime: crun where there is a recent one, because it starts sooner."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    crun = shutil.which("crun", path=path)
    return crun if crun and _version(crun) >= OLDEST_CRUN else shutil.which("runc", path=path)


def _version(crun: str) -> tuple[int, ...]:
    said = subprocess.run([crun, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.match(r"crun version (\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else ()


def unusable(directory: Path) -> str:
    """Why no layer in a directory could be a sandbox's files; "" if one could. Tried, in some 10 ms.

    It is the file system's doing: some map no user ids (overlayfs; tmpfs before Linux 6.3).
    """
    with tempfile.TemporaryDirectory(prefix="swe-env-") as empty:
        argv = [str(binary("launch")), str(directory)]
        done = subprocess.run(argv, cwd=empty, capture_output=True, text=True, check=False)
    ended = f"launch ended with status {done.returncode}" if done.returncode else ""
    return done.stderr.strip() or ended


def cgroups_writable() -> bool:
    """Whether this process may make control groups that limit memory."""
    return os.access(CGROUPS, os.W_OK) and bool(controllers())


def controllers() -> list[Path]:
    """Roots of the hierarchies that limit memory (version 1 and 2 are laid out differently)."""
    return [root for root in (CGROUPS / "memory", CGROUPS) if (root / "cgroup.procs").exists()]
