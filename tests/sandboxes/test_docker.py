"""What is Docker's own: containers that are killed, cancelled or left, and an engine that is not there."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
import trio

from sandboxes.docker import DockerEngine
from sandboxes.protocol import EngineUnavailable, Limits, Sandbox, SandboxLost
from tests.sandboxes.conftest import WORKDIR, own_containers

pytestmark = pytest.mark.docker

T = TypeVar("T")


@pytest.fixture
def sandboxed(base_image: str) -> Callable[[Callable[[Sandbox], Awaitable[T]]], T]:
    def run(body: Callable[[Sandbox], Awaitable[T]]) -> T:
        async def main() -> T:
            async with (
                DockerEngine.connect(run_id="test-docker") as engine,
                engine.sandbox(base_image, workdir=WORKDIR, limits=Limits()) as sandbox,
            ):
                return await body(sandbox)

        return trio.run(main)

    return run


def test_a_killed_container_is_a_lost_sandbox_within_a_second(sandboxed: Callable[..., float]) -> None:
    async def body(sandbox: Sandbox) -> float:
        killed = 0.0

        async def kill() -> None:
            nonlocal killed
            await trio.sleep(0.5)
            killed = time.monotonic()
            await trio.run_process(["docker", "kill", sandbox.id], capture_stdout=True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            with pytest.raises(SandboxLost, match="killed from outside"):
                await sandbox.run("sleep 60")
            late = time.monotonic() - killed
        with pytest.raises(SandboxLost):
            await sandbox.run("true")
        return late

    assert sandboxed(body) < 1.5  # the command line client needs part of it


def test_a_container_killed_while_stdin_flows_is_a_lost_sandbox(sandboxed: Callable[..., float]) -> None:
    async def body(sandbox: Sandbox) -> None:
        async def kill() -> None:
            await trio.sleep(0.5)
            await trio.run_process(["docker", "kill", sandbox.id], capture_stdout=True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            with trio.fail_after(5), pytest.raises(SandboxLost):
                await sandbox.run("sleep 60", stdin=b"x" * 50_000_000)

    sandboxed(body)


@pytest.mark.parametrize("after", [0.0, 0.01, 0.03, 0.1, 0.2, 0.35])
def test_cancelling_at_any_moment_leaves_no_container(base_image: str, after: float) -> None:
    async def main() -> None:
        async with DockerEngine.connect(run_id="unrelated") as engine:
            engine._run_id = "test-cancel"  # so that leaving connect() cannot be what cleans up
            with trio.move_on_after(after):
                async with engine.sandbox(base_image, workdir=WORKDIR, limits=Limits()):
                    await trio.sleep_forever()
            assert own_containers("swe-env.run=test-cancel") == []

    trio.run(main)


def test_without_an_engine_the_error_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")

    async def main() -> None:
        async with DockerEngine.connect(run_id="x"):
            raise AssertionError("connected")

    with pytest.raises(EngineUnavailable, match="start it with `swe-env engine`"):
        trio.run(main)
