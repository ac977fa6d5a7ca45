"""`swe-env doctor`: what this machine has, what it lacks, and how to get it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from sandboxes.backends import needs_no_daemon
from sandboxes.binaries import binary
from sandboxes.engine import BASE_IMAGE, engine_answers
from sandboxes.oci_machine import lacking, runtime
from sandboxes.protocol import SandboxError

FREE_BYTES = 10 << 30
"""Disk that images and a CPU vLLM take together, with room to work."""


class Finding(BaseModel):
    """One thing that was looked at."""

    model_config = ConfigDict(frozen=True)

    what: str
    ok: bool
    detail: str
    cure: str = ""
    needed_for: str = "everything"


def examine_machine() -> list[Finding]:
    """Look at everything. Takes a second or two; changes nothing but the supervisor's build cache."""
    return [
        check() for check in (_python, _compiler, _engine, _sandboxes, _base_image, _vllm, _memory, _disk)
    ]


def _python() -> Finding:
    version = platform.python_version()
    return Finding(
        what="Python", ok=sys.version_info >= (3, 11), detail=version, cure="install Python 3.11 or newer"
    )


def _compiler() -> Finding:
    try:
        return Finding(what="supervisor", ok=True, detail=f"built: {binary('supervisor').name}")
    except SandboxError as error:
        return Finding(what="supervisor", ok=False, detail=str(error), cure="apt-get install gcc libc6-dev")


def _engine() -> Finding:
    if engine_answers():
        return Finding(what="Docker engine", ok=True, detail="answers")
    if needs_no_daemon(BASE_IMAGE):
        return Finding(what="Docker engine", ok=True, detail="not running, and not needed for what is here")
    installed = shutil.which("dockerd") is not None
    return Finding(
        what="Docker engine",
        ok=False,
        detail="installed, not running" if installed else "not installed",
        cure="swe-env engine"
        if os.geteuid() == 0
        else "sudo systemctl start docker, or sudo apt-get install docker.io",
    )


def _sandboxes() -> Finding:
    """The daemonless backend is the faster one, not the only one: without it nothing is missing."""
    if reason := lacking():
        return Finding(what="sandboxes", ok=True, detail=f"docker (oci is faster, but {reason})")
    faster = "" if Path(runtime() or "").name == "crun" else " (faster with crun: apt-get install crun)"
    return Finding(what="sandboxes", ok=True, detail=f"oci: no daemon needed while episodes run{faster}")


def _base_image() -> Finding:
    import docker
    from docker.errors import DockerException

    if needs_no_daemon(BASE_IMAGE):
        return Finding(what="base image", ok=True, detail=BASE_IMAGE, needed_for="inline tasks")
    try:
        docker.from_env().images.get(BASE_IMAGE)
        return Finding(what="base image", ok=True, detail=BASE_IMAGE, needed_for="inline tasks")
    except (DockerException, OSError):
        return Finding(
            what="base image", ok=False, detail=f"{BASE_IMAGE} is not here", cure="swe-env engine",
            needed_for="inline tasks",
        )  # fmt: skip


def _vllm() -> Finding:
    found = importlib.util.find_spec("vllm") is not None
    return Finding(
        what="vLLM",
        ok=found,
        detail="importable" if found else "not installed in this environment",
        cure="make install (CPU), or pip install 'swe-env[cuda]'",
        needed_for="serving a model here",
    )


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Finding(
        what="memory",
        ok=total >= 7 << 30,
        detail=f"{total / (1 << 30):.0f} GiB, {os.cpu_count()} CPUs",
        cure="8 GiB and more; lower --concurrency on less",
    )


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    return Finding(
        what="disk",
        ok=free >= FREE_BYTES,
        detail=f"{free / (1 << 30):.0f} GiB free",
        cure=f"free {FREE_BYTES >> 30} GiB: docker image prune, or another disk",
    )
