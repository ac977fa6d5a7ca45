"""`swe-env run`: everything is checked before the first sandbox starts, then the episodes are played."""

from __future__ import annotations

import importlib.metadata
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import trio

import agents
from agents.chat import Chat, load_chat
from agents.policy import Policy, Sampling
from agents.prompts import load_prompts
from agents.tools import ToolLimits
from agents.vllm import VllmPolicy, check
from sandboxes.docker import DockerEngine
from sandboxes.engine import BASE_IMAGE, ensure_base_image
from swe_env.policies import KINDS, load_recording, replay, scripted
from swe_env.request import RunRequest
from swe_env.rundir import RunDir, RunError, RunSpec
from swe_env.runner import Job, Setting, Watcher, run_jobs
from swe_env.serve import Server, serve
from swe_env.sources import digest, find_tasks
from swe_env.workspace import Workspaces
from tasks.model import ImageRef, InlineRepo, Task
from tasks.swebench_image import build_image

TINY_GLM = Path(agents.__file__).parent / "tiny_glm"
"""Tokenizer of scripted policies when no model is given."""

Say = Callable[[str], None]


async def run(
    request: RunRequest, watching: Callable[[int], AbstractContextManager[Watcher]], say: Say
) -> RunDir:
    """Play what is missing of a run; `watching(n)` shows the progress of n episodes.

    Awaits all of them; cancelling keeps what is finished.
    Raises, before any sandbox starts: `RunError`, `TaskFileError`, `PromptError`, `TokenizerError`,
    `PolicyError` and `ServerFailed` (no server), `SandboxError` (no engine, no image).
    """
    tasks = find_tasks(request.tasks, request.instances)
    kind, _, recording_path = request.policy.partition(":")
    if kind not in ("vllm", "gold", "noop", "replay") or (kind == "replay") != bool(recording_path):
        raise RunError(f"no policy {request.policy!r}: give one of {', '.join(KINDS)}")
    if kind == "vllm" and request.model is None:
        raise RunError("--policy vllm needs --model, the directory that is served at --url or is to be")
    prompts = load_prompts(request.prompts)
    chat = load_chat(request.model or TINY_GLM, prompts.tools, request.family)
    recording = load_recording(Path(recording_path), chat) if kind == "replay" else None
    if recording is not None:
        tasks = [task for task in tasks if task.id == recording.task_id]
        if not tasks:
            raise RunError(
                f"{request.tasks} lacks the recording's task {recording.task_id!r}: name its --tasks"
            )
    rundir = RunDir(request.out)
    rundir.begin(
        RunSpec(
            policy=request.policy,
            model=str(request.model.resolve()) if kind == "vllm" and request.model else "",
            tasks_sha256=digest(tasks),
            prompts_sha256=prompts.sha256,
            tokenizer_sha256=chat.tokenizer.sha256,
            budget=request.budget.model_dump(),
            sampling=request.sampling.model_dump() if kind == "vllm" else {},
            version=importlib.metadata.version("swe-env"),
        )
    )
    finished = rundir.finished()
    wanted = [(f"{task.id}--{kind}--{index}", task) for task in tasks for index in range(request.n)]
    missing = [(name, task) for name, task in wanted if name not in finished]
    if not missing:
        return rundir
    async with AsyncExitStack() as stack:
        budget, served = request.budget, None
        if kind == "vllm" and request.model is not None:
            served, longest = await stack.enter_async_context(_served(request, request.model, chat, say))
            budget = budget.model_copy(update={"context_tokens": min(budget.context_tokens, longest)})

        def make_policy(task: Task) -> Policy:
            if served is not None:
                return served
            return replay(recording) if recording is not None else scripted(kind, task, chat)

        engine = await stack.enter_async_context(DockerEngine.connect(run_id=secrets.token_hex(6)))
        await _ensure_images([task for _, task in missing], request, engine, say)
        setting = Setting(
            chat=chat,
            workspaces=Workspaces(engine, BASE_IMAGE),
            prompts=prompts,
            budget=budget,
            tool_limits=ToolLimits(),
            concurrency=request.concurrency,
            retries=request.retries,
        )
        jobs = [Job(name, task, partial(make_policy, task)) for name, task in missing]
        with watching(len(jobs)) as watcher:
            await run_jobs(jobs, setting, rundir, watcher)
    return rundir


@asynccontextmanager
async def _served(
    request: RunRequest, model: Path, chat: Chat, say: Say
) -> AsyncGenerator[tuple[VllmPolicy, int]]:
    """The policy behind `--url`, or behind a server of our own, and the longest stream it takes [tokens].

    Raises `ServerFailed` into the block when a server of our own dies.
    """
    if request.url is not None:
        async with _connected(request.url, request.sampling, chat) as policy:
            yield policy
        return
    async with (
        serve(model, log_path=request.out / "vllm.log", say=say) as server,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(_watch, server)
        async with _connected(server.url, request.sampling, chat) as policy:
            yield policy
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _connected(url: str, sampling: Sampling, chat: Chat) -> AsyncGenerator[tuple[VllmPolicy, int]]:
    about = await check(url, sampling=sampling)
    async with VllmPolicy.connect(url, sampling=sampling, stop_token_ids=chat.stop_token_ids) as policy:
        yield policy, about.max_model_len


async def _watch(server: Server) -> None:
    while True:
        server.check_alive()
        await trio.sleep(0.5)


async def _ensure_images(tasks: list[Task], request: RunRequest, engine: DockerEngine, say: Say) -> None:
    """Have every image here before the first episode. Raises `ImageUnavailable`."""
    if request.repo_mirror is not None or any(isinstance(task.image, InlineRepo) for task in tasks):
        await trio.to_thread.run_sync(ensure_base_image, say)
    for task in {task.id: task for task in tasks}.values():
        if not isinstance(task.image, ImageRef):
            continue
        if request.repo_mirror is not None and "row" in task.metadata:
            build = partial(
                build_image, task.metadata["row"], request.repo_mirror, BASE_IMAGE, say, python=request.python
            )
            await trio.to_thread.run_sync(build)
        await engine.image_id(task.image.name)
