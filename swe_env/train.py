"""`swe-env train`: roll out, learn, publish, again; and look at held-out tasks as it goes.

Three processes: this one, which plays episodes and supervises; the vLLM server; the trainer. What they
share is the run directory (:mod:`swe_env.train_dir`). Episodes are played all the while, as far ahead of the
trainer as `async.max_off_policy_steps` allows (:mod:`swe_env.rollouts`); with 0, step N learns from episodes
that version N played, all of them and nothing else.
"""

from __future__ import annotations

import json
import secrets
import shlex
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio
from pydantic import BaseModel, ValidationError

from agents.policy import Sampling
from agents.vllm import VllmPolicy, check
from agents.weights import update_weights
from sandboxes.backends import connect
from sandboxes.protocol import Say
from swe_env.cold_start import first_weights
from swe_env.episode import Episode, run_episode
from swe_env.grade_once import GradedOnce
from swe_env.images import workspaces_for
from swe_env.probe import Mismatch, compare, sample_streams
from swe_env.request import RunRequest
from swe_env.rollouts import Rollouts
from swe_env.rundir import RunDir, RunError, RunSpec, write_atomic
from swe_env.runner import Job, Watch, run_jobs
from swe_env.serve import UPDATABLE, Server, serve, serve_command
from swe_env.sources import digest
from swe_env.trackers import tracked
from swe_env.train_dir import EvaluationRow, Ready, StepRow, TrainDir
from swe_env.train_plan import TrainPlan, make_train_plan
from swe_env.train_screen import Screen
from swe_env.trainer_process import TrainerProcess, trainer_process
from swe_env.training import TrainConfig
from swe_env.workspace import Workspaces
from tasks.model import Task

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
    server = serve_command(
        where.weights(0),
        port=0,
        dtype=config.server.dtype,
        max_model_len=config.rollout.budget.context_tokens,
        extra_args=[*UPDATABLE[config.server.publish], *config.server.arguments],
    )
    trainer = [sys.executable, "-m", "trainer.rl", str(where.path / "trainer.json")]
    demonstrations = sum(map(len, plan.demonstrated.values()))
    rollout, most = config.rollout, config.asynchronous.max_off_policy_steps
    return [
        f"cold start: {demonstrations} demonstrations" if config.cold_start else "cold start: none",
        f"steps: {config.steps}, each of {rollout.tasks_per_step} x {rollout.group_size} episodes "
        f"of {len(plan.tasks)} tasks, at most {most} versions old",
        f"held out: {len(plan.held_out)} tasks, every {config.evaluation.every} steps"
        if config.evaluation
        else "held out: none",
        f"server: {_shell(config.server.environment, server)}",
        f"trainer, {config.trainer.ranks} ranks: {_shell(config.trainer.environment, trainer)}",
        f"episodes: {rollout.concurrency} at once, in this process, sandboxes by {config.sandbox}",
    ]


def _shell(environment: dict[str, str], command: list[str]) -> str:
    return shlex.join([*(f"{name}={value}" for name, value in environment.items()), *command])


@asynccontextmanager
async def _processes(plan: TrainPlan, where: TrainDir, screen: Screen, say: Say) -> AsyncGenerator[Loop]:
    config = plan.config
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            serve(
                where.weights(0),
                log_path=where.path / "vllm.log",
                dtype=config.server.dtype,
                max_model_len=config.rollout.budget.context_tokens,
                extra_args=[*UPDATABLE[config.server.publish], *config.server.arguments],
                environment=config.server.environment,
                timeout=config.server.start_seconds,
                say=say,
            )
        )
        await check(server.url, sampling=config.rollout.sampling)
        engine = await stack.enter_async_context(
            connect(config.sandbox, run_id=secrets.token_hex(6), say=say)
        )
        request = RunRequest(tasks="", policy="vllm", out=where.path)
        workspaces = await stack.enter_async_context(
            workspaces_for([*plan.tasks, *plan.held_out], request, engine, say)
        )

        async def connected(sampling: Sampling) -> VllmPolicy:
            return await stack.enter_async_context(
                VllmPolicy.connect(server.url, sampling=sampling, stop_token_ids=plan.chat.stop_token_ids)
            )

        policy = await connected(config.rollout.sampling)
        held_out = await connected(config.evaluation.sampling) if config.evaluation else policy
        await _choose_streams(plan, where, policy)
        asked = where.path / "trainer.json"
        told = {"config": config.model_dump(mode="json"), "directory": str(where.path)}
        if config.server.publish == "nccl":
            told["server"] = server.url
        write_atomic(asked, json.dumps(told).encode())
        process = await stack.enter_async_context(
            trainer_process(
                "trainer.rl",
                asked,
                errors=where.path / "trainer.log",
                environment=config.trainer.environment,
            )
        )
        rollouts = Rollouts(plan, where, screen, policy, workspaces)
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(_watch, server)
        nursery.start_soon(rollouts.run)
        yield Loop(plan, where, screen, server, process, policy, held_out, workspaces, rollouts)
        nursery.cancel_scope.cancel()


async def _choose_streams(plan: TrainPlan, where: TrainDir, policy: VllmPolicy) -> None:
    if where.streams.exists():
        return
    where.streams.parent.mkdir(exist_ok=True)
    views = [task.view() for task in plan.tasks]
    prompts = [
        plan.chat.start(plan.prompts.opening(workdir=view.workdir, problem_statement=view.problem_statement))
        for view in views[:8]
    ]
    write_atomic(where.streams, json.dumps(await sample_streams(policy, prompts)).encode())


