"""The byte streams to supervisors: one of its own for each, and what an engine attaches.

Docker's attached streams pass through two more processes, which costs a tool call half a millisecond. So a
listening socket is mounted into the container; the supervisor connects before anything else runs there, and
then it is gone. The attached streams still say when the container or the engine ends, and what a supervisor
complained of. Where the socket cannot be reached (a container in a virtual machine, a policy that forbids it)
the supervisor uses its stdin and stdout, which are those streams.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import trio

from sandboxes.protocol import SandboxLost

PIECE = 256 << 10
"""Most bytes read at once."""
START_SECONDS = 60.0
"""Longest that the supervisor of a started container takes to connect [s]."""


class SocketStream:
    """A connection to a supervisor. With `attached`, it ends when that does, too.

    Both calls try first and wait only where they must: the event loop is a part of what a tool call costs.
    """

    def __init__(self, connection: socket.socket, attached: AttachStream | None = None) -> None:
        connection.setblocking(False)
        self._connection, self._attached = connection, attached
        self._readable = _either(connection, attached) if attached else None

    async def send_all(self, data: bytes) -> None:
        with memoryview(data) as view:
            sent = 0
            while sent < len(data):
                try:
                    sent += self._connection.send(view[sent:])
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self._connection)
                except OSError as error:
                    raise trio.BrokenResourceError(str(error)) from error

    async def receive_some(self, max_bytes: int | None = None, /) -> bytes:
        while True:
            try:
                return self._connection.recv(max_bytes or PIECE)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._readable or self._connection)
            except OSError as error:
                raise trio.BrokenResourceError(str(error)) from error
            if self._attached and self._attached.ended():
                return b""

    async def aclose(self) -> None:
        trio.lowlevel.notify_closing(self._connection)
        self._connection.close()
        if self._readable and self._attached:
            trio.lowlevel.notify_closing(self._readable)
            self._readable.close()
            await self._attached.aclose()


@contextmanager
def listening(path: Path) -> Generator[socket.socket | None]:
    """A socket file for one supervisor to connect to, while the block runs; None where none can be."""
    with socket.socket(socket.AF_UNIX) as listener:
        listens = True
        try:
            _listen(listener, path)
        except OSError:  # a file system without sockets, a system without /proc
            listens = False
        try:
            yield listener if listens else None
        finally:
            path.unlink(missing_ok=True)


def _listen(listener: socket.socket, path: Path) -> None:
    listener.setblocking(False)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")  # an address is short, a path may be long
        path.chmod(0o666)  # the supervisor has a user id of its own
        listener.listen(1)
    finally:
        os.close(folder)


class AttachStream:
    """The bytes of an attached container: Docker's 8-byte frame headers come off, stderr is put aside."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
        self._raw = bytearray()
        self._left = 0  # bytes of the current frame still to come
        self._to_stdout = True
        self._stderr = bytearray()

    @property
    def complaint(self) -> str:
        """First line that came on stderr: only a supervisor that cannot start writes there."""
        return self._stderr.decode("utf-8", "replace").strip().split("\n")[0]

    def fileno(self) -> int:
        return self._connection.fileno()

    def ended(self) -> bool:
        """Whether the other side has closed it. What came before that is thrown away."""
        try:
            while self._connection.recv(PIECE):
                pass
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    async def send_all(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def receive_some(self, max_bytes: int | None = None, /) -> bytes:
        while True:
            if not self._left and len(self._raw) >= 8:
                self._to_stdout = self._raw[0] == 1
                self._left = int.from_bytes(self._raw[4:8], "big")
                del self._raw[:8]
            elif self._left and self._raw:
                size = min(self._left, len(self._raw), max_bytes or self._left)
                data = bytes(self._raw[:size])
                del self._raw[:size]
                self._left -= size
                if self._to_stdout:
                    return data
                self._stderr += data[: 1024 - len(self._stderr)]
            else:
                more = await self._stream.receive_some(PIECE)
                if not more:
                    return b""
                self._raw += more

    async def aclose(self) -> None:
        await self._stream.aclose()


async def meet(listener: socket.socket, attached: AttachStream) -> SocketStream | AttachStream:
    """The way that the supervisor of a started container took. Raises `SandboxLost` when it takes none."""
    with _either(listener, attached) as either, trio.move_on_after(START_SECONDS) as waiting:
        await trio.lowlevel.wait_readable(either)
    if waiting.cancelled_caught:
        raise SandboxLost(f"its supervisor did not connect in {START_SECONDS:.0f} s: lower the concurrency")
    try:
        return SocketStream(listener.accept()[0], attached)
    except BlockingIOError:
        await attached.receive_some(1)  # what it says when it cannot connect
        return attached


def _either(connection: socket.socket, attached: AttachStream) -> select.epoll:
    """Readable when one of them is. Waiting for each in a task of its own would cost every tool call."""
    both = select.epoll()
    both.register(connection.fileno(), select.EPOLLIN)
    both.register(attached.fileno(), select.EPOLLIN)
    return both
