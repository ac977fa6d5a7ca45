"""`swe-env train`: roll out, learn, publish, again; and look at held-out tasks as it goes.

This process supervises the others: vLLM servers (:mod:`swe_env.servers`), workers that play
(:mod:`swe_env.workers`), the trainer. Each of them may be killed, and is started again; what they share is
the run directory (:mod:`swe_env.train_dir`). Episodes are played all the while, as far ahead of the trainer
as `async.max_off_policy_steps` allows (:mod:`swe_env.rollouts`); with 0, step N learns from episodes that
version N played, all of them and nothing else.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio
from pydantic import BaseModel, ValidationError

from agents.vllm import VllmPolicy
from sandboxes.protocol import Say
from swe_env.child import Child, Killed, child, launched
from swe_env.cold_start import first_weights
from swe_env.flow import Flow, watch
from swe_env.probe import Mismatch, sample_streams
from swe_env.restarts import Restarts
from swe_env.rollouts import Rollouts
from swe_env.rundir import RunDir, RunError, write_atomic
from swe_env.serve import UPDATABLE, serve_command
from swe_env.servers import Replicas, server_place
from swe_env.trackers import tracked
from swe_env.train_dir import EvaluationRow, Ready, StepRow, TrainDir
from swe_env.train_plan import TrainPlan, make_train_plan, run_spec
from swe_env.train_screen import Screen
from swe_env.training import Place, TrainConfig
from swe_env.workers import Workers

Line = TypeVar("Line", bound=BaseModel)


async def train(config: TrainConfig, out: Path, screen: Screen, say: Say) -> TrainDir:
    """Train; what is done already is not done again. `out` is absolute. Returns the directory, complete.

    Cancelling it ends all processes and keeps what is finished. Raises, before anything starts, what
    :func:`make_train_plan` does; later `RunError` (the trainer's reason among them), `PolicyError`,
    `ServerFailed`, `SandboxError`.
    """
    plan = await trio.to_thread.run_sync(make_train_plan, config, abandon_on_cancel=True)
    where = TrainDir(out)
    with RunDir(where.path).locked():
        where.begin(config)
        async with tracked(screen, config, where) as shown:
            await first_weights(plan, where, shown, say)
            async with _processes(plan, where, shown, say) as loop:
                await loop.run()
    return where


def describe(config: TrainConfig, out: Path) -> list[str]:
    """What :func:`train` would do and start, a line each. Reads files; raises what `make_train_plan` does."""
    plan, where = make_train_plan(config), TrainDir(out)
    servers = [
        (
            place := server_place(config.server, index),
            serve_command(
                where.weights(0),
                host=place.host,
                port=0,
                dtype=config.server.dtype,
                max_model_len=config.rollout.budget.context_tokens,
                extra_args=[*UPDATABLE[config.server.publish], *config.server.arguments],
            ),
        )
        for index in range(len(config.server.replicas))
    ]
    trainer = [sys.executable, "-m", "trainer.rl", str(where.path / "trainer.json")]
    worker = [sys.executable, "-m", "swe_env.rollout_worker", str(where.path / "worker.json")]
    demonstrations = sum(map(len, plan.demonstrated.values()))
    rollout, most = config.rollout, config.asynchronous.max_off_policy_steps
    return [
        f"cold start: {demonstrations} demonstrations" if config.cold_start else "cold start: none",
        f"steps: {config.steps}, each of {rollout.tasks_per_step} x {rollout.group_size} episodes "
        f"of {len(plan.tasks)} tasks, at most {most} versions old",
        f"held out: {len(plan.held_out)} tasks, every {config.evaluation.every} steps"
        if config.evaluation
        else "held out: none",
        *(f"server {index}: {_shell(place, command)}" for index, (place, command) in enumerate(servers)),
        *(f"worker {index}: {_shell(place, worker)}" for index, place in enumerate(rollout.workers)),
        f"trainer, {config.trainer.ranks} ranks: {_shell(config.trainer.place, trainer)}",
        f"episodes: {rollout.concurrency} at once, sandboxes by {config.sandbox}",
    ]


def _shell(place: Place, command: list[str]) -> str:
    command, _ = launched(command, place)
    own = [] if place.launcher else [f"{name}={value}" for name, value in place.environment.items()]
    return shlex.join([*own, *command])


@asynccontextmanager
async def _processes(plan: TrainPlan, where: TrainDir, screen: Screen, say: Say) -> AsyncGenerator[Loop]:
    """All but the trainer, which the loop starts."""
    restarts = Restarts(say)
    workers = Workers(plan.config, where, restarts, say)
    servers = Replicas(plan, where, restarts, say, workers.become)
    rollout = plan.config.rollout
    flow = Flow(least=rollout.group_size, most=rollout.concurrency)
    rollouts = Rollouts(plan, where, screen, workers, flow)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(workers.run)
        nursery.start_soon(servers.run)
        await _choose_streams(plan, where, (await servers.urls())[0])
        nursery.start_soon(rollouts.run)
        nursery.start_soon(watch, flow, servers.known, rollouts.in_flight)
        yield Loop(plan, where, screen, servers, workers, rollouts, restarts)
        nursery.cancel_scope.cancel()


async def _choose_streams(plan: TrainPlan, where: TrainDir, url: str) -> None:
    if where.streams.exists():
        return
    where.streams.parent.mkdir(exist_ok=True)
    views = [task.view() for task in plan.tasks]
    prompts = [
        plan.chat.start(plan.prompts.opening(workdir=view.workdir, problem_statement=view.problem_statement))
        for view in views[:8]
    ]
    sampling, stop = plan.config.rollout.sampling, plan.chat.stop_token_ids
    async with VllmPolicy.connect(url, sampling=sampling, stop_token_ids=stop) as policy:
        write_atomic(where.streams, json.dumps(await sample_streams(policy, prompts)).encode())


class Loop:
    """The steps of a training whose servers and workers are up."""

    def __init__(
        self,
        plan: TrainPlan,
        where: TrainDir,
        screen: Screen,
        servers: Replicas,
        workers: Workers,
        rollouts: Rollouts,
        restarts: Restarts,
    ) -> None:
        self._plan = plan
        self._where = where
        self._screen = screen
        self._servers = servers
        self._workers = workers
        self._rollouts = rollouts
        self._restarts = restarts
        self._publish_seconds = 0.0

    async def run(self) -> None:
        """All steps that are left. A trainer that is killed goes on from its newest checkpoint."""
        config, where = self._plan.config, self._where
        asked = where.path / "trainer.json"
        told = {"config": config.model_dump(mode="json"), "directory": str(where.path)}
        if config.server.publish == "nccl":
            told["server"] = (await self._servers.urls())[0]
        write_atomic(asked, json.dumps(told).encode())
        while True:
            try:
                async with child(
                    "trainer.rl",
                    asked,
                    errors=where.path / "trainer.log",
                    place=config.trainer.place,
                ) as trainer:
                    return await self._steps(trainer)
            except Killed as error:
                if config.server.publish == "nccl":
                    raise  # the server would have to meet the new one: the same command starts both anew
                self._restarts.again("trainer", error)

    async def _steps(self, trainer: Child) -> None:
        config, where, rows = self._plan.config, self._where, self._where.rows()
        evaluated = {row.step: row.solved for row in rows if isinstance(row, EvaluationRow)}
        seen = {row.step for row in rows if isinstance(row, StepRow)}
        ready = await self._told(trainer, Ready)
        if ready.last is not None and ready.last.step not in seen:
            await self._finish(ready.last, evaluated)
        for step in range(ready.ready, config.steps + 1):
            if config.is_evaluated(step) and step not in evaluated:
                await self._publish(step)
                evaluated[step] = await self._evaluate(step)
            if step == config.steps:
                break
            if not where.batch(step).exists():
                await self._publish(step)
                await self._rollouts.batch(step)
            row = await self._told(trainer, StepRow)
            if step in seen:
                self._screen.row(row, config.steps)
            else:
                await self._finish(row, evaluated)
        while await trainer.line() is not None:  # its last checkpoint
            pass

    async def _finish(self, row: StepRow, evaluated: Mapping[int, float]) -> None:
        """Publish what a step made, and write its row down."""
        where, step, batch = self._where, row.step, self._where.read_batch(row.step)
        mismatch = await self._publish(step + 1)
        best = max(evaluated, key=evaluated.__getitem__, default=0)
        needed = {0, best, self._servers.version}
        await trio.to_thread.run_sync(partial(where.remove_weights, below=step, but=needed))
        measured = {
            "rollout_seconds": batch.seconds,
            "at_once": batch.at_once,
            "mismatch": mismatch.mean,
            "mismatch_max": mismatch.largest,
            "publish_seconds": self._publish_seconds,
        }
        row = row.model_copy(update=measured)
        where.add(row)
        self._screen.row(row, self._plan.config.steps)
        self._restarts.step_is_done()

    async def _told(self, trainer: Child, what: type[Line]) -> Line:
        """The trainer's next line of that kind."""
        while (line := await trainer.line()) is not None:
            with suppress(ValidationError):  # what a library prints is not for us
                return what.model_validate_json(line)
        raise RunError(f"the trainer ended early: see {self._where.path / 'trainer.log'}")

    async def _publish(self, version: int) -> Mismatch:
        """See to it that the servers have the weights of `version`, and that they agree with the trainer."""
        began = trio.current_time()
        mismatch = await self._servers.publish(version)
        if self._rollouts.version != version:
            self._publish_seconds = trio.current_time() - began
            self._rollouts.serves(version)
        return mismatch

    async def _evaluate(self, version: int) -> float:
        """Mean reward of `version` over the held-out tasks. Raises `RunError` if none has a verdict."""
        began, evaluation, tasks = trio.current_time(), self._plan.config.evaluation, self._plan.held_out
        assert evaluation is not None
        rundir = self._where.evaluation(version)
        rundir.begin(run_spec(self._plan, tasks, version=str(version)))
        finished = await trio.to_thread.run_sync(rundir.finished)
        wanted = [(index, f"{task.id}--{n}") for index, task in enumerate(tasks) for n in range(evaluation.n)]
        missing = [(index, name) for index, name in wanted if name not in finished]
        watcher = self._screen.begins("evaluation", len(missing))
        places = trio.CapacityLimiter(self._plan.config.rollout.concurrency)

        async def play(index: int, name: str) -> None:
            async with places:
                await self._workers.play(rundir, [name], watcher, task=index)

        async with trio.open_nursery() as nursery:
            for index, name in missing:
                nursery.start_soon(play, index, name)
        episodes = await trio.to_thread.run_sync(rundir.episodes)
        rewards = [episode.reward for episode in episodes if episode.reward is not None]
        if not rewards:
            raise RunError(
                f"all {len(episodes)} episodes of this evaluation were lost, the first by: "
                f"{episodes[0].error}; the same command tries again"
            )
        row = EvaluationRow(
            step=version,
            solved=sum(rewards) / len(rewards),
            episodes=len(episodes),
            invalid=len(episodes) - len(rewards),
            seconds=trio.current_time() - began,
        )
        self._where.add(row)
        self._screen.row(row, self._plan.config.steps)
        return row.solved
