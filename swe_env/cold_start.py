"""The policy of version 0: a model as it is, or after supervised training on demonstrations."""

from __future__ import annotations

import secrets
import sys
from contextlib import nullcontext
from pathlib import Path

import trio

from sandboxes.backends import connect
from sandboxes.protocol import Say
from swe_env import sft
from swe_env.demonstrations import can_demonstrate, demonstrate
from swe_env.images import workspaces_for
from swe_env.request import RunRequest
from swe_env.run import run
from swe_env.rundir import RunDir, RunError, RunSpec
from swe_env.sources import digest
from swe_env.train_dir import TrainDir
from swe_env.train_plan import TrainPlan
from swe_env.train_screen import Screen
from swe_env.training import TrainConfig


async def first_weights(plan: TrainPlan, where: TrainDir, screen: Screen, say: Say) -> None:
    """See to it that `weights/step-0` is there. What is done already is not done again.

    Raises `RunError`, and `SandboxError` where demonstrations need sandboxes.
    """
    config, first = plan.config, where.weights(0)
    if first.exists():
        return
    first.parent.mkdir(exist_ok=True)
    model = await make_tiny(config, where.path / "tiny") or Path(config.model)
    if config.cold_start is None:
        first.symlink_to(await trio.Path(model).absolute(), target_is_directory=True)
        return
    await _demonstrations(plan, where, model, screen, say)
    say("cold start: supervised training on the demonstrations")
    asked = sft.SftConfig(
        episodes=where.cold_start,
        model=model,
        out=first,
        seed=config.seed,
        compute_dtype=config.trainer.compute_dtype,
        **config.cold_start.model_dump(include=set(sft.SftConfig.model_fields)),
    )
    await sft.train(asked, screen.learns)


async def _demonstrations(plan: TrainPlan, where: TrainDir, model: Path, screen: Screen, say: Say) -> None:
    """What scripted policies do, none of it graded, into `where.cold_start`."""
    config = plan.config
    assert config.cold_start is not None
    request = RunRequest(
        tasks=config.cold_start.tasks,
        policy="gold",
        out=where.cold_start,
        model=model,
        family=config.family,
        prompts=config.prompts,
        concurrency=config.rollout.concurrency,
        budget=config.rollout.budget,
        sandbox=config.sandbox,
        graded=False,
    )
    tasks = [task for of in plan.demonstrated.values() for task in of]
    if not all(map(can_demonstrate, tasks)):
        await run(request, lambda total: nullcontext(screen.begins("demonstrations", total)), say)
        return
    rundir = RunDir(where.cold_start)
    rundir.begin(
        RunSpec(
            policy="gold",
            tasks_sha256=digest(tasks),
            prompts_sha256=plan.prompts.sha256,
            tokenizer_sha256=plan.chat.tokenizer.sha256,
            budget=config.rollout.budget.model_dump(),
            version="",
        )
    )
    async with (
        connect(config.sandbox, run_id=secrets.token_hex(6), say=say) as engine,
        workspaces_for(tasks, request, engine, say),  # for the base image
    ):
        await demonstrate(
            plan.demonstrated,
            rundir,
            screen.begins("demonstrations", len(tasks)),
            engine=engine,
            chat=plan.chat,
            prompts=plan.prompts,
            budget=config.rollout.budget,
            concurrency=config.rollout.concurrency,
        )


async def make_tiny(config: TrainConfig, made: Path) -> Path | None:
    """Make the tiny model that `config` asks for as the directory `made`; None if it asks for no tiny one.

    What is there already stays as it is. Raises :class:`RunError`.
    """
    shape = config.model.removeprefix("tiny:")
    if shape == config.model:
        return None
    if not (made / "config.json").is_file():
        command = [sys.executable, "-m", "trainer.tiny_model", str(made), "--shape", shape, "--to-learn"]
        command += ["--seed", str(config.seed)]
        done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
        if done.returncode != 0:
            raise RunError(f"no tiny model: {done.stderr.decode(errors='replace').strip().splitlines()[-1]}")
    return made
