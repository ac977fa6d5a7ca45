"""One sandbox's place on this machine: its directory, process, control groups and user ids; and their end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import trio

from sandboxes.oci_machine import CGROUPS, controllers
from sandboxes.protocol import SandboxLost
from sandboxes.streams import SocketStream

RUN = Path("/run/swe-env")
"""Where sandboxes live: gone after a reboot, as they are."""
TEARDOWN_SECONDS = 5.0
"""Longest that leaving a sandbox waits for its end [s]; then its processes are killed one by one."""


class Place:
    """One sandbox's directory, process, control groups and user ids."""

    def __init__(self, engine: Path, name: str, first_id: int) -> None:
        self.name, self.first_id = name, first_id
        self.home = engine / name
        self.cgroup = f"/swe-env/{engine.name}/{name}"
        self._process: trio.Process | None = None
        self._stream: SocketStream | None = None

    @property
    def upper(self) -> Path:
        """The files that differ from the image's, seen through the mount namespace that they are in."""
        assert self._process is not None
        return Path(f"/proc/{self._process.pid}/root{self.home}/up/u")

    async def start(self, argv: list[str]) -> SocketStream:
        """Start the process. Returns the stream to its stdin and from its stdout."""
        ours, its = socket.socketpair()
        self._stream = SocketStream(ours)
        with its, (self.home / "stderr").open("wb") as errors:
            self._process = await trio.lowlevel.open_process(
                argv, stdin=its, stdout=its, stderr=errors, cwd=self.home, start_new_session=True
            )
        return self._stream

    async def why(self) -> str:
        """Why the stream to the supervisor ended; "" if nothing is known."""
        assert self._process is not None
        code = await self._process.wait()
        with suppress(OSError):
            if said := (self.home / "stderr").read_text(errors="replace").strip():
                return f"it could not run: {said.splitlines()[-1][:300]}"
        if code == 128 + signal.SIGKILL or code == -signal.SIGKILL:
            return "it was killed: from outside, or it ran out of memory (raise Limits.memory)"
        return f"its supervisor exited with status {code}"

    async def end(self) -> None:
        """Let it end, make it end, and remove what it was."""
        if self._stream is not None:
            await self._stream.aclose()
        if self._process is not None:
            with trio.move_on_after(TEARDOWN_SECONDS):
                await self._process.wait()
        await trio.to_thread.run_sync(self.clear)
        if self._process is not None:
            self._process.kill()
            await self._process.wait()

    def pids(self) -> list[int]:
        assert self._process is not None
        inside = [int(pid) for root in controllers() for pid in _read_pids(root / self.cgroup[1:])]
        return [self._process.pid, *inside]

    def clear(self) -> None:
        remove_cgroups(self.cgroup)
        shutil.rmtree(self.home, ignore_errors=True)

    @contextmanager
    def frozen(self) -> Generator[None]:
        """No process of the sandbox runs while the block does."""
        version1, version2 = CGROUPS / "freezer" / self.cgroup[1:], CGROUPS / self.cgroup[1:]
        if version1.is_dir():
            file, stop, go = version1 / "freezer.state", "FROZEN", "THAWED"
            state, stopped = file, stop
        else:
            file, stop, go = version2 / "cgroup.freeze", "1", "0"
            state, stopped = version2 / "cgroup.events", "frozen 1"
        try:
            file.write_text(stop)
            deadline = time.monotonic() + TEARDOWN_SECONDS
            while stopped not in state.read_text().splitlines():
                if time.monotonic() > deadline:
                    raise SandboxLost(
                        f"sandbox {self.name} cannot be paused: a process of it hangs in the kernel"
                    )
                time.sleep(0.001)
            yield
        except FileNotFoundError as error:
            raise SandboxLost(f"sandbox {self.name} is lost: {error.filename} is gone") from None
        finally:
            with suppress(OSError):
                file.write_text(go)


def end_starting(home: Path) -> None:
    """End the runtimes below a directory first: one that is still starting would make more to remove."""
    found, deadline = True, time.monotonic() + TEARDOWN_SECONDS
    while found and time.monotonic() < deadline:
        found = False
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if home in (process / "cwd").readlink().parents:
                    os.kill(int(process.name), signal.SIGKILL)
                    found = (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        time.sleep(0.001)


def remove_cgroups(path: str) -> bool:
    """End the processes below a control group, frozen ones too, and remove it from every hierarchy.

    False if it is still there in the end.
    """
    roots = [CGROUPS, *(root for root in CGROUPS.iterdir() if root.is_dir())]
    # the runtime may be removing them too: os.walk does not mind what is gone meanwhile
    groups = [Path(group) for root in roots for group, _, _ in os.walk(root / path[1:], topdown=False)]
    for group in groups:
        _kill(group)
    for state in (group / "freezer.state" for group in groups):
        if state.exists():  # version 1, where the frozen do not die
            with suppress(OSError):
                state.write_text("THAWED")
    deadline = time.monotonic() + TEARDOWN_SECONDS
    for group in groups:
        while time.monotonic() < deadline:
            _kill(group)
            try:
                group.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:  # its processes are on their way out
                time.sleep(0.001)
    return not any(group.exists() for group in groups)


def _kill(group: Path) -> None:
    for pid in _read_pids(group):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _read_pids(group: Path) -> list[int]:
    try:
        return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
    except OSError:
        return []
