"""Containers whose owner is gone: found by their labels and removed.

Every container carries the run it belongs to and the process that made it (host, pid and the time that
pid started, so that a recycled pid is not mistaken for it). A container is an orphan only when its owner
ran on this host and is dead; anything else is somebody's and is left alone.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import requests
import trio
from docker.errors import APIError, DockerException

RUN_LABEL = "swe-env.run"
OWNER_LABEL = "swe-env.owner"


def owner_label() -> str:
    """`host:pid:start time` of this process."""
    return f"{socket.gethostname()}:{os.getpid()}:{_start_time(os.getpid())}"


async def remove_orphans(api: Any) -> list[str]:
    """Remove containers whose owner on this host is dead; ids of those removed.

    Never raises for a container that cannot be removed: the next start tries again.
    """

    def work() -> list[str]:
        return [
            name
            for name, labels in _containers(api, OWNER_LABEL)
            if dead(labels.get(OWNER_LABEL, "")) and _remove(api, name)
        ]

    return await trio.to_thread.run_sync(work)


async def remove_run(api: Any, run_id: str) -> list[str]:
    """Remove what is left of this process's run `run_id`; ids of those removed. Never raises."""
    owner = owner_label()

    def work() -> list[str]:
        found = _containers(api, f"{RUN_LABEL}={run_id}")
        return [name for name, labels in found if labels.get(OWNER_LABEL) == owner and _remove(api, name)]

    return await trio.to_thread.run_sync(work)


def dead(owner: str) -> bool:
    """Whether the process that made this :func:`owner_label` ran on this host and is gone."""
    host, _, process = owner.rpartition(":")[0].rpartition(":")
    if host != socket.gethostname() or not process.isdigit():
        return False
    return _start_time(int(process)) != owner.rpartition(":")[2]


def _containers(api: Any, label: str) -> list[tuple[str, dict[str, str]]]:
    try:
        found = api.containers(all=True, filters={"label": label})
    except (DockerException, requests.RequestException):
        return []
    return [(item["Id"], item["Labels"]) for item in found]


def _start_time(pid: int) -> str:
    """Clock ticks after boot at which a process started; "" when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()  # the name before it may contain spaces and parentheses
    return "" if fields[0] == "Z" else fields[19]


def _remove(api: Any, container: str) -> bool:
    try:
        api.remove_container(container, force=True, v=True)
    except APIError as error:
        return error.status_code in (404, 409)  # gone, or on its way
    except (DockerException, requests.RequestException):
        return False
    return True
