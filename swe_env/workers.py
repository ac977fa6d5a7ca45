"""The processes that play, as the one sees them that tells them what: each is started again when killed.

A worker that says nothing for `SILENCE` is killed. What it had not finished is given to the next there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import trio
from pydantic import BaseModel

from sandboxes.protocol import Say
from swe_env.child import Child, Killed, child
from swe_env.restarts import Restarts
from swe_env.rollout_worker import ANSWER, Alive, Asked, Ended, Order, Played, Said, Servers, Stage
from swe_env.rundir import RunDir, RunError, write_atomic
from swe_env.runner import Watcher
from swe_env.train_dir import TrainDir
from swe_env.training import Place, TrainConfig

SILENCE = 60
"""Seconds, counted while this process runs: one that is stopped itself judges nobody."""
PATIENCE = 5
"""Workers that may die over one order."""


class Workers:
    """All of them."""

    def __init__(self, config: TrainConfig, where: TrainDir, restarts: Restarts, say: Say) -> None:
        self._places = config.rollout.workers
        self._asked = where.path / "worker.json"
        self._restarts = restarts
        self._say = say
        self._said: set[str] = set()
        self._urls: list[str] = []
        self._alive: dict[int, _Worker] = {}
        self._changed = trio.Event()
        self._next = 0
        write_atomic(self._asked, Asked(config=config, directory=where.path).model_dump_json().encode())

    async def run(self) -> None:
        """Keep them running until cancelled. Raises `RunError`: one does not start, or dies too often."""
        async with trio.open_nursery() as nursery:
            for index, place in enumerate(self._places):
                nursery.start_soon(self._keep, index, place)

    @property
    def alive(self) -> int:
        """How many can be told to play."""
        return len(self._alive)

    async def become(self, urls: Sequence[str]) -> None:
        """Tell them that these servers are there from now on."""
        self._urls = list(urls)
        async with trio.open_nursery() as nursery:
            for worker in self._alive.values():
                nursery.start_soon(worker.tell, Servers(urls=self._urls))

    async def play(
        self, rundir: RunDir, names: Sequence[str], watcher: Watcher, *, task: int, group: str = ""
    ) -> None:
        """Have the episodes of these names played into `rundir`, of the task at this index: one to be learnt
        from if they are a `group`, else one that is held out.

        Raises `RunError` when one worker after the other dies over them.
        """
        for _ in range(PATIENCE):
            self._next += 1
            order = Order(number=self._next, directory=rundir.path, task=task, names=list(names), group=group)
            if await (await self._idlest()).play(order, watcher):
                return
            finished = await trio.to_thread.run_sync(rundir.finished, names)
            names = [name for name in names if name not in finished]
            if not names:
                return
        raise RunError(f"{PATIENCE} workers died while they played {rundir.path}: see {self._log(0)}")

    async def _idlest(self) -> _Worker:
        while not self._alive:
            await self._changed.wait()
        return min(self._alive.values(), key=lambda worker: worker.busy)

    async def _keep(self, index: int, place: Place) -> None:
        while True:
            try:
                async with child(
                    "swe_env.rollout_worker",
                    self._asked,
                    errors=self._log(index),
                    smaller="lower rollout.concurrency",
                    place=place,
                ) as process:
                    await self._listen(index, process)
            except Killed as error:
                self._restarts.again(f"worker {index}", error)

    def _log(self, index: int) -> Path:
        return self._asked.with_name(f"worker-{index}.log")

    async def _listen(self, index: int, process: Child) -> None:
        """Until it dies: raises what :meth:`Child.line` does."""
        worker, silent = _Worker(process), 0
        try:
            while True:
                line = None
                with trio.move_on_after(1) as waiting:
                    line = await process.line()
                if waiting.cancelled_caught:
                    silent += index in self._alive  # reading its tasks it says nothing
                    if silent == SILENCE:
                        process.kill()
                    continue
                if line is None:
                    raise RunError(f"a worker ended early: see {self._log(index)}")
                silent = 0
                match ANSWER.validate_json(line):
                    case Alive() if index not in self._alive:
                        self._alive[index] = worker
                        await worker.tell(Servers(urls=self._urls))
                        self._changed.set()
                        self._changed = trio.Event()
                    case Said(text=text) if text not in self._said:
                        self._said.add(text)
                        self._say(text)
                    case Stage() | Ended() | Played() as news:
                        worker.hears(news)
                    case _:
                        pass
        finally:
            self._alive.pop(index, None)
            worker.is_dead()


class _Order:
    """One that was given."""

    def __init__(self, order: Order, watcher: Watcher) -> None:
        self.left = len(order.names)
        self.watcher = watcher
        self.over = trio.Event()
        self.is_played = False


class _Worker:
    """One that is alive, and what it has to do."""

    def __init__(self, process: Child) -> None:
        self._process = process
        self._telling = trio.Lock()
        self._orders: dict[int, _Order] = {}

    @property
    def busy(self) -> int:
        """Episodes that it has to play."""
        return sum(order.left for order in self._orders.values())

    async def tell(self, what: BaseModel) -> None:
        try:
            async with self._telling:
                await self._process.tell(what)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # it has died, which whoever listens to it finds out

    async def play(self, order: Order, watcher: Watcher) -> bool:
        """Whether it played the order whole, and did not die over it."""
        given = self._orders[order.number] = _Order(order, watcher)
        try:
            await self.tell(order)
            await given.over.wait()
        finally:
            del self._orders[order.number]
        return given.is_played

    def hears(self, news: Stage | Ended | Played) -> None:
        order = self._orders.get(news.order)
        if order is None:
            return
        match news:
            case Stage():
                order.watcher.stage(news.job, news.stage)
            case Ended():
                order.left -= not news.will_retry
                order.watcher.done(news.episode, will_retry=news.will_retry)
            case Played():
                order.is_played = True
                order.over.set()

    def is_dead(self) -> None:
        for order in self._orders.values():
            order.over.set()
