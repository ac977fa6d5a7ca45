"""A process of ours, seen from outside: it answers in lines of JSON, and may be told things in such lines.

It runs as `python -m MODULE CONFIG.json`. What it prints on standard output is read here line by line; its
standard error goes to a file, whose last line says why it failed. So torch stays in `trainer`, and whoever
plays episodes can be killed without harm to whoever asked for them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trio
from pydantic import BaseModel

from swe_env.process_log import ProcessLog
from swe_env.rundir import RunError
from swe_env.training import Place
from swe_env.vllm_launcher import PARENT

STOP_SECONDS = 10.0
"""For a process that is told to stop to remove what it had begun to write."""


FULL = 1 << 18
"""A disk with less is full [bytes]: last words may be lost."""


class Killed(RunError):
    """A process was ended by a signal, which is nothing that it did: it can be started again."""


class Child:
    """A running process; made by :func:`child`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        errors: ProcessLog,
        stdout: trio.lowlevel.FdStream,
        stdin: trio.lowlevel.FdStream,
        smaller: str,
    ) -> None:
        self._process = process
        self._smaller = smaller
        self._errors = errors
        self._stdout = stdout
        self._stdin = stdin
        self._read = bytearray()

    @property
    def pid(self) -> int:
        """Process id, and id of its process group."""
        return self._process.pid

    async def line(self) -> bytes | None:
        """The next line that it prints; None when it has ended well.

        Raises :class:`RunError` with its reason if it failed, :class:`Killed` if a signal ended it.
        """
        while b"\n" not in self._read:
            part = await self._stdout.receive_some()
            if not part:
                return await self._ended()
            self._read += part
        line, _, rest = bytes(self._read).partition(b"\n")
        self._read = bytearray(rest)
        return line

    async def tell(self, what: BaseModel) -> None:
        """Write a line to its standard input. One task at a time. Raises `trio.BrokenResourceError` if it
        does not read any more: :meth:`line` knows why.
        """
        await self._stdin.send_all(what.model_dump_json().encode() + b"\n")

    def kill(self) -> None:
        """End it and its children at once; :meth:`line` raises :class:`Killed`."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _ended(self) -> None:
        while self._process.poll() is None:  # noqa: ASYNC110 - nothing to await
            await trio.sleep(0.02)
        code = self._process.returncode
        if code < 0:
            name = signal.Signals(-code).name
            memory = f", most likely for want of memory: {self._smaller}" if name == "SIGKILL" else ""
            raise Killed(f"{self._errors.path.stem} was ended by {name}{memory}")
        if code != 0:
            raise RunError(_reason(self._errors, code))


@asynccontextmanager
async def child(
    module: str,
    config: Path,
    *,
    errors: Path,
    smaller: str = "lower micro_batch_tokens",
    place: Place | None = None,
) -> AsyncGenerator[Child]:
    """Start `python -m module config`; its standard error goes to `errors`, after what is there.

    `smaller`: what helps if it needs more memory than there is. `place`: where, and with which variables.

    Leaving the block ends it and all its children: TERM, and KILL after `STOP_SECONDS`.
    """
    command, variables = launched([sys.executable, "-m", module, str(config)], place or Place())
    log = ProcessLog.after_all(errors)
    with errors.open("ab") as output:
        # from this thread: the kernel tells a child when the thread that began it ends
        process = subprocess.Popen(  # noqa: ASYNC220
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env={**os.environ, **variables, "HF_HUB_OFFLINE": "1"},
            start_new_session=True,  # Ctrl-C reaches this process only, which ends that one
        )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        async with (
            trio.lowlevel.FdStream(os.dup(process.stdout.fileno())) as stdout,
            trio.lowlevel.FdStream(os.dup(process.stdin.fileno())) as stdin,
        ):
            process.stdin.close()
            yield Child(process, log, stdout, stdin, smaller)
    finally:
        await _end(process)
        process.stdout.close()


def launched(command: list[str], place: Place) -> tuple[list[str], dict[str, str]]:
    """What to run for it to run there, and the variables to be added."""
    if not place.launcher:
        return command, {**place.environment, PARENT: str(os.getpid())}
    # its parent there is nobody that this process knows
    variables = [f"{name}={value}" for name, value in place.environment.items()]
    return [*place.launcher, *(["env", *variables] if variables else []), *command], {}


async def _end(process: subprocess.Popen[bytes]) -> None:
    with trio.CancelScope(shield=True):
        for sign in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, sign)
            with trio.move_on_after(STOP_SECONDS):
                while process.poll() is None:  # noqa: ASYNC110 - nothing to await
                    await trio.sleep(0.02)
                break


def _reason(errors: ProcessLog, code: int) -> str:
    """Why it failed, in one line: the last of what it wrote to standard error, if it could write."""
    if shutil.disk_usage(errors.path.parent).free < FULL:
        return f"No space left on device: {errors.path.parent}; free some, and the same command goes on"
    lines = [line.strip() for line in errors.end().splitlines() if line.strip()]
    return lines[-1] if lines else f"{errors.path.stem} ended with exit code {code} and no word"
