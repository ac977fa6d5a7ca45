"""`swe-env run`: everything is checked before the first sandbox starts, then the episodes are played."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from agents.chat import Chat
from agents.policy import Policy
from agents.vllm import Served, VllmPolicy, check
from sandboxes.backends import connect
from sandboxes.protocol import Say
from swe_env.episode import Episode, grade_patch, run_episode
from swe_env.grading import grade
from swe_env.images import workspaces_for
from swe_env.plan import Plan, make_plan
from swe_env.policies import replay, scripted
from swe_env.request import RunRequest
from swe_env.rundir import RunDir
from swe_env.runner import Job, Watch, Watcher, run_jobs
from swe_env.serve import Server, serve
from tasks.model import Task


async def run(
    request: RunRequest, watching: Callable[[int], AbstractContextManager[Watcher]], say: Say
) -> RunDir:
    """Play what is missing of a run; `watching(n)` shows the progress of n episodes.

    Awaits all of them; cancelling keeps what is finished.
    Raises, before any sandbox starts: `RunError`, `TaskFileError`, `PromptError`, `TokenizerError`,
    `PolicyError` and `ServerFailed` (no server), `SandboxError` (no engine, no image).
    """
    # in a thread, so that Ctrl-C is heard while weights are hashed or a dataset is fetched
    plan = await trio.to_thread.run_sync(make_plan, request, abandon_on_cancel=True)
    rundir = RunDir(request.out)
    with rundir.locked():
        await _play_missing(plan, rundir, watching, say)
    return rundir


async def _play_missing(
    plan: Plan, rundir: RunDir, watching: Callable[[int], AbstractContextManager[Watcher]], say: Say
) -> None:
    request = plan.request
    rundir.begin(plan.spec)
    finished = rundir.finished()
    wanted = [(f"{task.id}--{plan.kind}--{index}", task) for task in plan.tasks for index in range(request.n)]
    missing = [(name, task) for name, task in wanted if name not in finished]
    if not missing:
        return
    async with AsyncExitStack() as stack:
        budget, served = request.budget, None
        if plan.kind == "vllm" and request.model is not None:
            served, about = await stack.enter_async_context(_served(request, request.model, plan.chat, say))
            longest = min(budget.context_tokens, about.max_model_len)
            budget = budget.model_copy(update={"context_tokens": longest})
            found = {"vllm": about.vllm_version, "context_tokens": longest}
            rundir.begin(plan.spec.model_copy(update={"served": found}))

        def make_policy(task: Task) -> Policy:
            if served is not None:
                return served
            if plan.recording is not None:
                return replay(plan.recording)
            return scripted(plan.kind, task, plan.chat)

        engine = await stack.enter_async_context(
            connect(request.sandbox, run_id=secrets.token_hex(6), say=say)
        )
        workspaces = await stack.enter_async_context(
            workspaces_for([task for _, task in missing], request, engine, say)
        )

        async def attempt(name: str, task: Task, watch: Watch) -> Episode:
            if plan.predictions is not None:
                return await grade_patch(
                    task,
                    plan.predictions.patches[task.id],
                    by=plan.predictions.model,
                    workspaces=workspaces,
                    mode=request.mode,
                    episode_id=name,
                    watch=watch,
                )
            return await run_episode(
                task,
                make_policy(task),
                chat=plan.chat,
                workspaces=workspaces,
                prompts=plan.prompts,
                budget=budget,
                mode=request.mode,
                grader=grade if request.graded else None,
                episode_id=name,
                watch=watch,
            )

        jobs = [Job(name, partial(attempt, name, task)) for name, task in missing]
        with watching(len(jobs)) as watcher:
            await run_jobs(jobs, rundir, watcher, concurrency=request.concurrency, retries=request.retries)


@asynccontextmanager
async def _served(
    request: RunRequest, model: Path, chat: Chat, say: Say
) -> AsyncGenerator[tuple[VllmPolicy, Served]]:
    """The policy behind `--url`, or behind a server of our own, and what that server says of itself.

    Raises `ServerFailed` into the block when a server of our own dies.
    """
    if request.url is not None:
        async with _connected(request.url, request, model, chat) as policy:
            yield policy
        return
    async with (
        serve(model, log_path=request.out / "vllm.log", say=say) as server,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(_watch, server)
        async with _connected(server.url, request, model, chat) as policy:
            yield policy
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _connected(
    url: str, request: RunRequest, model: Path, chat: Chat
) -> AsyncGenerator[tuple[VllmPolicy, Served]]:
    about = await check(url, sampling=request.sampling)
    async with VllmPolicy.connect(
        url, sampling=request.sampling, stop_token_ids=chat.stop_token_ids, label=model.name
    ) as policy:
        yield policy, about


async def _watch(server: Server) -> None:
    while True:
        server.check_alive()
        await trio.sleep(0.5)
