"""The C programs of this package: one static binary per source text, built on first use and cached."""

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

HERE = Path(__file__).parent


def binary(name: str) -> Path:
    """Path of a static executable made from `NAME.c` here; compiled (about 1 s) when not cached.

    `supervisor` becomes PID 1 of a sandbox, `launch` starts one without a daemon.

    The cache is `$XDG_CACHE_HOME/swe-env` (default `~/.cache/swe-env`), keyed by source, compiler flags and
    machine. The compiler is `$SWE_ENV_CC`, else `cc`, else the `ziglang` package. Raises `SandboxError`.
    """
    machine = platform.machine()
    source = HERE / f"{name}.c"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swe-env"
    made = cache / f"{name}-{machine}-{digest}"
    if made.exists():
        return made
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Renamed into place, so that processes that start at the same time never run half a file.
        with tempfile.TemporaryDirectory(prefix="build-", dir=cache) as directory:
            built = Path(directory) / name
            _compile(_compiler(machine), source, built)
            built.chmod(0o555)
            built.rename(made)
    except OSError as error:
        raise SandboxError(f"cannot build {source.name} in {cache}: {error.strerror}") from error
    return made


def _compiler(machine: str) -> list[str]:
    if chosen := os.environ.get("SWE_ENV_CC"):
        return shlex.split(chosen)
    if shutil.which("cc"):
        return ["cc"]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-musl"]
    raise SandboxError("no C compiler for the sandbox's programs: `pip install ziglang`, or set SWE_ENV_CC")


def _compile(compiler: list[str], source: Path, target: Path) -> None:
    command = [*compiler, "-static", "-O2", "-s", "-o", str(target), str(source)]
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
            f"`{shlex.join(compiler)}` cannot build {source.name} ({reason}): "
            "it needs a static C library (Debian: libc6-dev), or `pip install ziglang` and set SWE_ENV_CC"
        )
