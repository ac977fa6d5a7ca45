"""The reaper removes what dead processes left, and nothing else."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
import trio

from sandboxes.docker import DockerEngine
from sandboxes.reaper import OWNER_LABEL, owner_label
from tests.sandboxes.conftest import REPOSITORY, own_containers

pytestmark = pytest.mark.docker

HOLDER = """
import sys, trio
from sandboxes.docker import DockerEngine
from sandboxes.protocol import Limits

async def main():
    async with DockerEngine.connect(run_id=sys.argv[2]) as engine:
        async with engine.sandbox(sys.argv[1], workdir="/work", limits=Limits()) as sandbox:
            print(sandbox.id, flush=True)
            await trio.sleep_forever()

trio.run(main)
"""


async def connect_once() -> None:
    async with DockerEngine.connect(run_id="test-reaper"):
        pass


def create(image: str, owner: str, run: str) -> str:
    """A container that nobody started, with an owner's label."""
    labels = ["--label", f"{OWNER_LABEL}={owner}", "--label", f"swe-env.run={run}"]
    argv = ["docker", "create", *labels, image, "true"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def dead_owner() -> str:
    host = owner_label().rpartition(":")[0].rpartition(":")[0]
    gone = subprocess.Popen(["true"])
    gone.wait()
    return f"{host}:{gone.pid}:1"


def test_a_container_of_a_killed_process_is_removed(base_image: str) -> None:
    argv = [sys.executable, "-c", HOLDER, base_image, "test-killed"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=REPOSITORY) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        holder.send_signal(signal.SIGKILL)
    trio.run(connect_once)
    deadline = time.monotonic() + 3
    while own_containers("swe-env.run=test-killed") and time.monotonic() < deadline:
        time.sleep(0.05)  # the engine may have begun to remove it by itself
    assert own_containers("swe-env.run=test-killed") == []


def test_a_never_started_container_of_a_dead_process_is_removed(base_image: str, dead_owner: str) -> None:
    create(base_image, dead_owner, "test-dead")
    trio.run(connect_once)
    assert own_containers("swe-env.run=test-dead") == []


@pytest.mark.parametrize("whose", ["another host", "a living process", "no owner", "no labels"])
def test_containers_of_others_are_left_alone(base_image: str, whose: str) -> None:
    owner = {"another host": "elsewhere.example:1:1", "a living process": owner_label()}.get(whose, "")
    alien = create(base_image, owner, "test-alien" if whose != "no labels" else "")
    try:
        trio.run(connect_once)
        assert alien in own_containers(OWNER_LABEL)
    finally:
        subprocess.run(["docker", "rm", "-f", alien], capture_output=True, check=True)


def test_a_recycled_pid_is_not_the_owner(base_image: str) -> None:
    host, pid, _ = owner_label().rsplit(":", 2)
    create(base_image, f"{host}:{pid}:1", "test-recycled")
    trio.run(connect_once)
    assert own_containers("swe-env.run=test-recycled") == []


def test_the_end_of_a_run_removes_its_containers(base_image: str) -> None:
    create(base_image, owner_label(), "test-reaper")
    trio.run(connect_once)
    assert own_containers("swe-env.run=test-reaper") == []
