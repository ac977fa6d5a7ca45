"""The ways to a supervisor in a Docker container: its own connection, or the attached streams."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from sandboxes import streams
from sandboxes.binaries import binary
from sandboxes.docker import DockerEngine
from sandboxes.engine import engine_answers
from sandboxes.protocol import Limits, SandboxLost
from sandboxes.reaper import owner_label
from sandboxes.streams import AttachStream, SocketStream
from sandboxes.wire import Session
from tests.sandboxes.conftest import BUSYBOX_IMAGE, WORKDIR

pytestmark = pytest.mark.docker


SOCKETS = binary("supervisor").parent / "sockets"


def sockets_of(owner: str) -> list[Path]:
    return list(SOCKETS.glob(f"{owner},*"))


@asynccontextmanager
async def opened(image: str) -> AsyncGenerator[Session]:
    async with (
        DockerEngine.connect(run_id="test-streams") as engine,
        engine.sandbox(image, workdir=WORKDIR, limits=Limits()) as sandbox,
    ):
        yield sandbox


async def moves_bytes(sandbox: Session) -> None:
    data = os.urandom(3_000_000)
    await sandbox.write("/tmp/data", data)
    assert await sandbox.read("/tmp/data") == data
    result = await sandbox.run("cat", stdin=data, output_limit=len(data))
    assert result.output == data
    late = await sandbox.run("sleep 60", timeout=0.1)
    assert late.timed_out
    assert (await sandbox.run("echo still here")).text == "still here\n"


def test_calls_do_not_pass_through_the_engine(base_image: str) -> None:
    async def main() -> None:
        async with opened(base_image) as sandbox:
            assert isinstance(sandbox._stream, SocketStream)
            await moves_bytes(sandbox)

    trio.run(main)


@pytest.mark.parametrize("why", ["no socket can be made", "nothing listens where it is mounted"])
def test_attached_streams_do_where_there_is_no_connection(
    base_image: str, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    listen = streams._listen

    def fail(listener: Any, path: Path) -> None:
        if why == "no socket can be made":
            raise OSError("this file system has no sockets")
        listen(listener, path)
        path.rename(
            path.with_suffix(".elsewhere")
        )  # as in a virtual machine: a file is there, and nobody behind
        path.touch()

    monkeypatch.setattr(streams, "_listen", fail)

    async def main() -> None:
        async with opened(base_image) as sandbox:
            assert isinstance(sandbox._stream, AttachStream)
            await moves_bytes(sandbox)

    trio.run(main)


def test_a_supervisor_that_never_connects_is_a_lost_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "START_SECONDS", 0.1)

    async def main() -> None:
        ours, engines = socket.socketpair()
        with ours, engines, streams.listening(tmp_path / "client") as listener:
            assert listener is not None
            with trio.fail_after(5), pytest.raises(SandboxLost, match="did not connect"):
                await streams.meet(listener, AttachStream(ours))

    trio.run(main)


def test_nobody_else_can_connect(base_image: str) -> None:
    connect = "import socket; socket.socket(socket.AF_UNIX).connect('/.swe-env/client')"

    async def main() -> None:
        async with opened(base_image) as sandbox:
            [folder] = sockets_of(owner_label())
            assert folder.stat().st_mode & 0o777 == 0o700
            assert list(folder.iterdir()) == []
            result = await sandbox.run(f'python -c "{connect}"')
            assert "ConnectionRefusedError" in result.text

    trio.run(main)


def test_sockets_of_dead_processes_are_removed_and_no_others(base_image: str) -> None:
    host, process, start = owner_label().rsplit(":", 2)
    dead, elsewhere = SOCKETS / f"{host}:{process}:1,x", SOCKETS / f"elsewhere.example:{process}:{start},x"
    for folder in (dead, elsewhere):
        folder.mkdir(parents=True, exist_ok=True)

    async def main() -> None:
        async with DockerEngine.connect(run_id="test-streams"):
            assert len(sockets_of(owner_label())) == 1

    try:
        trio.run(main)
        assert not dead.exists()
        assert elsewhere.is_dir()
        assert sockets_of(owner_label()) == []
    finally:
        elsewhere.rmdir()


@pytest.fixture
def daemon(busybox_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The pid of a Docker engine of this test's own, which has the image of busybox."""
    saved = subprocess.run(["docker", "save", busybox_image], capture_output=True, check=True).stdout
    home = Path("/tmp") / f"swe-env-{os.getpid()}"  # its sockets' addresses must be short
    home.mkdir()
    options = {"data-root": home / "data", "exec-root": home / "exec", "pidfile": home / "pid"}
    argv = [
        # namespaces of its own: it would take the bridge away from the machine's engine
        *("unshare", "--net", "--mount", "--fork", "--kill-child"),
        *("dockerd", "--bridge=none", "--iptables=false", f"--host=unix://{home}/socket"),
        *(f"--{name}={path}" for name, path in options.items()),
    ]
    process = subprocess.Popen(argv, stdout=(tmp_path / "log").open("wb"), stderr=subprocess.STDOUT)
    try:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{home}/socket")
        deadline = time.monotonic() + 30
        while not engine_answers():
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.1)
        subprocess.run(["docker", "load"], input=saved, capture_output=True, check=True)
        yield int((home / "pid").read_text())
    finally:
        process.kill()
        process.wait()
        subprocess.run(
            ["pkill", "-KILL", "-f", str(home)], check=False
        )  # its containerd, and what that began
        for mount in sorted(Path("/proc/mounts").read_text().split(), reverse=True):
            if mount.startswith(str(home)):
                subprocess.run(["umount", "--lazy", mount], check=False)
        shutil.rmtree(home, ignore_errors=True)


@pytest.mark.parametrize("when", ["in a call", "between calls"])
def test_the_death_of_the_engine_is_a_lost_sandbox_within_a_second(daemon: int, when: str) -> None:
    async def main() -> float:
        async with opened(BUSYBOX_IMAGE) as sandbox:
            assert (await sandbox.run("echo ok")).text == "ok\n"
            killed = 0.0

            async def kill() -> None:
                nonlocal killed
                await trio.sleep(0.3)
                killed = time.monotonic()
                os.kill(daemon, signal.SIGKILL)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill)
                if when == "between calls":
                    await trio.sleep(0.6)
                with pytest.raises(SandboxLost, match="the Docker engine is gone"):
                    await sandbox.run("sleep 60")
                return time.monotonic() - killed

    assert trio.run(main) < 1.3  # it was dead for 0.3 s when the call began
