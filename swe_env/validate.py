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

import trio
from pydantic import BaseModel, ConfigDict, ValidationError

from sandboxes.backends import connect
from sandboxes.protocol import Say
from swe_env.episode import Episode, grade_patch
from swe_env.images import workspaces_for
from swe_env.plan import make_plan
from swe_env.request import RunRequest
from swe_env.rundir import RunDir, RunError, write_atomic
from swe_env.runner import Job, Watch, Watcher, run_jobs
from tasks.model import Task

NOTE = b"--- /dev/null\n+++ b/a_note_that_changes_nothing.txt\n@@ -0,0 +1 @@\n+nothing\n"


class Quarantine(BaseModel):
    """Tasks not to be trusted."""

    model_config = ConfigDict(frozen=True)

    tasks_sha256: str
    """Of the tasks validated, for the record."""
    runs: int
    """Gradings of each kind a task."""
    reasons: dict[str, str]
    """Task -> why it is here."""
    no_verdict: list[str] = []
    """Tasks that infrastructure kept from being judged: not in `reasons`."""


async def validate(
    request: RunRequest, watching: Callable[[int], AbstractContextManager[Watcher]], say: Say
) -> Quarantine:
    """Validate the tasks of `request`, `request.n` times; the list is written to `quarantine.json` in its
    run directory. Raises as :func:`~swe_env.run.run` does.
    """
    plan = await trio.to_thread.run_sync(make_plan, request, abandon_on_cancel=True)
    rundir = RunDir(request.out)
    with rundir.locked():
        rundir.begin(plan.spec.model_copy(update={"policy": "validate"}))
        finished = rundir.finished()
        async with (
            connect(request.sandbox, run_id=secrets.token_hex(6), say=say) as engine,
            workspaces_for(plan.tasks, request, engine, say) as workspaces,
        ):

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
                await run_jobs(
                    jobs, rundir, watcher, concurrency=request.concurrency, retries=request.retries
                )
        reasons, no_verdict = judge(rundir.episodes())
        found = Quarantine(
            tasks_sha256=plan.spec.tasks_sha256, runs=request.n, reasons=reasons, no_verdict=no_verdict
        )
        write_atomic(request.out / "quarantine.json", found.model_dump_json(indent=1).encode())
    return found


def judge(episodes: Sequence[Episode]) -> tuple[dict[str, str], list[str]]:
    """Task -> what its gradings say against it; and the tasks that were not graded both ways."""
    reasons: dict[str, str] = {}
    no_verdict: list[str] = []
    for name in dict.fromkeys(episode.task_id for episode in episodes):
        own = [episode for episode in episodes if episode.task_id == name]
        gold = [one for one in own if one.policy == "gold" and one.grade]
        note = [one for one in own if one.policy == "note" and one.grade]
        failed = [one.grade.reason for one in gold if one.grade and not one.grade.resolved]
        solved = sum(bool(one.grade and one.grade.resolved) for one in note)
        if not gold or not note:
            no_verdict.append(name)
        elif failed:
            kind = "does not solve it" if len(failed) == len(gold) else "is flaky"
            reasons[name] = f"its gold patch {kind}: failed {len(failed)} of {len(gold)} times, {failed[0]}"
        elif solved:
            reasons[name] = f"it is solved without a fix: {solved} of {len(note)} times"
    return reasons, no_verdict


def load_quarantine(path: Path) -> Quarantine:
    """Raises :class:`RunError`."""
    try:
        return Quarantine.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError, ValidationError) as error:
        raise RunError(f"{path} is no quarantine list: {str(error).splitlines()[0]}") from None
