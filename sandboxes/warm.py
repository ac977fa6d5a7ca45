"""Docker sandboxes started ahead of need, because a container takes a fifth of a second to start.

Who opens a sandbox and knows that another one like it will be wanted says so (:meth:`WarmEngine.prepare`). At
most `bound` wait at a time; those that nobody came for end with the engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import trio

from sandboxes.docker import DockerEngine
from sandboxes.protocol import Engine, Limits, Sandbox, SandboxError

WARM = 8
"""Most sandboxes that wait."""

Kind = tuple[str, str, Limits, frozenset[tuple[str, str]]]
"""Image, working directory, limits, environment: sandboxes of a kind can stand in for one another."""


class WarmEngine:
    """A :class:`sandboxes.protocol.Engine` over another one. From :meth:`connect`."""

    def __init__(self, engine: Engine, nursery: trio.Nursery, bound: int) -> None:
        self._engine, self._nursery, self._bound = engine, nursery, bound
        self._waiting: defaultdict[Kind, list[_Ahead]] = defaultdict(list)

    @classmethod
    @asynccontextmanager
    async def connect(cls, *, run_id: str, bound: int = WARM) -> AsyncGenerator[WarmEngine]:
        """As :meth:`DockerEngine.connect`."""
        async with DockerEngine.connect(run_id=run_id) as engine, trio.open_nursery() as nursery:
            yield cls(engine, nursery, bound)
            nursery.cancel_scope.cancel()

    def prepare(
        self, image: str, *, workdir: str, limits: Limits, env: Mapping[str, str] | None = None
    ) -> None:
        """Start a sandbox for the next who asks for one like it. Does nothing when enough wait already."""
        if sum(map(len, self._waiting.values())) < self._bound:
            ahead = _Ahead()
            self._waiting[_kind(image, workdir, limits, env)].append(ahead)
            options: dict[str, Any] = {"workdir": workdir, "limits": limits, "env": env}
            self._nursery.start_soon(ahead.keep, self._engine, image, options)

    @asynccontextmanager
    async def sandbox(
        self, image: str, *, workdir: str, limits: Limits, env: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Sandbox]:
        """As in :class:`sandboxes.protocol.Engine`."""
        waiting = self._waiting[_kind(image, workdir, limits, env)]
        while waiting:
            ahead = waiting.pop(0)
            try:
                if sandbox := await ahead.take():
                    yield sandbox
                    return
            finally:
                ahead.over.set()
        async with self._engine.sandbox(image, workdir=workdir, limits=limits, env=env) as sandbox:
            yield sandbox

    async def commit(self, sandbox: Sandbox, *, tag: str, labels: Mapping[str, str]) -> str:
        """As in :class:`sandboxes.protocol.Engine`."""
        return await self._engine.commit(sandbox, tag=tag, labels=labels)

    async def image_id(self, name: str) -> str:
        """As in :class:`sandboxes.protocol.Engine`."""
        return await self._engine.image_id(name)

    async def image_labels(self, name: str) -> dict[str, str]:
        """As in :class:`sandboxes.protocol.Engine`."""
        return await self._engine.image_labels(name)


class _Ahead:
    """One sandbox that was started ahead."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self._settled = trio.Event()
        self._sandbox: Sandbox | None = None

    async def keep(self, engine: Engine, image: str, options: dict[str, Any]) -> None:
        """Start it, and keep it until it is over. Who asks next meets the error that this one met."""
        try:
            async with engine.sandbox(image, **options) as self._sandbox:
                self._settled.set()
                await self.over.wait()
        except SandboxError:
            pass
        finally:
            self._settled.set()

    async def take(self) -> Sandbox | None:
        """The sandbox, if it came to be and is alive."""
        await self._settled.wait()
        try:
            if self._sandbox is not None:
                await self._sandbox.kill_all()
            return self._sandbox
        except SandboxError:
            return None


def _kind(image: str, workdir: str, limits: Limits, env: Mapping[str, str] | None) -> Kind:
    return image, workdir, limits, frozenset((env or {}).items())