async def _watch(server: Server) -> None:
    while True:
        server.check_alive()
        await trio.sleep(0.5)


@dataclass
class Loop:
    """The steps of a training whose processes are up."""

    plan: TrainPlan
    where: TrainDir
    screen: Screen
    server: Server
    trainer: TrainerProcess
    policy: VllmPolicy
    held_out: VllmPolicy
    workspaces: Workspaces
    rollouts: Rollouts
    served: int = 0
    """Version of the weights in the server."""
    mismatch: Mismatch | None = None
    """Of those weights; None until they are compared."""
    publish_seconds: float = 0.0

    async def run(self) -> None:
        """All steps that are left."""
        config, rows = self.plan.config, self.where.rows()
        done = {row.step for row in rows if isinstance(row, StepRow)}
        evaluated = {row.step: row.solved for row in rows if isinstance(row, EvaluationRow)}
        first = (await self._told(Ready)).ready
        await self._publish(first)
        for step in range(first, config.steps + 1):
            if config.is_evaluated(step) and step not in evaluated:
                await self._publish(step)
                evaluated[step] = await self._evaluate(step)
            if step == config.steps:
                break
            if not self.where.batch(step).exists():
                await self._publish(step)
                await self.rollouts.batch(step)
            row = await self._told(StepRow)
            mismatch = await self._publish(step + 1)
            best = max(evaluated, key=evaluated.__getitem__, default=0)
            await trio.to_thread.run_sync(partial(self.where.remove_weights, but={0, best, step, step + 1}))
            seconds = self.where.read_batch(step).seconds
            measured = {"rollout_seconds": seconds, "publish_seconds": self.publish_seconds}
            if mismatch is not None:
                measured |= {"mismatch": mismatch.mean, "mismatch_max": mismatch.largest}
            row = row.model_copy(update=measured)
            if step not in done:
                self.where.add(row)
            self.screen.row(row, config.steps)
        while await self.trainer.line() is not None:  # its last checkpoint
            pass

    async def _told(self, what: type[Line]) -> Line:
        """The trainer's next line of that kind."""
        while (line := await self.trainer.line()) is not None:
            with suppress(ValidationError):  # what a library prints is not for us
                return what.model_validate_json(line)
        raise RunError(f"the trainer ended early: see {self.where.path / 'trainer.log'}")

    async def _publish(self, version: int) -> Mismatch | None:
        """See to it that the server has the weights of `version`, and that trainer and server agree.

        None where nobody is to play with them: by NCCL, the trainer does not send those.
        """
        began, where, server = trio.current_time(), self.where, self.plan.config.server
        if server.publish == "nccl" and where.batch(version).exists():
            return None
        if version != self.served:
            self.mismatch = None
            if server.publish == "disk":  # by NCCL the trainer has sent them
                await update_weights(
                    self.server.url, where.weights(version), version=version, deadline=server.update_seconds
                )
            self.served = version
        if self.mismatch is None:
            streams, said = (json.loads(file.read_text()) for file in (where.streams, where.probe(version)))
            self.mismatch = await compare(self.policy, streams, said, limit=server.mismatch)
            self.publish_seconds = trio.current_time() - began
        self.rollouts.serves(version)
        return self.mismatch

    async def _evaluate(self, version: int) -> float:
        began, evaluation = trio.current_time(), self.plan.config.evaluation
        assert evaluation is not None
        episodes = await self._play(evaluation.n, self.where.evaluation(version), version)
        rewards = [episode.reward for episode in episodes if episode.reward is not None]
        row = EvaluationRow(
            step=version,
            solved=sum(rewards) / len(rewards),
            episodes=len(episodes),
            invalid=len(episodes) - len(rewards),
            seconds=trio.current_time() - began,
        )
        self.where.add(row)
        self.screen.row(row, self.plan.config.steps)
        return row.solved

    async def _play(self, n: int, rundir: RunDir, version: int) -> list[Episode]:
        """`n` episodes a held-out task; those in `rundir` already are not played again.

        Raises `RunError` if infrastructure ended all of them.
        """
        plan, grader, tasks = self.plan, GradedOnce(), self.plan.held_out
        rundir.begin(
            RunSpec(
                policy="vllm",
                tasks_sha256=digest(tasks),
                prompts_sha256=plan.prompts.sha256,
                tokenizer_sha256=plan.chat.tokenizer.sha256,
                budget=plan.config.rollout.budget.model_dump(),
                version=str(version),
            )
        )
        finished = rundir.finished()

        async def attempt(name: str, task: Task, watch: Watch) -> Episode:
            return await run_episode(
                task,
                self.held_out,
                chat=plan.chat,
                workspaces=self.workspaces,
                prompts=plan.prompts,
                budget=plan.config.rollout.budget,
                grader=grader,
                episode_id=name,
                watch=watch,
            )

        wanted = [(f"{task.id}--{number}", task) for task in tasks for number in range(n)]
        jobs = [Job(name, partial(attempt, name, task)) for name, task in wanted if name not in finished]
        watcher = self.screen.begins("evaluation", len(jobs))
        rollout = plan.config.rollout
        await run_jobs(jobs, rundir, watcher, concurrency=rollout.concurrency, retries=rollout.retries)
        episodes = await trio.to_thread.run_sync(rundir.episodes)
        if all(episode.reward is None for episode in episodes):
            raise RunError(
                f"all {len(episodes)} episodes of this evaluation were lost, the first by: "
                f"{episodes[0].error}; the same command tries again"
            )
        return episodes
