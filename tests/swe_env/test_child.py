"""A process of ours, as the one sees it that started it."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from pydantic import BaseModel

from swe_env.child import Child, Killed, child
from swe_env.rundir import RunError
from swe_env.training import Place

MODULES = {
    "speaks": "print('one', flush=True); print('two')",
    "fails": "import sys; print('one', flush=True); sys.exit('the disk is full: free some space')",
    "says_nothing": "import sys; sys.exit(3)",
    "waits": "import time; print('one', flush=True); time.sleep(600)",
    "ignores": "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('one', flush=True); time.sleep(600)",
    "echoes": "import sys\nfor line in sys.stdin: print(line, end='', flush=True)",
    "tells": "import os, sys; print(os.environ['OF_THE_CALLER'], sys.argv[1])",
}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def in_process(tmp_path: Path, module: str, body: Callable[[Child], Awaitable[None]], **more: str) -> float:
    """Seconds from the end of `body` until the process is gone."""
    left = 0.0

    async def run() -> float:
        nonlocal left
        errors = tmp_path / "training.log"
        with trio.fail_after(60):
            async with child(
                module, tmp_path / "asked", errors=errors, place=Place(environment=more)
            ) as process:
                try:
                    await body(process)
                finally:
                    left = trio.current_time()
            assert not Path(f"/proc/{process.pid}").exists()
            return trio.current_time() - left

    return trio.run(run)


async def read_all(process: Child) -> list[bytes]:
    lines = list[bytes]()
    while (line := await process.line()) is not None:
        lines.append(line)
    return lines


def test_its_lines_come_one_by_one_until_it_ends(tmp_path: Path) -> None:
    async def body(process: Child) -> None:
        assert await read_all(process) == [b"one", b"two"]

    in_process(tmp_path, "speaks", body)


def test_it_is_told_where_to_read_and_what_the_caller_sets(tmp_path: Path) -> None:
    async def body(process: Child) -> None:
        assert await read_all(process) == [f"hello {tmp_path / 'asked'}".encode()]

    in_process(tmp_path, "tells", body, OF_THE_CALLER="hello")


def test_what_it_is_told_comes_in_lines(tmp_path: Path) -> None:
    class Word(BaseModel):
        word: str

    async def body(process: Child) -> None:
        for word in ("one", "two\n" * 100_000):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(process.tell, Word(word=word))
                line = await process.line()
            assert line is not None
            assert Word.model_validate_json(line).word == word

    in_process(tmp_path, "echoes", body)


def test_its_own_last_words_say_why_it_failed(tmp_path: Path) -> None:
    async def body(process: Child) -> None:
        assert await process.line() == b"one"
        with pytest.raises(RunError, match="^the disk is full: free some space$"):
            await process.line()

    in_process(tmp_path, "fails", body)


def test_what_one_before_it_said_is_kept_and_is_not_its_reason(tmp_path: Path) -> None:
    async def fails(process: Child) -> None:
        with pytest.raises(RunError, match="the disk is full"):
            await read_all(process)

    async def says_nothing(process: Child) -> None:
        with pytest.raises(RunError, match="^training ended with exit code 3 and no word$"):
            await read_all(process)

    in_process(tmp_path, "fails", fails)
    in_process(tmp_path, "says_nothing", says_nothing)
    assert "the disk is full" in (tmp_path / "training.log").read_text()


def test_one_that_is_killed_had_too_little_memory(tmp_path: Path) -> None:
    async def body(process: Child) -> None:
        assert await process.line() == b"one"
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(
            Killed, match="training was ended by SIGKILL, most likely for want of memory: lower"
        ):
            await process.line()

    in_process(tmp_path, "waits", body)


def test_it_is_gone_when_the_block_is_left_even_if_it_does_not_want_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swe_env.child.STOP_SECONDS", 0.5)

    async def body(process: Child) -> None:
        assert await process.line() == b"one"

    assert in_process(tmp_path, "waits", body) < 0.4
    assert 0.5 <= in_process(tmp_path, "ignores", body) < 2


def test_a_launcher_is_put_before_its_command(tmp_path: Path) -> None:
    program = tmp_path / "launcher"
    program.write_text('#!/bin/sh\necho "launched at $1"\nshift\nexec "$@"\n')
    program.chmod(0o755)
    place = Place(launcher=[str(program), "node2"], environment={"OF_THE_CALLER": "hello"})

    async def run() -> list[bytes]:
        async with child("tells", tmp_path / "asked", errors=tmp_path / "log", place=place) as process:
            return await read_all(process)

    assert trio.run(run) == [b"launched at node2", f"hello {tmp_path / 'asked'}".encode()]
