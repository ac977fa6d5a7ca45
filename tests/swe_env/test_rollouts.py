"""Who dispatches groups of episodes: what he begins, and when, as those end that were begun.

Episodes are made here, not played: a test says which of them ends when, and which version sampled it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from agents.conversation import Segment
from agents.loop import End
from swe_env.episode import Episode
from swe_env.flow import Flow
from swe_env.rollouts import Rollouts
from swe_env.rundir import RunDir, RunError
from swe_env.runner import Watcher
from swe_env.sft import Progress
from swe_env.train_dir import EvaluationRow, StepRow, TrainDir
from swe_env.train_plan import make_train_plan
from swe_env.training import TrainConfig

ROLLOUT = {"tasks": "synthetic:train:6", "tasks_per_step": 1, "group_size": 2, "concurrency": 4}
CONFIG = {
    "model": "tiny:glm",
    "steps": 3,
    "async": {"max_off_policy_steps": 1},
    "rollout": ROLLOUT,
}


class Silent:
    """A screen, and a watcher."""

    def begins(self, stage: str, total: int) -> Watcher:
        return self

    def stage(self, job_id: str, stage: str) -> None: ...

    def done(self, episode: Episode, *, will_retry: bool) -> None: ...

    def learns(self, progress: Progress) -> None: ...

    def row(self, row: StepRow | EvaluationRow, total_steps: int) -> None: ...


class Scripted:
    """Ends a group when it is told to."""

    def __init__(self) -> None:
        self.begun = set[int]()
        """Groups."""
        self._may_end: dict[str, trio.Event] = {}
        self._version: dict[str, int] = {}
        self._lost: set[str] = set()

    async def play(
        self, rundir: RunDir, names: Sequence[str], watcher: Watcher, *, task: int, group: str = ""
    ) -> None:
        number = group.rpartition("/")[2]
        self.begun.add(int(number))
        self._may_end[number] = trio.Event()
        await self._may_end[number].wait()
        for reward, name in enumerate(names):
            lost = number in self._lost
            episode = Episode(
                id=name,
                task_id=name,
                group_id=group,
                policy="vllm",
                end=End.SANDBOX_LOST if lost else End.SUBMITTED,
                error="the daemon is gone" if lost else "",
                reward=None if lost else float(reward),
                segments=[
                    Segment(
                        token_ids=[1, 2],
                        is_action=[False, True],
                        logprobs=[None, -1.0],
                        policy_versions=[None, self._version[number]],
                    )
                ],
            )
            rundir.save(episode)
            watcher.done(episode, will_retry=False)

    async def ends(self, number: int, *, version: int, lost: bool = False) -> None:
        """Let the group of this number end."""
        while number not in self.begun:
            await settled()
        self._version[str(number)] = version
        self._lost |= {str(number)} if lost else set()
        self._may_end[str(number)].set()
        await settled()


async def settled() -> None:
    """Wait until every task waits for what a test has yet to do: none for a thread, that is for a disk."""
    threads = trio.to_thread.current_default_thread_limiter()
    await wait_all_tasks_blocked(0.01)
    while threads.borrowed_tokens:
        await wait_all_tasks_blocked(0.01)


Body = Callable[[Rollouts, Scripted, TrainDir], Awaitable[None]]


def in_training(tmp_path: Path, body: Body, **changes: object) -> TrainDir:
    plan = make_train_plan(TrainConfig.model_validate(CONFIG | changes))
    where, played = TrainDir(tmp_path / "run"), Scripted()

    async def run() -> None:
        with trio.fail_after(20):
            rollouts = Rollouts(plan, where, Silent(), played, Flow(least=2, most=4))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(rollouts.run)
                await body(rollouts, played, where)
                nursery.cancel_scope.cancel()

    trio.run(run)
    return where


def test_what_is_dropped_as_stale_makes_room_for_others_at_once(tmp_path: Path) -> None:
    async def body(rollouts: Rollouts, played: Scripted, where: TrainDir) -> None:
        rollouts.serves(0)
        await settled()
        assert played.begun == {0, 1}
        await played.ends(0, version=0)
        await rollouts.batch(0)
        rollouts.serves(1)
        await settled()
        await played.ends(2, version=1)
        await rollouts.batch(1)
        rollouts.serves(2)
        await played.ends(1, version=0)  # of all that is left, and two steps old
        assert played.begun == {0, 1, 2}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rollouts.batch, 2)
            await settled()
            assert played.begun == {0, 1, 2, 3}
            await played.ends(3, version=2)

    where = in_training(tmp_path, body)
    last = where.read_batch(2)
    assert (last.groups, last.dropped) == ([3], {1: "stale"})


def test_another_group_is_played_for_one_that_infrastructure_ended(tmp_path: Path) -> None:
    async def body(rollouts: Rollouts, played: Scripted, where: TrainDir) -> None:
        rollouts.serves(0)
        await settled()
        await played.ends(0, version=0, lost=True)
        await played.ends(1, version=0)
        assert played.begun == {0, 1, 2}
        await played.ends(2, version=0)
        await rollouts.batch(0)

    where = in_training(tmp_path, body, rollout=ROLLOUT | {"tasks_per_step": 2}, steps=1)
    assert where.read_batch(0).groups == [1, 2]
    assert where.read_batch(0).dropped == {0: "lost"}


def test_where_infrastructure_ends_everything_the_training_ends_and_says_by_what(tmp_path: Path) -> None:
    async def body(rollouts: Rollouts, played: Scripted, where: TrainDir) -> None:
        rollouts.serves(0)
        await settled()
        await played.ends(0, version=0, lost=True)
        await trio.sleep_forever()

    with pytest.raises(ExceptionGroup) as group:
        in_training(tmp_path, body)
    assert group.group_contains(RunError, match="were lost, the last by: the daemon is gone", depth=None)
