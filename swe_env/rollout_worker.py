"""`python -m swe_env.rollout_worker CONFIG.json`: a process that plays what it is told to.

:mod:`swe_env.workers` starts as many as `rollout.workers` says. What it is told comes on standard input, what
comes of it goes to standard output, a line of JSON each. An episode is on disk before it is spoken of, so a
worker may be killed at any moment: what it had not finished is given to another.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import trio
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from agents.fleet import Fleet
from agents.policy import Sampling
from sandboxes.backends import connect
from swe_env.episode import Episode, run_episode
from swe_env.grade_once import GradedOnce
from swe_env.images import workspaces_for
from swe_env.request import RunRequest
from swe_env.rundir import RunDir
from swe_env.runner import Job, Watch, run_jobs
from swe_env.terminal import reason
from swe_env.train_plan import TrainPlan, make_train_plan
from swe_env.training import TrainConfig
from swe_env.vllm_launcher import die_with_parent
from swe_env.workspace import Workspaces

BEAT = 2.0
"""Between two signs of life [s]."""


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Asked(_Line):
    """What the process begins with."""

    config: TrainConfig
    directory: Path


class Order(_Line):
    """Episodes of one task to be played, all at once."""

    kind: Literal["order"] = "order"
    number: int
    directory: Path
    """Run directory where they are kept; it has been begun."""
    task: int
    """Index among the plan's tasks, or those held out."""
    names: list[str]
    group: str
    """Id of the group that they are; empty for an evaluation, of a task that is held out."""


class Servers(_Line):
    """Which servers are there from now on."""

    kind: Literal["servers"] = "servers"
    urls: list[str]


class Alive(_Line):
    """A sign of life."""

    kind: Literal["alive"] = "alive"


class Said(_Line):
    """For the person."""

    kind: Literal["said"] = "said"
    text: str


class Stage(_Line):
    """An episode of an order enters a stage."""

    kind: Literal["stage"] = "stage"
    order: int
    job: str
    stage: str


class Ended(_Line):
    """An attempt at an episode of an order ended. Tokens and messages are on disk only."""

    kind: Literal["ended"] = "ended"
    order: int
    episode: Episode
    will_retry: bool


class Played(_Line):
    """All episodes of an order are on disk."""

    kind: Literal["played"] = "played"
    order: int


Told = Annotated[Order | Servers, Field(discriminator="kind")]
Answer = Annotated[Alive | Said | Stage | Ended | Played, Field(discriminator="kind")]
TOLD: TypeAdapter[Order | Servers] = TypeAdapter(Told)
ANSWER: TypeAdapter[Alive | Said | Stage | Ended | Played] = TypeAdapter(Answer)

SUMMARY = {"id", "task_id", "group_id", "policy", "end", "error", "reward", "timings"}
"""What is told of an episode that ended."""


class Worker:
    """Carries out orders."""

    def __init__(
        self, plan: TrainPlan, workspaces: Workspaces, sampled: Fleet, held_out: Fleet, out: Answers
    ) -> None:
        self._plan = plan
        self._workspaces = workspaces
        self._fleets = {False: sampled, True: held_out}
        self._out = out

    async def told(self, urls: list[str]) -> None:
        for fleet in self._fleets.values():
            await fleet.become(urls)

    async def play(self, order: Order) -> None:
        """Play an order whole. Raises `RunError` where the disk does not take it."""
        plan, grader, fleet = self._plan, GradedOnce(), self._fleets[not order.group]
        task = (plan.tasks if order.group else plan.held_out)[order.task]
        rollout = plan.config.rollout

        async def attempt(name: str, watch: Watch) -> Episode:
            await fleet.some()  # an episode begins when it can go on
            with fleet.seat() as policy:
                return await run_episode(
                    task,
                    policy,
                    chat=plan.chat,
                    workspaces=self._workspaces,
                    prompts=plan.prompts,
                    budget=rollout.budget,
                    grader=grader,
                    episode_id=name,
                    group_id=order.group or None,
                    watch=watch,
                )

        jobs = [Job(name, partial(attempt, name)) for name in order.names]
        watcher = _Reporter(order.number, self._out)
        rundir = RunDir(order.directory)
        await run_jobs(jobs, rundir, watcher, concurrency=len(jobs), retries=rollout.retries)
        self._out.say(Played(order=order.number))


