"""`make demo`: the whole sentence of the design, once, with real parts, on a bare machine."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import trio

from agents.loop import Budget
from sandboxes.backends import Backend, needs_no_daemon
from sandboxes.engine import BASE_IMAGE, ensure_base_image, ensure_engine
from swe_env.display import Board, console, program, show_table
from swe_env.report import render
from swe_env.request import RunRequest
from swe_env.run import run
from swe_env.rundir import RunDir, RunError, write_atomic
from swe_env.serve import serve
from swe_env.terminal import say

CONTEXT = 4096
"""Context of the tiny model [tokens]: a random one only fills it."""


async def run_demo(out: Path, concurrency: int, sandbox: Backend = "auto") -> None:
    """Engine, base image, model, server; then every shipped task with three policies. Prints as it goes.

    Awaits everything; cancelling it removes sandboxes and server. Raises what the parts raise.
    """
    model, where = out / "tiny-glm", out / time.strftime("%Y%m%d-%H%M%S")
    budget = Budget(turns=8, context_tokens=CONTEXT, turn_tokens=192, seconds=120)

    async def play(policy: str, **more: Any) -> None:
        request = RunRequest(
            tasks="shipped",
            policy=policy,
            out=where / policy,
            concurrency=concurrency,
            budget=budget,
            sandbox=sandbox,
            **more,
        )
        await run(request, Board.live, say)

    async def play_scripted() -> None:
        for policy in ("gold", "noop"):
            say(f"playing the {policy} policy on every shipped task")
            await play(policy)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_prepare_base_image, sandbox)
        nursery.start_soon(_make_model, model)
    async with serve(model, log_path=where / "vllm.log", max_model_len=CONTEXT) as server:
        say(f"vLLM serves {model} at {server.url}")
        await play_scripted()
        say("playing the served model: its weights are random, it earns what luck gives")
        await play("vllm", url=server.url, model=model, prompts="tiny")
    _show([RunDir(where / policy) for policy in ("gold", "noop", "vllm")], where)


def _show(runs: list[RunDir], where: Path) -> None:
    episodes = [episode for rundir in runs for episode in rundir.episodes()]
    by_task = sorted(episodes, key=lambda episode: episode.task_id)  # stable: gold, no-op, vLLM of each task
    show_table(by_task)
    page = where / "report.html"
    write_atomic(page, render("demo", by_task).encode())
    example = next(episode for episode in by_task if episode.policy == "gold")
    console.print(f"\neverything    {where}\nreport        {page}", soft_wrap=True)
    console.print("what next     one episode, turn by turn:", soft_wrap=True)
    console.print(f"              {program()} show {where}/gold {example.id}", soft_wrap=True)
    console.print("              your own model, served by vLLM:", soft_wrap=True)
    console.print(
        f"              {program()} run --tasks shipped --policy vllm --model DIR --out runs/mine",
        soft_wrap=True,
    )


async def _prepare_base_image(sandbox: Backend) -> None:
    if sandbox != "docker" and needs_no_daemon(BASE_IMAGE):
        return  # nothing needs a Docker engine
    await trio.to_thread.run_sync(ensure_engine, say)
    say(f"base image {await trio.to_thread.run_sync(ensure_base_image, say)} is here")


async def _make_model(model: Path) -> None:
    if (model / "config.json").is_file():
        return
    say("making a tiny GLM-4.5-shaped model and its tokenizer")
    done = await trio.run_process(
        [sys.executable, "-m", "trainer.tiny_model", str(model), "--shape", "glm"],
        capture_stdout=True,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode != 0:
        raise RunError(f"no tiny model: {done.stdout.decode(errors='replace').strip().splitlines()[-1]}")
