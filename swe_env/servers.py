"""The vLLM servers of a training: all hold the same weights, and one that dies is started again with them.

A server is told of only while it holds the published version and agrees with the trainer about it, so nobody
samples from weights of which it is not known what they are.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

import httpx
import trio

from agents.policy import PolicyError
from agents.vllm import VllmPolicy, check
from agents.weights import update_weights
from sandboxes.protocol import Say
from swe_env.probe import Mismatch, compare
from swe_env.restarts import Restarts
from swe_env.serve import UPDATABLE, Server, ServerFailed, ServerKilled, last_words, serve
from swe_env.train_dir import TrainDir
from swe_env.train_plan import TrainPlan
from swe_env.training import Place, ServerConfig

DEATH_SECONDS = 3.0
"""For a server that broke off to turn out to be dead."""
SILENT = 3
"""Looks in a row at which a server does not answer, and is held to be dead."""


class Replicas:
    """All of them."""

    def __init__(
        self,
        plan: TrainPlan,
        where: TrainDir,
        restarts: Restarts,
        say: Say,
        tell: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:
        """`tell` is called with the URLs that may be used from now on."""
        self.version = 0
        """Of the weights that are served."""
        self._plan = plan
        self._where = where
        self._restarts = restarts
        self._say = say
        self._tell = tell
        self._there: dict[int, Server] = {}
        self._mismatch: dict[int, Mismatch] = {}
        """Of those weights, by server."""
        self._updating = trio.Lock()
        self._changed = trio.Event()

    async def run(self) -> None:
        """Keep them running until cancelled. Raises `ServerFailed`: one does not start, or dies too often."""
        async with trio.open_nursery() as nursery:
            for index in range(len(self._plan.config.server.replicas)):
                nursery.start_soon(self._keep, index)

    def known(self) -> list[str]:
        """URLs of those that may be used."""
        return [server.url for server in self._there.values()]

    async def urls(self) -> list[str]:
        """The same, once there is one."""
        while not self._there:
            await self._changed.wait()
        return self.known()

    async def publish(self, version: int) -> Mismatch:
        """Have all of them hold the weights of `version`, and compare them with what the trainer says.

        Returns the largest difference. Raises `RunError` for one that is too large, `UpdateFailed`.
        """
        async with self._updating:
            load = version != self.version and self._plan.config.server.publish == "disk"
            if version != self.version:
                self.version, self._mismatch = version, {}
            async with trio.open_nursery() as nursery:
                for index, server in self._there.items():
                    if index not in self._mismatch:
                        nursery.start_soon(self._bring_if_alive, index, server, load)
        while not self._mismatch:  # all have died: they are compared when they are there again
            await self._changed.wait()
        return max(self._mismatch.values(), key=lambda one: one.mean)

    async def _keep(self, index: int) -> None:
        has_been_there = False
        while True:
            try:
                async with self._serve(index) as server:
                    async with _dead_rather_than_failing(server):
                        await check(server.url, sampling=self._plan.config.rollout.sampling)
                        async with self._updating:
                            await self._bring(index, server, load=self.version > 0)
                            self._there[index], has_been_there = server, True
                            await self._news()
                    await _death(server)
            except ServerFailed as error:
                if self._there.pop(index, None):
                    self._mismatch.pop(index, None)
                    await self._news()
                # by NCCL the trainer would have to meet the new one: the same command starts all of them anew
                by_nccl = self._plan.config.server.publish == "nccl"
                if by_nccl or not (has_been_there or isinstance(error, ServerKilled)):
                    raise
                self._restarts.again(f"server {index}", error)

    def _serve(self, index: int) -> AbstractAsyncContextManager[Server]:
        config = self._plan.config
        return serve(
            self._where.weights(0),
            log_path=self._where.path / f"vllm-{index}.log",
            dtype=config.server.dtype,
            max_model_len=config.rollout.budget.context_tokens,
            extra_args=[*UPDATABLE[config.server.publish], *config.server.arguments],
            place=server_place(config.server, index),
            timeout=config.server.start_seconds,
            say=self._say,
        )

    async def _bring_if_alive(self, index: int, server: Server, load: bool) -> None:
        with suppress(ServerFailed):  # whoever keeps it starts it again
            async with _dead_rather_than_failing(server):
                await self._bring(index, server, load)

    async def _bring(self, index: int, server: Server, load: bool) -> None:
        """Up to date."""
        where, limits, version = self._where, self._plan.config.server, self.version
        if load:
            path = where.weights(version)
            await update_weights(server.url, path, version=version, deadline=limits.update_seconds)
        if not where.probe(version).exists():
            return  # the trainer has not begun
        streams, said = (json.loads(file.read_text()) for file in (where.streams, where.probe(version)))
        stop = self._plan.chat.stop_token_ids
        async with VllmPolicy.connect(server.url, stop_token_ids=stop) as policy:
            self._mismatch[index] = await compare(policy, streams, said, limit=limits.mismatch)

    async def _news(self) -> None:
        await self._tell(self.known())
        self._changed.set()
        self._changed = trio.Event()


def server_place(config: ServerConfig, index: int) -> Place:
    """Where a server runs, the variables of all of them included."""
    place = config.replicas[index]
    return place.model_copy(update={"environment": config.environment | place.environment})


@asynccontextmanager
async def _dead_rather_than_failing(server: Server) -> AsyncGenerator[None]:
    """Turn a `PolicyError` into :class:`ServerFailed` if the server turns out to be dead."""
    try:
        yield
    except PolicyError:
        with trio.move_on_after(DEATH_SECONDS):
            await _death(server)
        raise


async def _death(server: Server) -> None:
    """Wait for it: its process ends, or it answers no more while it lingers. Raises :class:`ServerFailed`."""
    silent = 0
    async with httpx.AsyncClient(timeout=5, trust_env=False) as client:
        while True:
            server.check_alive()
            silent = 0 if await _answers(client, server.url) else silent + 1
            if silent == SILENT:
                words = last_words(server.log)
                raise ServerFailed(f"vLLM answers no more at {server.url}: {words}; log: {server.log.path}")
            await trio.sleep(0.5)


async def _answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/health")).status_code == 200  # 503: its engine is dead
    except httpx.ConnectError:
        return False
    except httpx.HTTPError:
        return True  # it is busy, or about to be found dead
