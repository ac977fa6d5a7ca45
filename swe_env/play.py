"""One episode from Python, from nothing: a server, a sandbox, an answer; everything closed again."""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path

import trio

from agents.chat import load_chat
from agents.loop import Budget
from agents.prompts import load_prompts
from agents.vllm import VllmPolicy
from sandboxes.backends import connect, needs_no_daemon
from sandboxes.engine import BASE_IMAGE, ensure_base_image
from swe_env.episode import Episode, run_episode
from swe_env.serve import serve
from swe_env.workspace import Workspaces
from tasks.model import Task


async def play(
    task: Task,
    model: Path,
    *,
    prompts: str = "default",
    budget: Budget | None = None,
    log: Path = Path("vllm.log"),
) -> Episode:
    """Serve the model in directory `model`, let it play `task`, grade what it made.

    Half a minute goes into starting vLLM (its output goes to `log`): for many episodes see
    :mod:`swe_env.run`. Awaits all of it; cancelling leaves nothing behind. Raises what the parts raise
    before the episode begins; what goes wrong after is the episode's `end` and `error`.
    """
    words = load_prompts(prompts)
    chat = load_chat(model, words.tools, announce=words.announce_tools)
    if not needs_no_daemon(BASE_IMAGE):
        await trio.to_thread.run_sync(partial(ensure_base_image, lambda _: None))
    async with (
        connect("auto", run_id=secrets.token_hex(6), say=lambda _: None) as engine,
        serve(model, log_path=log) as server,
        VllmPolicy.connect(server.url, stop_token_ids=chat.stop_token_ids) as policy,
    ):
        workspaces = Workspaces(engine, BASE_IMAGE)
        return await run_episode(task, policy, chat=chat, workspaces=workspaces, prompts=words, budget=budget)
