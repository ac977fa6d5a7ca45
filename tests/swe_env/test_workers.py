"""Workers of a training: one that dies or falls silent is replaced, and one that cannot start says why."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from swe_env import workers as module
from swe_env.restarts import MOST, Restarts
from swe_env.rundir import RunError
from swe_env.train_dir import TrainDir
from swe_env.training import TrainConfig
from swe_env.workers import Workers
from tests.swe_env.chaos import running

pytestmark = pytest.mark.docker

CONFIG = {
    "model": "tiny:glm",
    "prompts": "tiny",
    "steps": 1,
    "rollout": {"tasks": "synthetic:train:6", "tasks_per_step": 1, "group_size": 2},
}


def with_workers(tmp_path: Path, body: Callable[[Workers], Awaitable[None]], **changes: object) -> list[str]:
    """What was said."""
    said: list[str] = []
    where = TrainDir(tmp_path)

    async def run() -> None:
        config = TrainConfig.model_validate(CONFIG | changes)
        workers = Workers(config, where, Restarts(said.append), said.append)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(workers.run)
                await body(workers)
                nursery.cancel_scope.cancel()

    trio.run(run)
    return said


def pids() -> list[int]:
    return running("swe_env.rollout_worker", os.getpid())


async def until(count: int, workers: Workers) -> None:
    while workers.alive != count:
        await trio.sleep(0.05)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_dies_or_falls_silent_is_replaced(
    base_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: signal.Signals
) -> None:
    monkeypatch.setattr(module, "SILENCE", 4)

    async def body(workers: Workers) -> None:
        await until(1, workers)
        [before] = pids()
        os.kill(before, sign)
        await until(0, workers)
        await until(1, workers)
        [after] = pids()
        assert after != before

    said = with_workers(tmp_path, body)
    assert sum("worker-0 was ended by SIGKILL" in line and "starting it again" in line for line in said) == 1
    assert not pids()


def test_one_that_dies_again_and_again_ends_the_training(base_image: str, tmp_path: Path) -> None:
    async def body(workers: Workers) -> None:
        while True:
            await until(1, workers)
            for pid in pids():
                os.kill(pid, signal.SIGKILL)
            await until(0, workers)

    with pytest.raises(ExceptionGroup) as group:
        with_workers(tmp_path, body)
    assert group.group_contains(RunError, match=f"SIGKILL.* .{MOST} times before", depth=None)


def test_one_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def body(workers: Workers) -> None:
        await trio.sleep_forever()

    rollout = {"tasks": str(tmp_path / "tasks.jsonl"), "tasks_per_step": 1, "group_size": 2}
    with pytest.raises(ExceptionGroup) as group:
        with_workers(tmp_path, body, rollout=rollout)
    assert group.group_contains(RunError, match="tasks.jsonl", depth=None)
