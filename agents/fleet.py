"""Several vLLM servers that hold the same weights, as one policy. They come and go while it is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Collection, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import trio

from agents.policy import Completion, Policy, PolicyError, Sampling
from agents.vllm import VllmPolicy

NEWS_SECONDS = 5.0
"""For word that a server is gone to arrive, after a request to it failed."""


class Fleet:
    """The servers; made by :meth:`connect`, with none at first."""

    def __init__(
        self, stack: AsyncExitStack, sampling: Sampling, stop_token_ids: Collection[int], deadline: float
    ) -> None:
        self.sampling = sampling
        self._stack = stack
        self._stop_token_ids = stop_token_ids
        self._deadline = deadline
        self._known: dict[str, VllmPolicy] = {}
        self._there: list[str] = []
        self._changed = trio.Event()
        self._seated: Counter[str] = Counter()

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, *, sampling: Sampling, stop_token_ids: Collection[int], deadline: float
    ) -> AsyncGenerator[Fleet]:
        """As `VllmPolicy.connect`: connections close with the block, `deadline` [s] bounds each request."""
        async with AsyncExitStack() as stack:
            yield cls(stack, sampling, stop_token_ids, deadline)

    async def become(self, urls: Sequence[str]) -> None:
        """These servers are there from now on, and no others. Awaits nothing."""
        for url in urls:
            if url not in self._known:
                self._known[url] = await self._stack.enter_async_context(
                    VllmPolicy.connect(
                        url,
                        sampling=self.sampling,
                        stop_token_ids=self._stop_token_ids,
                        deadline=self._deadline,
                    )
                )
        self._there = list(urls)
        self._changed.set()
        self._changed = trio.Event()

    async def some(self) -> None:
        """Wait until there is a server."""
        while not self._there:
            await self._changed.wait()

    @contextmanager
    def seat(self) -> Generator[Policy]:
        """A policy for one episode. It stays with one server, whose cache has the stream, if it can."""
        seat = _Seat(self)
        try:
            yield seat
        finally:
            self._leave(seat)

    def server_of(self, seat: _Seat) -> tuple[str, VllmPolicy]:
        """The one that it has, else the one that the fewest have. Raises `PolicyError`: there is none."""
        if seat.at not in self._there:
            self._leave(seat)
            if not self._there:
                raise PolicyError("no server is there: it is being started again")
            seat.at = min(self._there, key=lambda url: self._seated[url])
            self._seated[seat.at] += 1
        assert seat.at is not None
        return seat.at, self._known[seat.at]

    async def is_gone(self, url: str) -> bool:
        """Whether a server that failed is there no more; waits for the news a little."""
        with trio.move_on_after(NEWS_SECONDS):
            while url in self._there:
                await self._changed.wait()
        return url not in self._there

    def _leave(self, seat: _Seat) -> None:
        if seat.at is not None:
            self._seated[seat.at] -= 1
            seat.at = None


class _Seat:
    """A :class:`~agents.policy.Policy`."""

    def __init__(self, fleet: Fleet) -> None:
        self.at: str | None = None
        self._fleet = fleet

    @property
    def name(self) -> str:
        return "vllm:policy"

    async def complete(self, prompt_ids: list[int], *, max_tokens: int) -> Completion:
        """As `VllmPolicy.complete`; what a server that went away had begun, another begins again.

        Waits for no server: the time in which there is none is not the episode's.
        """
        while True:
            url, policy = self._fleet.server_of(self)
            try:
                return await policy.complete(prompt_ids, max_tokens=max_tokens)
            except PolicyError:
                if not await self._fleet.is_gone(url):
                    raise
