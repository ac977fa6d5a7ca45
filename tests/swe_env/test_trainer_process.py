"""A process that trains, as the one sees it that started it."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from swe_env.rundir import RunError
from swe_env.trainer_process import TrainerProcess, trainer_process

MODULES = {
    "speaks": "print('one', flush=True); print('two')",
    "fails": "import sys; print('one', flush=True); sys.exit('the disk is full: free some space')",
    "waits": "import time; print('one', flush=True); time.sleep(600)",
    "ignores": "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('one', flush=True); time.sleep(600)",
    "tells": "import os, sys; print(os.environ['OF_THE_CALLER'], sys.argv[1])",
}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def in_process(
    tmp_path: Path, module: str, body: Callable[[TrainerProcess], Awaitable[None]], **more: str
) -> float:
    """Seconds from the end of `body` until the process is gone."""
    left = 0.0

    async def run() -> float:
        nonlocal left
        errors = tmp_path / "errors"
        with trio.fail_after(60):
            async with trainer_process(
                module, tmp_path / "asked", errors=errors, environment=more
            ) as process:
                try:
                    await body(process)
                finally:
                    left = trio.current_time()
            assert not Path(f"/proc/{process.pid}").exists()
            return trio.current_time() - left

    return trio.run(run)


async def read_all(process: TrainerProcess) -> list[bytes]:
    lines = list[bytes]()
    while (line := await process.line()) is not None:
        lines.append(line)
    return lines


def test_its_lines_come_one_by_one_until_it_ends(tmp_path: Path) -> None:
    async def body(process: TrainerProcess) -> None:
        assert await read_all(process) == [b"one", b"two"]

    in_process(tmp_path, "speaks", body)


def test_it_is_told_where_to_read_and_what_the_caller_sets(tmp_path: Path) -> None:
    async def body(process: TrainerProcess) -> None:
        assert await read_all(process) == [f"hello {tmp_path / 'asked'}".encode()]

    in_process(tmp_path, "tells", body, OF_THE_CALLER="hello")


def test_its_own_last_words_say_why_it_failed(tmp_path: Path) -> None:
    async def body(process: TrainerProcess) -> None:
        assert await process.line() == b"one"
        with pytest.raises(RunError, match="^the disk is full: free some space$"):
            await process.line()

    in_process(tmp_path, "fails", body)


def test_one_that_is_killed_had_too_little_memory(tmp_path: Path) -> None:
    async def body(process: TrainerProcess) -> None:
        assert await process.line() == b"one"
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(RunError, match="killed, most likely for want of memory: lower micro_batch"):
            await process.line()

    in_process(tmp_path, "waits", body)


def test_it_is_gone_when_the_block_is_left_even_if_it_does_not_want_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swe_env.trainer_process.STOP_SECONDS", 0.5)

    async def body(process: TrainerProcess) -> None:
        assert await process.line() == b"one"

    assert in_process(tmp_path, "waits", body) < 0.4
    assert 0.5 <= in_process(tmp_path, "ignores", body) < 2
