"""Does playing episodes keep its memory? Thousands of them in one process, as a worker plays them.

    python benchmarks/memory.py [--episodes N] [--concurrency C]

Real sandboxes, patches and files; the policy is a scripted one that submits at once, and the same empty patch
is graded once. Printed: the resident memory of this process as episodes go by, and episodes a second. Exit
code 1 if it grows by more than a tenth after the first tenth.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import trio
import typer

from agents.chat import load_chat
from agents.prompts import load_prompts
from sandboxes.backends import connect, needs_no_daemon
from sandboxes.engine import BASE_IMAGE, ensure_base_image
from swe_env.episode import Episode, run_episode
from swe_env.grade_once import GradedOnce
from swe_env.plan import TINY_GLM
from swe_env.policies import scripted
from swe_env.rundir import RunDir, RunSpec
from swe_env.runner import Job, Watch, run_jobs
from swe_env.sources import find_tasks
from swe_env.terminal import say
from swe_env.workspace import Workspaces

MAY_GROW = 1.1


def resident() -> float:
    """Of this process [MiB]."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


class Meter:
    """A watcher that looks at the memory after each tenth of the episodes."""

    def __init__(self, total: int) -> None:
        self.seen: list[float] = []
        self._every = total // 10
        self._done = self._infrastructure = 0
        self._began = time.monotonic()

    def stage(self, job_id: str, stage: str) -> None: ...

    def done(self, episode: Episode, *, will_retry: bool) -> None:
        self._infrastructure += episode.end.is_infrastructure
        self._done += not will_retry
        if self._done % self._every == 0:
            self.seen.append(resident())
            speed = self._done / (time.monotonic() - self._began)
            print(
                f"{self._done:6} episodes  {self.seen[-1]:6.0f} MiB  {speed:5.1f} episodes/s  "
                f"{len(os.listdir('/proc/self/fd'))} open files  {self._infrastructure} of infrastructure",
                flush=True,
            )


async def play(episodes: int, concurrency: int, rundir: RunDir) -> Meter:
    prompts, tasks, grader = load_prompts(), find_tasks("synthetic:train:100"), GradedOnce()
    chat, meter = load_chat(TINY_GLM, prompts.tools), Meter(episodes)
    async with connect("auto", run_id="memory", say=say) as engine:
        workspaces = Workspaces(engine, BASE_IMAGE)

        async def attempt(number: int, watch: Watch) -> Episode:
            task = tasks[number % len(tasks)]
            return await run_episode(
                task,
                scripted("noop", task, chat),
                chat=chat,
                workspaces=workspaces,
                prompts=prompts,
                grader=grader,
                episode_id=f"{task.id}--{number}",
                watch=watch,
            )

        jobs = [Job(f"{number}", partial(attempt, number)) for number in range(episodes)]
        await run_jobs(jobs, rundir, meter, concurrency=concurrency, retries=2)
    return meter


def main(episodes: int = 10_000, concurrency: int = 16) -> None:
    if not needs_no_daemon(BASE_IMAGE):
        ensure_base_image(say)
    with tempfile.TemporaryDirectory() as scratch:
        rundir = RunDir(Path(scratch))
        spec = RunSpec(
            policy="noop", tasks_sha256="", prompts_sha256="", tokenizer_sha256="", budget={}, version=""
        )
        rundir.begin(spec)
        meter = trio.run(play, episodes, concurrency, rundir)
    grown = max(meter.seen) / meter.seen[0]
    print(f"memory grew {grown:.2f} times after the first tenth (at most {MAY_GROW})")
    if grown > MAY_GROW:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
