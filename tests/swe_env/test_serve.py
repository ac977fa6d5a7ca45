"""`serve`: up inside the block, nothing left after it, and one line that says why when it fails."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio

from agents.chat import load_chat
from agents.policy import PolicyError
from agents.vllm import VllmPolicy, check
from swe_env.process_log import ProcessLog
from swe_env.serve import ServerFailed, last_words, serve
from swe_env.vllm_launcher import PATIENCE


def group_members(group: int) -> list[str]:
    """Living processes of a process group, as ps shows them."""
    listing = subprocess.run(
        ["ps", "-eo", "pgid=,stat=,pid=,args="], capture_output=True, text=True, check=True
    )
    rows = [line.split(maxsplit=3) for line in listing.stdout.splitlines()]
    return [row[3] for row in rows if int(row[0]) == group and not row[1].startswith("Z")]


def child_groups(parent: int | None = None) -> set[int]:
    """Process groups of the children of this process, or of another one; its own is left out."""
    argv = ["ps", "-o", "pgid=", "--ppid", str(parent or os.getpid())]
    listing = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return {int(line) for line in listing.split()} - {os.getpgid(0)}


async def replay(url: str, model_dir: Path) -> None:
    """An answer and the server's score of it agree, for this family's own prompt and stop tokens."""
    chat = load_chat(model_dir, tools=[])
    prompt = chat.start([{"role": "user", "content": "Fix the bug in `total`."}])
    async with VllmPolicy.connect(url, stop_token_ids=chat.stop_token_ids) as policy:
        completion = await policy.complete(prompt, max_tokens=100)
        scores = (await policy.score(prompt + completion.token_ids))[len(prompt) :]
        assert completion.logprobs is not None
        assert completion.token_ids
        assert max(abs(a - (b or 0)) for a, b in zip(completion.logprobs, scores, strict=True)) < 1e-4


@pytest.mark.vllm
def test_qwen_is_served_and_a_server_killed_mid_request_is_a_policy_error(
    tmp_path: Path, tiny_models: Path
) -> None:
    log, heard = tmp_path / "log", []

    async def body() -> int:
        async with serve(
            tiny_models / "qwen", log_path=log, max_model_len=8192, served_name="q", say=heard.append
        ) as server:
            assert (await check(server.url, model="q")).max_model_len == 8192
            chat = load_chat(tiny_models / "qwen", tools=[])
            prompt = chat.start([{"role": "user", "content": "Go."}])
            async with VllmPolicy.connect(server.url, model="q", stop_token_ids=[], deadline=60) as policy:
                completion = await policy.complete(prompt, max_tokens=50)
                scores = (await policy.score(prompt + completion.token_ids))[len(prompt) :]
                pairs = zip(completion.logprobs or [], scores, strict=True)
                assert max(abs(a - (b or 0)) for a, b in pairs) < 1e-4

                killed = 0.0

                async def kill_soon() -> None:
                    nonlocal killed
                    await trio.sleep(0.5)
                    os.kill(server.pid, signal.SIGKILL)
                    killed = time.monotonic()

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(kill_soon)
                    with pytest.raises(PolicyError) as caught:
                        await policy.complete(prompt, max_tokens=7000)
                assert time.monotonic() - killed < 20  # of the 60 it may wait
                assert "\n" not in str(caught.value)
            with pytest.raises(ServerFailed, match="SIGKILL"):
                server.check_alive()
            leaving = time.monotonic()
        assert time.monotonic() - leaving < 20
        return server.pid

    assert group_members(trio.run(body)) == []
    assert heard
    assert all("qwen" in line and "\n" not in line for line in heard)


@pytest.mark.vllm
def test_llama_is_served_and_ends_with_a_parent_that_is_killed_outright(
    tmp_path: Path, tiny_models: Path
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tiny_models / "llama"), str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        url, group = parent.stdout.readline().split()
        trio.run(replay, url, tiny_models / "llama")
        assert group_members(int(group))
    finally:
        parent.kill()
        parent.wait()
    assert_ends(int(group), within=PATIENCE)  # by SIGTERM, before it is killed


@pytest.mark.vllm
def test_a_parent_that_is_killed_while_the_engine_starts_leaves_no_process(
    tmp_path: Path, tiny_models: Path
) -> None:
    log = tmp_path / "log"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tiny_models / "llama"), str(log)])
    deadline = time.monotonic() + 120
    while "EngineCore pid=" not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    [group] = child_groups(parent.pid)
    assert len(group_members(group)) > 1
    parent.kill()
    parent.wait()
    assert_ends(group, within=PATIENCE + 10)  # vLLM does not act on SIGTERM then


def test_who_does_not_listen_is_killed_some_time_after_its_parent() -> None:
    stubborn = (
        "import os, signal, time; from swe_env import vllm_launcher as own; own.PATIENCE = 0.5\n"
        "os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN); own.die_with_parent()\n"
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    between = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {stubborn!r}])"
    with subprocess.Popen([sys.executable, "-c", between], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        parent.kill()
    assert_ends(group, within=5)


def assert_ends(group: int, *, within: float) -> None:
    """No process of it is left after so many seconds."""
    deadline = time.monotonic() + within
    while left := group_members(group):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


PARENT = """
import sys, trio
from pathlib import Path
from swe_env.serve import serve
from swe_env.vllm_launcher import PATIENCE

