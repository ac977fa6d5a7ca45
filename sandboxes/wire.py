"""The client of the supervisor: framed requests over any byte stream, one at a time.

A backend opens a stream to a sandbox's PID 1 (:mod:`sandboxes.streams`) and wraps it in a
:class:`Session`, which has the calls of :class:`sandboxes.protocol.Sandbox`. The other side and the
layout of the frames are `supervisor.c`.

A call that does not end with a whole reply (cancelled, cut off, late, or nonsense) leaves the stream at
an unknown place: the session is dead from then on and says why.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import trio

from sandboxes.protocol import ExecResult, SandboxError, SandboxLost

GRACE = 5.0
"""How much later than the deadline inside the sandbox the client gives up on it [s]."""
FILE_SECONDS = 120.0
"""Deadline of a file operation [s]."""
REASON_SECONDS = 0.7
"""Most time spent on finding out why a stream ended [s]."""
SMALL = 4096
"""A request of so many bytes fits into any pipe: sending it waits for nobody."""
STATE_BYTES = 2 << 20
"""More than the supervisor keeps of a session."""
MAX_TIMEOUT = 2**32 / 1000 - 1
"""Longest deadline that the frame can carry [s]."""

_RUN, _READ, _WRITE, _KILL_ALL, _STATE = 1, 2, 3, 4, 5
_SESSION = 1
_TIMED_OUT, _NO_FORK = 1, 2
_REQUEST = struct.Struct("<BBHIQIIIIQ")
_LENGTH = struct.Struct("<I")
_RESULT = struct.Struct("<iIQQQ")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True)
class SessionState:
    """Where a session is, and its exported variables as shell code."""

    directory: str
    environment: bytes


class ByteStream(Protocol):
    """What a session needs of a stream; every `trio.abc.Stream` is one."""

    async def send_all(self, data: bytes) -> None: ...
    async def receive_some(self, max_bytes: int | None = None, /) -> bytes | bytearray: ...


@dataclass(frozen=True)
class _Reply:
    status: int
    flags: int
    data: bytes
    head_len: int
    dropped: int
    seconds: float


class _Broken(Exception):
    """The stream ended or made no sense."""


class Session:
    """Calls to one supervisor: a :class:`sandboxes.protocol.Sandbox`.

    `why` is asked when the stream ends: it returns what the backend knows about the cause, or "".
    """

    def __init__(
        self,
        stream: ByteStream,
        *,
        id: str,
        image_id: str = "",
        workdir: str = "/",
        why: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        self._stream = stream
        self._id, self._image_id, self._workdir = id, image_id, workdir
        self._why = why
        self._lock = trio.Lock()
        self._buffer = bytearray()
        self._dead: str | None = None

    @property
    def id(self) -> str:
        """Name of the container."""
        return self._id

    @property
    def image_id(self) -> str:
        """Content digest of the image that it was made from."""
        return self._image_id

    @property
    def workdir(self) -> str:
        """Directory that a session starts in."""
        return self._workdir

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
        script = os.fsencode(command)
        if b"\0" in script:
            raise ValueError("a command cannot contain NUL")
        reply = await self._call(
            _RUN,
            flags=_SESSION if session else 0,
            path=cwd or "",
            prelude=_exports(env or {}),
            script=script,
            body=stdin,
            limit=output_limit,
            timeout=min(max(timeout, 0.0), MAX_TIMEOUT),
        )
        head, tail = reply.data[: reply.head_len], reply.data[reply.head_len :]
        if not reply.dropped:
            head, tail = reply.data, b""
        return ExecResult(
            exit_code=reply.status,
            head=head,
            tail=tail,
            dropped=reply.dropped,
            timed_out=bool(reply.flags & _TIMED_OUT),
            seconds=reply.seconds,
        )

    async def read(self, path: str, *, limit: int = 64 << 20) -> bytes:
        reply = await self._call(_READ, path=path, limit=limit)
        if reply.status == errno.EFBIG:
            raise SandboxError(f"{path} is larger than {limit} bytes: raise `limit` to read it")
        _raise_errno(reply.status, path)
        return reply.data

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        reply = await self._call(_WRITE, path=path, body=data, mode=mode)
        _raise_errno(reply.status, path)

    async def kill_all(self) -> None:
        await self._call(_KILL_ALL)

    async def state(self) -> SessionState | None:
        """What :meth:`go_on` in another sandbox needs; None if no command of the session has ended yet."""
        reply = await self._call(_STATE, limit=STATE_BYTES)
        if not reply.head_len:
            return None
        return SessionState(os.fsdecode(reply.data[: reply.head_len]), reply.data[reply.head_len :])

    async def go_on(self, state: SessionState) -> None:
        """Continue another sandbox's session."""
        await self._call(_STATE, path=state.directory, body=state.environment)

    async def _call(
        self,
        op: int,
        *,
        flags: int = 0,
        path: str = "",
        prelude: bytes = b"",
        script: bytes = b"",
        body: bytes = b"",
        limit: int = 0,
        mode: int = 0,
        timeout: float = FILE_SECONDS,
    ) -> _Reply:
        """One request and its reply; sends and receives at the same time. Raises `SandboxLost`."""
        where = os.fsencode(path)
        if b"\0" in where:
            raise ValueError("a path cannot contain NUL")
        header = _REQUEST.pack(
            op, flags, mode, round(timeout * 1000), limit, len(where), len(prelude), len(script), 0, len(body)
        )
        parts = [b"".join((header, where, prelude, script))]
        if body:
            parts.append(body)
        async with self._lock:
            if self._dead:
                raise SandboxLost(f"sandbox {self._id} is lost: {self._dead}")
            self._dead = "an earlier call was cancelled"  # stays if this one is
            broken = f"it did not answer within {timeout + GRACE:.0f} s"
            reply = None
            with trio.move_on_after(timeout + GRACE):
                try:
                    reply = await self._exchange(parts, limit)
                except _Broken as error:
                    broken = str(error)
            if reply is None:
                self._dead = broken
                self._dead = await self._reason(broken)
                raise SandboxLost(f"sandbox {self._id} is lost: {self._dead}")
            self._dead = None
        if reply.flags & _NO_FORK:
            reason = os.strerror(reply.status)
            raise SandboxLost(f"sandbox {self._id} cannot start a process ({reason}): raise its limits")
        return reply

    async def _exchange(self, parts: list[bytes], limit: int) -> _Reply:
        if sum(map(len, parts)) <= SMALL:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # see send()
                await self._stream.send_all(b"".join(parts))
            return await self._receive_reply(limit)
        sent = False

        async def send() -> None:
            nonlocal sent
            try:
                for part in parts:
                    await self._stream.send_all(part)
                sent = True
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # the receiving side sees the end as well, after what was said before it

        outcome: _Reply | _Broken
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            try:
                outcome = await self._receive_reply(limit)
            except _Broken as error:
                outcome = error
            nursery.cancel_scope.cancel()
        if isinstance(outcome, _Broken):
            raise outcome
        if not sent:
            raise _Broken("the supervisor answered a request that it had not read")
        return outcome

    async def _receive_reply(self, limit: int) -> _Reply:
        pieces: list[bytes] = []
        total = 0
        while length := _LENGTH.unpack(await self._exactly(_LENGTH.size))[0]:
            total += length
            if total > limit:
                raise _Broken(f"the supervisor sent more than the {limit} bytes asked for")
            pieces.append(await self._exactly(length))
        status, flags, head_len, dropped, nanoseconds = _RESULT.unpack(await self._exactly(_RESULT.size))
        return _Reply(status, flags, b"".join(pieces), head_len, dropped, nanoseconds / 1e9)

    async def _exactly(self, size: int) -> bytes:
        buffer = self._buffer
        while len(buffer) < size:
            try:
                more = await self._stream.receive_some(256 << 10)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise _Broken("the connection to it broke") from error
            if not more:
                raise _Broken("the connection to it ended")
            buffer += more
        taken = bytes(buffer[:size])
        del buffer[:size]
        return taken

    async def _reason(self, broken: str) -> str:
        if self._why is None:
            return broken
        why = ""
        with trio.move_on_after(REASON_SECONDS):
            why = await self._why()
        return why or broken


def _exports(env: Mapping[str, str]) -> bytes:
    """Shell code that sets variables to any value."""
    for name, value in env.items():
        if not _VARIABLE.match(name) or "\0" in value:
            raise ValueError(f"environment variable {name!r}: a shell cannot have that name or value")
    return b"".join(os.fsencode(f"export {name}={shlex.quote(value)}\n") for name, value in env.items())


def _raise_errno(status: int, path: str) -> None:
    if status:
        raise OSError(status, os.strerror(status), path)  # becomes FileNotFoundError and the like
