"""Many episodes at once.

Each episode is a task of its own in one nursery, so a stuck one holds nothing but its own place. An
episode that infrastructure ended is tried again a bounded number of times; what is kept is the last
attempt, and it is never a reward. So it is with one whose clock ran out while this process stood still.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from agents.loop import End
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
    async with trio.open_nursery() as around:
        pulse = Pulse()
        around.start_soon(pulse.run)
        async with trio.open_nursery() as nursery:
            for job in jobs:
                nursery.start_soon(_do, job, rundir, watcher, places, retries, pulse)
        around.cancel_scope.cancel()


async def _do(
    job: Job, rundir: RunDir, watcher: Watcher, places: trio.CapacityLimiter, retries: int, pulse: Pulse
) -> None:
    for attempt in range(retries + 1):
        async with places:
            before = pulse.stood_still()
            episode = await job.attempt(lambda stage: watcher.stage(job.id, stage))
            episode = unless_it_stood_still(episode, pulse.stood_still() - before)
        will_retry = episode.end.is_infrastructure and attempt < retries
        if not will_retry:
            await trio.to_thread.run_sync(rundir.save, episode)
        watcher.done(episode, will_retry=will_retry)
        if not will_retry:
            return
        await trio.sleep(2.0**attempt)


class Pulse:
    """Notices when this process did not run: it was stopped, or its machine slept."""

    def __init__(self) -> None:
        self._before = 0.0
        self._beat = trio.current_time()

    def stood_still(self) -> float:
        """For so long in all, until now [s]."""
        late = trio.current_time() - self._beat - BEAT
        return self._before + (late if late > LATE else 0.0)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await trio.sleep(BEAT)
            self._before = self.stood_still()
            self._beat = trio.current_time()


BEAT = 0.5
"""Between two beats of a pulse [s]."""
LATE = 2.0
"""What is later than by this was stopped; a busy process is late by less [s]."""


def unless_it_stood_still(episode: Episode, seconds: float) -> Episode:
    """The episode, without its reward if its clock ran out and this process stood still for these seconds."""
    if episode.end is not End.TIME_LIMIT or not seconds:
        return episode
    error = f"its clock ran out while this process stood still for {seconds:.0f} s (it was stopped)"
    return episode.model_copy(
        update={"end": End.INTERNAL_ERROR, "error": error, "reward": None, "grade": None}
    )
