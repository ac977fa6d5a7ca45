"""What every command does with its work: run it, stop it on Ctrl-C, put expected errors in one line."""

from __future__ import annotations

import errno
import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import trio
import typer

from agents.policy import PolicyError
from agents.prompts import PromptError
from agents.tokenizer import TokenizerError
from sandboxes.protocol import SandboxError
from swe_env.display import console
from swe_env.rundir import RunError
from swe_env.serve import ServerFailed
from tasks.jsonl import TaskFileError

T = TypeVar("T")

EXPECTED = (
    RunError, OSError, TaskFileError, PromptError, TokenizerError, PolicyError, SandboxError, ServerFailed,
)  # fmt: skip
"""Errors that are the world's or the user's: one line, no stack trace."""


def say(line: str) -> None:
    console.print(line, style="dim", markup=False, soft_wrap=True)


def run_async(
    work: Callable[[], Awaitable[T]],
    *,
    interrupted: str = "stopping: removing sandboxes, finished episodes are kept",
) -> T:
    """Run `work` under trio. The first Ctrl-C (or SIGTERM) cancels it and waits for its cleaning up,
    which `interrupted` says to the person; a second one is Python's own."""

    async def under_signals() -> tuple[bool, T | None]:
        stopped, result = False, None
        async with trio.open_nursery() as nursery:

            async def watch(*, task_status: trio.TaskStatus[None]) -> None:
                nonlocal stopped
                with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                    task_status.started()
                    async for _ in signals:
                        stopped = True
                        console.print(interrupted, style="yellow")
                        nursery.cancel_scope.cancel()
                        return

            await nursery.start(watch)
            result = await work()
            nursery.cancel_scope.cancel()
        return stopped, result

    stopped, result = guard(lambda: trio.run(under_signals))
    if stopped:
        raise typer.Exit(130)
    return cast("T", result)


def guard(work: Callable[[], T]) -> T:
    """Turn expected errors into one line and exit code 2."""
    try:
        return work()
    except Exception as error:
        typer.echo(f"swe-env: {reason(error)}", err=True)
        raise typer.Exit(2) from None


def reason(error: BaseException) -> str:
    """What an expected error says, the first of a group; anything else is raised again."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        if group.split(EXPECTED)[1] is not None:
            raise error
        return reason(group.exceptions[0])
    if not isinstance(error, EXPECTED):
        raise error
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" ({error.filename})" if error.filename else ""
        return f"No space left on device{where}: free some, then run the same command again"
    return str(error)
