"""Plays groups of episodes for the steps of a training, as many at once as there is room for.

A group is one task, `group_size` episodes, begun together; each has a run directory of its own. It may be
played while weights change under it: every token knows its version, and :mod:`swe_env.pool` says which group
may begin, which step takes it, and which is too old by then. Killed at any moment, what is finished stays
finished; the members that are missing are played by whatever is served then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import trio

from swe_env.episode import Episode
from swe_env.flow import Flow
from swe_env.pool import Group, Pool
from swe_env.rundir import RunDir, RunError, write_atomic
from swe_env.runner import Watcher
from swe_env.train_dir import TrainDir
from swe_env.train_plan import TrainPlan, run_spec, task_of
from swe_env.train_screen import Screen
from swe_env.training import Penalty


class Plays(Protocol):
    """Whoever has episodes played: :class:`swe_env.workers.Workers`."""

    async def play(
        self, rundir: RunDir, names: Sequence[str], watcher: Watcher, *, task: int, group: str = ""
    ) -> None:
        """Play the episodes of these names, of the task at this index, into `rundir`."""
        ...


class Rollouts:
    """The groups of one training. :meth:`run` has them played, :meth:`batch` hands them out."""

    def __init__(self, plan: TrainPlan, where: TrainDir, screen: Screen, workers: Plays, flow: Flow) -> None:
        rollout = plan.config.rollout
        self.version: int | None = None
        """Of the weights that play; None while nobody is to."""
        self._plan = plan
        self._where = where
        self._screen = screen
        self._workers = workers
        self._flow = flow
        self._left: dict[int, int] = {}
        """Of each group that is being played, the episodes that have not ended."""
        self._changed = trio.Event()
        self._board: Watcher | None = None
        self._lost = 0
        """Groups that infrastructure ended, one after the other."""
        known = where.groups()
        self._next = known.next
        self._pool = Pool(
            size=rollout.tasks_per_step,
            most_stale=plan.config.asynchronous.max_off_policy_steps,
            steps=plan.config.steps,
            step=known.step,
            replace=rollout.replace_without_spread,
            floor=rollout.least_valid,
        )
        for number in known.begun:
            self._pool.begin(number)
        for group in known.finished:
            self._pool.end(group)
        self._begun = sorted(self._pool.playing)
        """By a process before this one, and not finished."""

    def serves(self, version: int) -> None:
        """These weights play from now on."""
        self.version = version
        self._tell()

    async def run(self) -> None:
        """Have groups played until cancelled. Raises `RunError`: infrastructure ends all, a disk is full."""
        async with trio.open_nursery() as nursery:
            while True:
                while self._may_begin():
                    if self._begun:
                        number = self._begun.pop(0)
                    else:
                        number, self._next = self._next, self._next + 1
                        self._pool.begin(number)
                    self._left[number] = self._plan.config.rollout.group_size
                    nursery.start_soon(self._play, number)
                await self._changed.wait()

    async def batch(self, step: int) -> None:
        """Write the batch of `step`, when there is one."""
        rollout, began = self._plan.config.rollout, trio.current_time()
        self._board = self._screen.begins("rollout", rollout.tasks_per_step * rollout.group_size)
        while (batch := self._pool.batch()) is None:
            self._tell()  # what was found too stale has made room for others
            await self._changed.wait()
        assert batch.step == step
        seconds = trio.current_time() - began
        batch = batch.model_copy(update={"seconds": seconds, "at_once": self._flow.limit})
        self._where.batch(step).parent.mkdir(exist_ok=True)
        write_atomic(self._where.batch(step), batch.model_dump_json().encode())
        self._tell()

    def in_flight(self) -> int:
        """Episodes that are begun and not ended."""
        return sum(self._left.values())

    def _may_begin(self) -> bool:
        members = self.in_flight()
        room = self._flow.limit - members >= self._plan.config.rollout.group_size
        if self.version is None or (members and not room):
            return False
        may = self._pool.may_go_on if self._begun else self._pool.may_begin
        return may(self.version)

    def _tell(self) -> None:
        """Wake whoever waits for something to change."""
        self._changed.set()
        self._changed = trio.Event()

    async def _play(self, number: int) -> None:
        plan, rundir = self._plan, self._where.group(number)
        index, rollout = task_of(number, plan), plan.config.rollout
        task = plan.tasks[index]
        rundir.begin(run_spec(plan, [task], version=""))
        finished = await trio.to_thread.run_sync(rundir.finished)
        names = [f"{task.id}--{number}.{member}" for member in range(rollout.group_size)]
        missing = [name for name in names if name not in finished]
        self._left[number] = len(missing)
        if missing:
            watcher = _Member(self, number)
            await self._workers.play(rundir, missing, watcher, task=index, group=f"{task.id}/{number}")
        del self._left[number]
        episodes = await trio.to_thread.run_sync(rundir.episodes)
        group = summary(number, episodes, plan.config.advantage)
        self._refuse_if_all_are_lost(group, episodes)
        if group.valid >= rollout.least_valid:  # the others are tried again when the training is asked again
            write_atomic(self._where.group_file(number), group.model_dump_json().encode())
        self._pool.end(group)
        self._tell()

    def hears(self, number: int, episode: Episode, *, will_retry: bool) -> None:
        """An attempt at an episode of a group ended."""
        if self._board is not None:
            self._board.done(episode, will_retry=will_retry)
        if not will_retry:
            self._left[number] -= 1
            self._tell()

    def sees(self, job_id: str, stage: str) -> None:
        """An episode entered a stage."""
        if self._board is not None:
            self._board.stage(job_id, stage)

    def _refuse_if_all_are_lost(self, group: Group, episodes: Sequence[Episode]) -> None:
        self._lost = 0 if group.valid else self._lost + 1
        if self._lost >= self._plan.config.rollout.tasks_per_step:
            raise RunError(
                f"all episodes of {self._lost} groups were lost, the last by: {episodes[0].error}; "
                "the same command tries again"
            )


class _Member:
    """A :class:`~swe_env.runner.Watcher` of the members of a group."""

    def __init__(self, rollouts: Rollouts, number: int) -> None:
        self._rollouts = rollouts
        self._number = number

    def stage(self, job_id: str, stage: str) -> None:
        self._rollouts.sees(job_id, stage)

    def done(self, episode: Episode, *, will_retry: bool) -> None:
        self._rollouts.hears(self._number, episode, will_retry=will_retry)


def summary(number: int, episodes: Sequence[Episode], penalty: Penalty) -> Group:
    """What the pool is told of a group that was played."""
    valid = [episode for episode in episodes if episode.reward is not None]
    rewards = [episode.reward or 0.0 for episode in valid]
    versions = [
        version
        for episode in valid
        for segment in episode.segments
        for version in segment.policy_versions
        if version is not None
    ]
    costs = penalty.input_tokens or penalty.action_tokens or penalty.turns
    return Group(
        number=number,
        oldest=min(versions, default=0),
        valid=len(rewards),
        has_spread=len(set(rewards)) > 1 or (costs > 0 and max(rewards, default=0) > 0),
        reward=sum(rewards) / max(1, len(rewards)),
    )