class Answers:
    """Lines for standard output, in order; who says them does not wait for whoever reads."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[BaseModel](float("inf"))

    def say(self, line: BaseModel) -> None:
        self._send.send_nowait(line)

    async def write(self, out: trio.abc.SendStream) -> None:
        """Until cancelled."""
        async for line in self._receive:
            await out.send_all(line.model_dump_json().encode() + b"\n")


class _Reporter:
    """A :class:`~swe_env.runner.Watcher`."""

    def __init__(self, order: int, out: Answers) -> None:
        self._order = order
        self._out = out

    def stage(self, job_id: str, stage: str) -> None:
        self._out.say(Stage(order=self._order, job=job_id, stage=stage))

    def done(self, episode: Episode, *, will_retry: bool) -> None:
        summary = Episode.model_validate(episode.model_dump(include=SUMMARY))
        self._out.say(Ended(order=self._order, episode=summary, will_retry=will_retry))


async def work(asked: Asked, stdin: trio.abc.ReceiveStream, stdout: trio.abc.SendStream) -> None:
    """Carry out orders until there are no more to come. Raises what :func:`make_train_plan` does, and
    `SandboxError`, `RunError`.
    """
    config, out = asked.config, Answers()
    # whoever starts this has seen to the cold start
    plan = make_train_plan(config.model_copy(update={"cold_start": None}))
    evaluation = config.evaluation
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(out.write, stdout)
        nursery.start_soon(_beat, out)
        engine = await stack.enter_async_context(
            connect(config.sandbox, run_id=secrets.token_hex(6), say=lambda text: out.say(Said(text=text)))
        )
        request = RunRequest(tasks="", policy="vllm", out=asked.directory)
        workspaces = await stack.enter_async_context(
            workspaces_for(
                [*plan.tasks, *plan.held_out], request, engine, lambda text: out.say(Said(text=text))
            )
        )

        async def fleet(sampling: Sampling) -> Fleet:
            # a server that hangs is no slow policy: it is given up before the episode's clock is
            deadline = min(900, config.rollout.budget.seconds / 2)
            stop = plan.chat.stop_token_ids
            return await stack.enter_async_context(
                Fleet.connect(sampling=sampling, stop_token_ids=stop, deadline=deadline)
            )

        sampled, held_out = [
            await fleet(of.sampling) for of in (config.rollout, evaluation or config.rollout)
        ]
        worker = Worker(plan, workspaces, sampled, held_out, out)
        orders = await stack.enter_async_context(trio.open_nursery())
        async for told in _lines(stdin):
            match told:
                case Servers():
                    await worker.told(told.urls)
                case Order():
                    orders.start_soon(worker.play, told)
        nursery.cancel_scope.cancel()


async def _beat(out: Answers) -> None:
    while True:
        out.say(Alive())
        await trio.sleep(BEAT)


async def _lines(stdin: trio.abc.ReceiveStream) -> AsyncGenerator[Order | Servers]:
    read = b""
    async for part in stdin:
        *lines, read = (read + part).split(b"\n")
        for line in lines:
            yield TOLD.validate_json(line)


async def _main(asked: Asked, stdin: int, stdout: int) -> None:
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for _ in signals:
                    nursery.cancel_scope.cancel()
                    return

        nursery.start_soon(watch)
        async with trio.lowlevel.FdStream(stdin) as told, trio.lowlevel.FdStream(stdout) as answers:
            await work(asked, told, answers)
        nursery.cancel_scope.cancel()


def main() -> None:
    die_with_parent()
    asked = Asked.model_validate_json(Path(sys.argv[1]).read_bytes())
    stdin, stdout = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # what a library prints is not an answer
    try:
        trio.run(_main, asked, stdin, stdout)
    except BaseException as error:
        sys.exit(" ".join(reason(error).split()))


if __name__ == "__main__":
    main()
