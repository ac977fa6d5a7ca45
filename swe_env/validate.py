"""Whether tasks can be trusted: the gold patch solves them each time, and doing nothing never does.

Each task is graded `n` times with its gold patch and `n` times with a patch that only adds a note, so that
its hidden tests run on the unsolved repository. A task that does not behave is put on a quarantine list, with
the reason. Like any run it is resumable, and infrastructure's failures are tried again and are no verdict.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from sandboxes.docker import DockerEngine
from sandboxes.engine import BASE_IMAGE
from sandboxes.protocol import Say
from swe_env.episode import Episode, grade_patch
from swe_env.plan import make_plan
from swe_env.request import RunRequest
from swe_env.run import ensure_images
from swe_env.rundir import RunDir, RunError, write_atomic
from swe_env.runner import Job, Watch, Watcher, run_jobs
from swe_env.workspace import Workspaces
from tasks.model import Task

NOTE = b"--- /dev/null\n+++ b/a_note_that_changes_nothing.txt\n@@ -0,0 +1 @@\n+nothing\n"


class Quarantine(BaseModel):
    """Tasks not to be trusted."""

    model_config = ConfigDict(frozen=True)

    tasks_sha256: str
    """Of all tasks validated: the list speaks of these and no others."""
    runs: int
    """Gradings of each kind a task."""
    reasons: dict[str, str]
    """Task -> why it is here."""


async def validate(
    request: RunRequest, watching: Callable[[int], AbstractContextManager[Watcher]], say: Say
) -> Quarantine:
    """Validate the tasks of `request`, `request.n` times; the list is written to `quarantine.json` in its
    run directory. Raises as :func:`~swe_env.run.run` does.
    """
    plan, rundir = make_plan(request), RunDir(request.out)
    rundir.begin(plan.spec)
    finished = rundir.finished()
    async with DockerEngine.connect(run_id=secrets.token_hex(6)) as engine:
        await ensure_images(plan.tasks, request, engine, say)
        workspaces = Workspaces(engine, BASE_IMAGE)

        async def attempt(task: Task, by: str, name: str, watch: Watch) -> Episode:
            patch = task.gold_patch.encode("utf-8", "surrogateescape") if by == "gold" else NOTE
            return await grade_patch(
                task, patch, by=by, workspaces=workspaces, mode=request.mode, episode_id=name, watch=watch
            )

        jobs = [
            Job(name, partial(attempt, task, by, name))
            for task in plan.tasks
            for by in ("gold", "note")
            for number in range(request.n)
            if (name := f"{task.id}--{by}--{number}") not in finished
        ]
        with watching(len(jobs)) as watcher:
            await run_jobs(jobs, rundir, watcher, concurrency=request.concurrency, retries=request.retries)
    found = Quarantine(tasks_sha256=plan.spec.tasks_sha256, runs=request.n, reasons=judge(rundir.episodes()))
    write_atomic(request.out / "quarantine.json", found.model_dump_json(indent=1).encode())
    return found


def judge(episodes: Sequence[Episode]) -> dict[str, str]:
    """Task -> what its gradings say against it; tasks without a complaint are left out."""
    reasons: dict[str, str] = {}
    for name in dict.fromkeys(episode.task_id for episode in episodes):
        own = [episode for episode in episodes if episode.task_id == name]
        gold = [one for one in own if one.policy == "gold" and one.grade]
        note = [one for one in own if one.policy == "note" and one.grade]
        failed = [one.grade.reason for one in gold if one.grade and not one.grade.resolved]
        solved = sum(bool(one.grade and one.grade.resolved) for one in note)
        if not gold or not note:
            reasons[name] = f"no verdict: {next((one.error for one in own if one.error), 'not graded')}"
        elif failed:
            kind = "does not solve it" if len(failed) == len(gold) else "is flaky"
            reasons[name] = f"its gold patch {kind}: failed {len(failed)} of {len(gold)} times, {failed[0]}"
        elif solved:
            reasons[name] = f"it is solved without a fix: {solved} of {len(note)} times"
    return reasons


def load_quarantine(path: Path) -> Quarantine:
    """Raises :class:`RunError`."""
    try:
        return Quarantine.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError, ValidationError) as error:
        raise RunError(f"{path} is no quarantine list: {str(error).splitlines()[0]}") from None
