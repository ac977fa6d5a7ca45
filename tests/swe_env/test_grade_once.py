"""A patch that several episodes of a group made is graded once; two patches, or two tasks, are two grades."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio

from sandboxes.protocol import SandboxLost
from swe_env.grade_once import GradedOnce
from swe_env.workspace import Workspace, Workspaces
from tasks.model import TaskView
from tests.conftest import Backend, connected
from tests.swe_env.conftest import BROKEN, FIXED, make_patch, make_task

pytestmark = pytest.mark.docker

GOOD = make_patch({"calc.py": BROKEN}, {"calc.py": FIXED.encode()})
BAD = make_patch({"calc.py": BROKEN}, {"calc.py": b"def total(numbers):\n    return 0\n"})


class Counted(Workspaces):
    """Counts what is opened, and loses the first `lost` of them."""

    opened = 0
    lost = 0

    @asynccontextmanager
    async def open(self, view: TaskView, *, again: bool = False) -> AsyncGenerator[Workspace]:
        self.opened += 1
        if self.opened <= self.lost:
            raise SandboxLost("the machine is gone")
        async with super().open(view, again=again) as workspace:
            yield workspace


def test_episodes_that_end_together_share_a_grade(base_image: str, backend: Backend) -> None:
    rewards = list[tuple[str, float]]()

    async def body() -> int:
        with trio.fail_after(120):
            async with connected(backend, "test-grade-once") as engine:
                workspaces, grader = Counted(engine, base_image), GradedOnce()

                async def grade(name: str, patch: bytes, task_id: str) -> None:
                    task = make_task(id=task_id)
                    rewards.append((name, (await grader(task, patch, workspaces, "strict")).reward))

                async with trio.open_nursery() as nursery:
                    for number in range(4):
                        nursery.start_soon(grade, f"good {number}", GOOD, "one")
                    nursery.start_soon(grade, "bad", BAD, "one")
                    nursery.start_soon(grade, "other task", GOOD, "two")
                return workspaces.opened

    assert trio.run(body) == 3
    assert sorted(rewards) == [
        ("bad", 0.0), *[(f"good {number}", 1.0) for number in range(4)], ("other task", 1.0)
    ]  # fmt: skip


def test_what_infrastructure_prevented_is_not_remembered(base_image: str) -> None:
    async def body() -> float:
        async with connected("docker", "test-grade-once") as engine:
            workspaces, grader = Counted(engine, base_image), GradedOnce()
            workspaces.lost = 1
            with pytest.raises(SandboxLost):
                await grader(make_task(), GOOD, workspaces)
            return (await grader(make_task(), GOOD, workspaces)).reward

    assert trio.run(body) == 1.0
