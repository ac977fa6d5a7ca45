"""From the configuration of a training to a plan: what can be refused before a start is refused here."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agents.chat import Chat, load_chat
from agents.prompts import Prompts, load_prompts
from swe_env.demonstrations import can_demonstrate
from swe_env.plan import TINY_GLM
from swe_env.rundir import RunError, RunSpec
from swe_env.serve import runs_on_cpu
from swe_env.sources import digest, find_tasks
from swe_env.training import TrainConfig
from tasks.model import Task


@dataclass(frozen=True)
class TrainPlan:
    """What is to be done, checked."""

    config: TrainConfig
    tasks: list[Task]
    held_out: list[Task]
    demonstrated: dict[str, list[Task]]
    """Of the cold start: scripted policy -> the tasks that it plays."""
    prompts: Prompts
    chat: Chat


def make_train_plan(config: TrainConfig) -> TrainPlan:
    """Check a training. Reads files; starts nothing.

    Raises `RunError`, `ServerFailed`, `TaskFileError`, `PromptError` and `TokenizerError`.
    """
    if config.server.publish == "nccl" and runs_on_cpu():
        raise RunError("server.publish is nccl, and this vLLM is the CPU's: install the other, or take disk")
    tasks = find_tasks(config.rollout.tasks)
    held_out = find_tasks(config.evaluation.tasks) if config.evaluation else []
    if len(tasks) < config.rollout.tasks_per_step:
        raise RunError(
            f"rollout.tasks_per_step is {config.rollout.tasks_per_step}, {config.rollout.tasks} has "
            f"{len(tasks)} tasks: give more, or take fewer"
        )
    demonstrated = _demonstrated(config)
    learnt = {task.id for task in [*tasks, *demonstrated["gold"], *demonstrated["noop"]]}
    if seen := sorted(learnt & {task.id for task in held_out}):
        raise RunError(f"task {seen[0]} is trained on and held out: choose other evaluation.tasks")
    prompts = load_prompts(config.prompts)
    shape = config.model.removeprefix("tiny:")
    if shape != config.model and shape not in ("glm", "qwen", "llama"):
        raise RunError(f"model: no tiny model of shape {shape!r}: give tiny:glm, tiny:qwen or tiny:llama")
    if shape == config.model and not (Path(shape) / "config.json").is_file():
        raise RunError(f"model: {shape} has no config.json: give the directory of a model, or tiny:glm")
    model = TINY_GLM if shape == "glm" and shape != config.model else Path(config.model)
    chat = load_chat(model, prompts.tools, config.family, announce=prompts.announce_tools)
    return TrainPlan(config, tasks, held_out, demonstrated, prompts, chat)


def _demonstrated(config: TrainConfig) -> dict[str, list[Task]]:
    if config.cold_start is None:
        return {"gold": [], "noop": []}
    tasks = find_tasks(config.cold_start.tasks)
    if config.cold_start.noop and not all(map(can_demonstrate, tasks)):
        raise RunError("cold_start.noop is for tasks whose repositories are text files: leave it out")
    shuffled = random.Random(config.seed).sample(tasks, len(tasks))
    idle = round(config.cold_start.noop * len(tasks))
    return {"gold": shuffled[idle:], "noop": shuffled[:idle]}


def task_of(group: int, plan: TrainPlan) -> int:
    """Index of the task of one group: the next of an order that is shuffled anew when none is left of it."""
    around, index = divmod(group, len(plan.tasks))
    order = list(range(len(plan.tasks)))
    random.Random(f"{plan.config.seed}/{around}").shuffle(order)
    return order[index]


def run_spec(plan: TrainPlan, tasks: Sequence[Task], *, version: str) -> RunSpec:
    """Of the episodes of these tasks that a training plays; `version` "" where every token has its own."""
    return RunSpec(
        policy="vllm",
        tasks_sha256=digest(tasks),
        prompts_sha256=plan.prompts.sha256,
        tokenizer_sha256=plan.chat.tokenizer.sha256,
        budget=plan.config.rollout.budget.model_dump(),
        version=version,
    )
