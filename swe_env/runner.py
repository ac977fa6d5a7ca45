"""Many episodes at once.

Each episode is a task of its own in one nursery, so a stuck one holds nothing but its own place. An
episode that infrastructure ended is tried again a bounded number of times; what is kept is the last
attempt, and it is never a reward.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from swe_env.episode import Episode
from swe_env.rundir import RunDir

Watch = Callable[[str], None]
"""Is told which stage of an episode begins."""


@dataclass(frozen=True)
class Job:
    """One episode to be had."""

    id: str
    attempt: Callable[[Watch], Awaitable[Episode]]
    """Plays it, or grades what somebody else played. Called again after an infrastructure failure."""


class Watcher(Protocol):
    """Is told what happens, for a progress display."""

    def stage(self, job_id: str, stage: str) -> None:
        """A job entered a stage: start, play, grade."""
        ...

    def done(self, episode: Episode, *, will_retry: bool) -> None:
        """An attempt ended."""
        ...


async def run_jobs(
    jobs: Sequence[Job],
    rundir: RunDir,
    watcher: Watcher,
    *,
    concurrency: int | trio.CapacityLimiter,
    retries: int,
) -> None:
    """Do all jobs, `concurrency` at a time, keeping each episode as it ends.

    Several calls may share one limiter.
    `retries`: further attempts after an infrastructure failure. Cancelling it removes every sandbox and
    keeps every finished episode. Raises `RunError` when the run directory cannot be written.
    """
    places = trio.CapacityLimiter(concurrency) if isinstance(concurrency, int) else concurrency
    async with trio.open_nursery() as nursery:
        for job in jobs:
            nursery.start_soon(_do, job, rundir, watcher, places, retries)


async def _do(job: Job, rundir: RunDir, watcher: Watcher, places: trio.CapacityLimiter, retries: int) -> None:
    for attempt in range(retries + 1):
        async with places:
            episode = await job.attempt(lambda stage: watcher.stage(job.id, stage))
        will_retry = episode.end.is_infrastructure and attempt < retries
        if not will_retry:
            await trio.to_thread.run_sync(rundir.save, episode)
        watcher.done(episode, will_retry=will_retry)
        if not will_retry:
            return
        await trio.sleep(2.0**attempt)
