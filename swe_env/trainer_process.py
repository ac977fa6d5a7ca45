"""A process that trains, seen from outside: torch stays in `trainer`, which answers in lines of JSON.

It runs as `python -m trainer.MODULE CONFIG.json`. What it prints on standard output is read here line by
line; its standard error goes to a file, whose last line says why it failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from swe_env.rundir import RunError
from swe_env.vllm_launcher import PARENT

STOP_SECONDS = 10.0
"""For a trainer that is told to stop to remove what it had begun to write."""


class TrainerProcess:
    """A running trainer."""

    def __init__(
        self, process: subprocess.Popen[bytes], errors: Path, stdout: trio.lowlevel.FdStream
    ) -> None:
        self._process = process
        self._errors = errors
        self._stdout = stdout
        self._read = b""

    @property
    def pid(self) -> int:
        """Process id, and id of its process group."""
        return self._process.pid

    async def line(self) -> bytes | None:
        """The next line that it prints; None when it has ended well.

        Raises :class:`RunError` with its reason if it failed.
        """
        while b"\n" not in self._read:
            part = await self._stdout.receive_some()
            if not part:
                return await self._ended()
            self._read += part
        line, self._read = self._read.split(b"\n", 1)
        return line

    async def _ended(self) -> None:
        while self._process.poll() is None:  # noqa: ASYNC110 - nothing to await
            await trio.sleep(0.02)
        if self._process.returncode != 0:
            raise RunError(_reason(self._errors, self._process.returncode))


@asynccontextmanager
async def trainer_process(
    module: str, config: Path, *, errors: Path, environment: Mapping[str, str] | None = None
) -> AsyncGenerator[TrainerProcess]:
    """Start `python -m module config`; its standard error goes to `errors`, which is overwritten.

    `environment` comes on top of this process's.

    Leaving the block ends it and all its ranks: TERM, and KILL after `STOP_SECONDS`.
    """
    with errors.open("wb") as log:
        # from this thread: the kernel tells a child when the thread that began it ends
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", module, str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **(environment or {}), PARENT: str(os.getpid()), "HF_HUB_OFFLINE": "1"},
            start_new_session=True,  # Ctrl-C reaches this process only, which ends that one
        )
    assert process.stdout is not None
    try:
        async with trio.lowlevel.FdStream(os.dup(process.stdout.fileno())) as stdout:
            yield TrainerProcess(process, errors, stdout)
    finally:
        await _end(process)
        process.stdout.close()


async def _end(process: subprocess.Popen[bytes]) -> None:
    with trio.CancelScope(shield=True):
        for sign in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, sign)
            with trio.move_on_after(STOP_SECONDS):
                while process.poll() is None:  # noqa: ASYNC110 - nothing to await
                    await trio.sleep(0.02)
                break


def _reason(errors: Path, code: int) -> str:
    """Why training failed, in one line: the last of what it wrote to standard error."""
    text = errors.read_text(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if code == -signal.SIGKILL:
        return "training was killed, most likely for want of memory: lower micro_batch_tokens"
    return lines[-1] if lines else f"training ended with exit code {code} and no word"
