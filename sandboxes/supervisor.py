"""The compiled supervisor: one static binary per source text, built on first use and cached."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from sandboxes.protocol import SandboxError

SOURCE = Path(__file__).with_name("supervisor.c")


def supervisor_binary() -> Path:
    """Path of the static executable that becomes PID 1 of a sandbox; compiled (about 1 s) when not cached.

    The cache is `$XDG_CACHE_HOME/swe-env` (default `~/.cache/swe-env`), keyed by source, compiler flags and
    machine. The compiler is `$SWE_ENV_CC`, else `cc`, else the `ziglang` package. Raises `SandboxError`.
    """
    machine = platform.machine()
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swe-env"
    binary = cache / f"supervisor-{machine}-{digest}"
    if binary.exists():
        return binary
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Renamed into place, so that processes that start at the same time never run half a file.
        with tempfile.TemporaryDirectory(prefix="build-", dir=cache) as directory:
            built = Path(directory) / "supervisor"
            _compile(_compiler(machine), built)
            built.chmod(0o555)
            built.rename(binary)
    except OSError as error:
        raise SandboxError(f"cannot build the sandbox supervisor in {cache}: {error.strerror}") from error
    return binary


def _compiler(machine: str) -> list[str]:
    if chosen := os.environ.get("SWE_ENV_CC"):
        return shlex.split(chosen)
    if shutil.which("cc"):
        return ["cc"]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-musl"]
    raise SandboxError("no C compiler for the sandbox supervisor: `pip install ziglang`, or set SWE_ENV_CC")


def _compile(compiler: list[str], target: Path) -> None:
    command = [*compiler, "-static", "-O2", "-s", "-o", str(target), str(SOURCE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(
            f"cannot run the C compiler `{compiler[0]}` ({error}): set SWE_ENV_CC to one"
        ) from error
    if done.returncode != 0:
        reason = next(
            (line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:]
        )
        raise SandboxError(
            f"`{shlex.join(compiler)}` cannot build the sandbox supervisor ({reason}): "
            "it needs a static C library (Debian: libc6-dev), or `pip install ziglang` and set SWE_ENV_CC"
        )