async def main():
    async with serve(Path(sys.argv[1]), log_path=Path(sys.argv[2]), max_model_len=4096) as server:
        print(server.url, server.pid, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.vllm
def test_cancelled_while_its_engine_starts_leaves_no_process(tmp_path: Path, tiny_glm: Path) -> None:
    log = tmp_path / "log"

    async def body() -> int:
        async def start() -> None:
            async with serve(tiny_glm, log_path=log, max_model_len=1024):
                raise AssertionError("was to be cancelled")

        others = child_groups()  # the shared server's
        async with trio.open_nursery() as nursery:
            nursery.start_soon(start)
            while "EngineCore pid=" not in (log.read_text() if log.exists() else ""):
                await trio.sleep(0.1)
            [group] = child_groups() - others
            assert len(group_members(group)) > 1
            cancelled = time.monotonic()
            nursery.cancel_scope.cancel()
        assert time.monotonic() - cancelled < 20
        return group

    assert group_members(trio.run(body)) == []


def fails(model_dir: Path, log: Path, **options: object) -> str:
    async def body() -> None:
        async with serve(model_dir, log_path=log, **options):  # type: ignore[arg-type]
            raise AssertionError("was not to start")

    with pytest.raises(ServerFailed) as caught:
        trio.run(body)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_not_a_model_directory(tmp_path: Path) -> None:
    assert "has no config.json" in fails(tmp_path / "nothing", tmp_path / "log")


def test_no_vllm_names_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swe_env.serve._is_installed", lambda name: False)
    assert fails(tmp_path, tmp_path / "log") == "vLLM is not installed: run `make install`"


@pytest.mark.vllm
def test_an_unknown_architecture_is_named(tmp_path: Path, tiny_glm: Path) -> None:
    broken = Path(shutil.copytree(tiny_glm, tmp_path / "broken"))
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(
        json.dumps(config | {"model_type": "nosuch", "architectures": ["NoSuch"]})
    )
    message = fails(broken, tmp_path / "log")
    assert "nosuch" in message.lower()
    assert str(tmp_path / "log") in message


@pytest.mark.vllm
def test_weights_cut_short_are_named(tmp_path: Path, tiny_glm: Path) -> None:
    broken = Path(shutil.copytree(tiny_glm, tmp_path / "broken"))
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    message = fails(broken, tmp_path / "log", max_model_len=1024)
    assert "safetensor" in message.lower()


@pytest.mark.vllm
def test_an_unknown_flag_is_named(tmp_path: Path, tiny_glm: Path) -> None:
    assert "--no-such-flag" in fails(tiny_glm, tmp_path / "log", extra_args=["--no-such-flag"])


@pytest.mark.vllm
def test_a_port_in_use_is_named(tmp_path: Path, tiny_glm: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        message = fails(tiny_glm, tmp_path / "log", port=taken.getsockname()[1])
    assert "address already in use" in message.lower()


@pytest.mark.vllm
def test_too_little_time_is_named_and_leaves_nothing(tmp_path: Path, tiny_glm: Path) -> None:
    assert "not up after 1 s" in fails(tiny_glm, tmp_path / "log", timeout=1)


LOGS = {
    "engine's own error, not the server's echo": (
        "(VllmWorker-0 pid=9) ERROR 12-01 09:12:47 [a.py:1] ValueError: not enough memory\n"
        "(EngineCore pid=8) ERROR 12-01 09:12:49 [b.py:2] Exception: WorkerProc failed. See root cause.\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed: {'EngineCore': 1}\n",
        "ValueError: not enough memory",
    ),
    "pydantic's second line": (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, no such model [type=value_error, input_value=ArgsKwargs((), {...}), input_type=X]\n"
        "    For further information visit the web\n",
        "Value error, no such model",
    ),
    "argparse": (
        "usage: vllm serve\nvllm serve: error: unrecognized arguments: --x\n",
        "vllm serve: error: ",
    ),
    "killed": ("INFO loading\n\n", "INFO loading"),
    "nothing": ("", "it wrote nothing"),
    "not text": ("\udcff\udcfe broken\n", "broken"),
}


@pytest.mark.parametrize(("text", "words"), LOGS.values(), ids=LOGS.keys())
def test_last_words_of_a_log(tmp_path: Path, text: str, words: str) -> None:
    log = tmp_path / "log"
    log.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert words in last_words(ProcessLog(log))


def test_last_words_are_short(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ValueError: " + random.Random(0).randbytes(5000).hex())
    assert len(last_words(ProcessLog(log))) <= 500
