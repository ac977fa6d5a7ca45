"""Many episodes at once.

Each episode is a task of its own in one nursery, so a stuck one holds nothing but its own place. An
episode that infrastructure ended is tried again a bounded number of times; what is kept is the last
attempt, and it is never a reward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from agents.chat import Chat
from agents.loop import Budget
from agents.policy import Policy
from agents.prompts import Prompts
from agents.tools import ToolLimits
from swe_env.episode import Episode, run_episode
from swe_env.rundir import RunDir
from swe_env.workspace import Workspaces
from tasks.model import Task


@dataclass(frozen=True)
class Job:
    """One episode to be played."""

    id: str
    task: Task
    make_policy: Callable[[], Policy]
    """Called once an attempt: scripted policies are used up by playing."""


class Watcher(Protocol):
    """Is told what happens, for a progress display."""

    def stage(self, job_id: str, stage: str) -> None:
        """A job entered a stage: start, play, grade."""
        ...

    def done(self, episode: Episode, *, will_retry: bool) -> None:
        """An attempt ended."""
        ...


@dataclass(frozen=True)
class Setting:
    """What all episodes of a run share."""

    chat: Chat
    workspaces: Workspaces
    prompts: Prompts
    budget: Budget
    tool_limits: ToolLimits
    concurrency: int = 8
    retries: int = 2
    """Further attempts after an infrastructure failure."""


async def run_jobs(jobs: Sequence[Job], setting: Setting, rundir: RunDir, watcher: Watcher) -> None:
    """Play all jobs, `concurrency` at a time, keeping each episode as it ends.

    Cancelling it removes every sandbox and keeps every finished episode. Raises `RunError` when the run
    directory cannot be written.
    """
    places = trio.CapacityLimiter(setting.concurrency)
    async with trio.open_nursery() as nursery:
        for job in jobs:
            nursery.start_soon(_play, job, setting, rundir, watcher, places)


async def _play(
    job: Job, setting: Setting, rundir: RunDir, watcher: Watcher, places: trio.CapacityLimiter
) -> None:
    for attempt in range(setting.retries + 1):
        async with places:
            episode = await run_episode(
                job.task,
                job.make_policy(),
                chat=setting.chat,
                workspaces=setting.workspaces,
                prompts=setting.prompts,
                budget=setting.budget,
                tool_limits=setting.tool_limits,
                episode_id=job.id,
                watch=lambda stage: watcher.stage(job.id, stage),
            )
        will_retry = episode.end.is_infrastructure and attempt < setting.retries
        if not will_retry:
            await trio.to_thread.run_sync(rundir.save, episode)
        watcher.done(episode, will_retry=will_retry)
        if not will_retry:
            return
        await trio.sleep(2.0**attempt)
