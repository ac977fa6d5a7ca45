"""What a sandbox is: an isolated machine with a repository in it, in which commands run.

A backend implements :class:`Sandbox`; everything above it (git hygiene, agents, grading) is written
against the protocol alone. Errors have an owner: :class:`SandboxLost` and :class:`EngineUnavailable`
are infrastructure's and never become a reward; everything a command does is its own business and
comes back as an :class:`ExecResult`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict

Say = Callable[[str], object]
"""Receives one line of progress, for people."""


class SandboxError(Exception):
    """Base of everything this package raises on purpose. The message is one line: cause, then cure."""


class EngineUnavailable(SandboxError):
    """There is no container engine to talk to (infrastructure)."""


NO_DOCKER = "no Docker engine answers: start it with `swe-env engine`, or run `swe-env doctor`"


class ChangesUnreadable(SandboxError):
    """The files that were left in a sandbox cannot be copied, such as those too deep for a path."""


class ImageUnavailable(SandboxError):
    """The image does not exist here and could not be had, or cannot run (infrastructure)."""


class SandboxLost(SandboxError):
    """The container, the engine or the stream to it is gone (infrastructure). Never a reward."""


class Limits(BaseModel):
    """What one sandbox may use. Enforced by the kernel, not by asking."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory: int = 2 << 30
    """Memory [bytes]; swap is not added on top."""
    cpus: float = 1.0
    """CPU time per wall second."""
    pids: int = 512
    """Processes and threads alive at once."""
    file_size: int = 4 << 30
    """Largest file that can be written [bytes]."""
    disk: int = 2 << 30
    """All that can be written [bytes]. Counts as memory (oci backend), or has no limit (Docker on ext4)."""


class ExecResult(BaseModel):
    """What one command did. `head` and `tail` hold all output unless `dropped` is positive."""

    model_config = ConfigDict(frozen=True)

    exit_code: int
    """Exit status of the shell; 128 + n when a signal n ended it (137 when the deadline did)."""
    head: bytes
    """First bytes of stdout and stderr, interleaved as written."""
    tail: bytes = b""
    """Last bytes; empty unless the output exceeded the limit."""
    dropped: int = 0
    """Bytes between head and tail that were discarded inside the sandbox."""
    timed_out: bool = False
    """The deadline passed: every process in the sandbox was killed, and the sandbox is still usable."""
    seconds: float
    """Wall time of the command, measured inside the sandbox."""

    @property
    def truncated(self) -> bool:
        return self.dropped > 0

    @property
    def output(self) -> bytes:
        """Head and tail, with one line between them that says how much is missing."""
        if not self.dropped:
            return self.head + self.tail
        return b"%s\n[... %d bytes dropped ...]\n%s" % (self.head, self.dropped, self.tail)

    @property
    def text(self) -> str:
        """:attr:`output` for people and models; bytes that are not UTF-8 become U+FFFD."""
        return self.output.decode("utf-8", "replace")


@runtime_checkable
class Sandbox(Protocol):
    """A running sandbox. Obtained from a backend's async context manager, gone when that exits.

    Calls on one sandbox are served one at a time, in order. Every call raises :class:`SandboxLost`
    within a second of the container, engine or stream going away, and is cancellable: a cancelled
    call leaves the sandbox unusable (its next call raises :class:`SandboxLost`).
    """

    @property
    def id(self) -> str:
        """Name of the container, for people and for the engine's own tools."""
        ...

    @property
    def image_id(self) -> str:
        """Content digest of the image that it was made from."""
        ...

    @property
    def workdir(self) -> str:
        """Where commands start, and what relative paths mean to the agent's tools."""
        ...

    async def run(
        self,
        command: str | bytes,
        *,
        timeout: float = 60.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        output_limit: int = 64 << 10,
        session: bool = True,
    ) -> ExecResult:
        """Run a shell script (bash, or sh where there is none) and return what it did.

        `command` and `stdin` may be of any size and any bytes (no NUL in `command`); neither travels
        on an argv. With `session` (the default) the working directory and the exported environment
        that the previous session command left are where this one starts; `cwd` and `env` override
        them for this and the following ones. Without it the command starts from the image's own
        directory and environment and leaves no trace in the session's.

        After `timeout` seconds every process in the sandbox is killed, whatever it did to escape
        (setsid, nohup, double fork), and the result has `timed_out`; the session keeps the directory
        and environment it had before. A background process outlives its command otherwise.
        At most `output_limit` bytes of output are kept, half from the start and half from the end.
        """
        ...

    async def read(self, path: str, *, limit: int = 64 << 20) -> bytes:
        """Content of a file, byte for byte. Raises the matching `OSError`, or `SandboxError` past `limit`."""
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Create or replace a file (and its parent directories). Raises the matching `OSError`."""
        ...

    async def kill_all(self) -> None:
        """End every process in the sandbox but its supervisor; nothing runs when this returns."""
        ...


@runtime_checkable
class Layered(Protocol):
    """A sandbox whose changes the backend can see, and lay on its image again."""

    def with_changes_below(self, directory: str) -> AbstractAsyncContextManager[Sandbox]:
        """A fresh sandbox of the same image with what was changed below `directory`, and nothing else.

        Raises :class:`ChangesUnreadable`.
        """
        ...


@runtime_checkable
class Warming(Protocol):
    """An engine that can start sandboxes ahead of need."""

    def prepare(
        self, image: str, *, workdir: str, limits: Limits, env: Mapping[str, str] | None = None
    ) -> None:
        """Start one for the next who asks for one like it. Returns at once."""
        ...


class Engine(Protocol):
    """Where sandboxes come from: one backend, for the sandboxes of one run."""

    def sandbox(
        self, image: str, *, workdir: str, limits: Limits, env: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """A started sandbox of `image`, gone on exit (also when cancelled, at any point).

        `workdir` is created if the image lacks it; `env` is added to the image's. Raises
        :class:`ImageUnavailable`, :class:`EngineUnavailable`, or :class:`SandboxLost` when it could not be
        started.
        """
        ...

    async def commit(self, sandbox: Sandbox, *, tag: str, labels: Mapping[str, str]) -> str:
        """Make the sandbox's files an image `tag` and return its id. Processes are paused meanwhile."""
        ...

    async def image_id(self, name: str) -> str:
        """Content digest of an image that is here. Raises :class:`ImageUnavailable`."""
        ...

    async def image_labels(self, name: str) -> dict[str, str]:
        """Labels of an image that is here. Raises :class:`ImageUnavailable`."""
        ...
