"""One episode: a task is played in a sandbox, its patch captured, graded in another sandbox, rewarded.

This is the sentence of the design in code. What the policy does ends the rollout in one of five ways and
is graded; what infrastructure does ends it in one of three, has no reward, and is tried again by whoever
asked (:mod:`swe_env.runner`). The patch is captured on every ending at which the sandbox still answers.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agents.chat import Chat
from agents.conversation import Conversation, Segment, TurnRecord
from agents.loop import Budget, End, Tally, run_agent
from agents.policy import Policy, PolicyError
from agents.prompts import Prompts
from agents.tools import ToolLimits
from sandboxes.protocol import Sandbox, SandboxError
from sandboxes.repository import Patch, PatchError, printable
from swe_env.grading import Grade, Grader, Mode, grade
from swe_env.workspace import Workspaces
from tasks.model import Task


class Timings(BaseModel):
    """Where an episode's wall time went [seconds]."""

    model_config = ConfigDict(frozen=True)

    start: float = 0.0
    """Until the sandbox was ready."""
    play: float = 0.0
    """From then until the policy was done; `model`, `tools` and `commands` are parts of it."""
    model: float = 0.0
    """For which it was waited for the policy."""
    tools: float = 0.0
    commands: float = 0.0
    """For which shell commands ran, measured in the sandbox; a part of `tools`."""
    grade: float = 0.0
    total: float = 0.0

    @property
    def environment(self) -> float:
        """What this package took itself while the policy played: all but the model and the commands."""
        return max(0.0, self.play - self.model - self.commands)


class Episode(BaseModel):
    """Everything that is known of one attempt at one task."""

    model_config = ConfigDict(frozen=True)

    id: str
    task_id: str
    group_id: str
    """Episodes of one group are compared with each other (same task, same policy)."""
    policy: str
    end: End
    error: str = ""
    """What infrastructure did, in one line; empty for the policy's own endings."""
    reward: float | None
    """None after an infrastructure failure, which nothing can be learnt from, and where nobody graded."""
    grade: Grade | None = None
    segments: list[Segment] = []
    turns: list[TurnRecord] = []
    branches: list[str] = []
    """Why each segment after the first was begun."""
    messages: list[dict[str, Any]] = []
    """For people. The segments are what is trained on."""
    patch_paths: list[str] = []
    patch_error: str = ""
    """Why no patch could be taken from the sandbox, though the episode ended by the policy's doing."""
    ignored_files: int = 0
    network_attempts: int = 0
    tokenizer_sha256: str = ""
    image_id: str = ""
    """Content digest of the image that the repository came from."""
    timings: Timings = Timings()
    patch: bytes = Field(default=b"", exclude=True, repr=False)
    """Kept beside the episode as bytes, because files are bytes."""

    @property
    def tokens(self) -> int:
        """Tokens in all segments, prompts included."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def action_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return sum(sum(segment.is_action) for segment in self.segments)


async def run_episode(
    task: Task,
    policy: Policy,
    *,
    chat: Chat,
    workspaces: Workspaces,
    prompts: Prompts,
    budget: Budget | None = None,
    tool_limits: ToolLimits | None = None,
    mode: Mode = "strict",
    grader: Grader | None = grade,
    episode_id: str | None = None,
    group_id: str | None = None,
    watch: Callable[[str], None] = lambda _: None,
) -> Episode:
    """Play `task` with `policy` and grade the result. Raises nothing that infrastructure can cause.

    Without a `grader` there is no reward: a demonstration to be learnt from. `watch` is told which stage
    begins. Cancellation is the caller's: it removes both sandboxes.
    """
    budget, tool_limits = budget or Budget(), tool_limits or ToolLimits()
    view, began = task.view(), time.monotonic()
    opening = prompts.opening(workdir=view.workdir, problem_statement=view.problem_statement)
    conversation, tally = Conversation(chat, opening), Tally()
    patch, end, error, patch_error = Patch(data=b""), End.SANDBOX_LOST, "", ""
    ready = played = began
    image_id = ""
    try:
        watch("start")
        async with workspaces.open(view, again=True) as workspace:  # again: for grading
            ready, image_id = time.monotonic(), workspace.image_id
            if view.activate:
                await _activate(workspace.sandbox, view.activate)
            watch("play")
            try:
                end = await run_agent(
                    conversation,
                    policy,
                    workspace.sandbox,
                    prompts=prompts,
                    budget=budget,
                    tool_limits=tool_limits,
                    tally=tally,
                )
            except PolicyError as failure:
                end, error = End.POLICY_ERROR, str(failure)
            except SandboxError:
                raise
            except Exception as bug:  # ours: this episode ends without a reward, the others go on
                end, error = End.INTERNAL_ERROR, _where(bug)
            played = time.monotonic()
            try:
                patch = await workspace.capture()
            except PatchError as failure:
                patch_error = str(failure)
    except SandboxError as failure:
        end, error = End.SANDBOX_LOST, str(failure)
    except Exception as bug:
        end, error = End.INTERNAL_ERROR, _where(bug)
    grading, result = time.monotonic(), None
    if grader is not None and not end.is_infrastructure:
        watch("grade")
        try:
            result = await grader(task, patch.data, workspaces, mode)
        except SandboxError as failure:
            end, error = End.GRADER_ERROR, str(failure)
        except Exception as bug:
            end, error = End.INTERNAL_ERROR, _where(bug)
    ended = time.monotonic()
    turns = conversation.turns
    return Episode(
        id=episode_id or task.id,
        task_id=task.id,
        group_id=group_id or f"{task.id}/{policy.name}",
        policy=policy.name,
        end=end,
        error=error,
        reward=None if result is None else result.reward,
        grade=result,
        segments=conversation.segments,
        turns=turns,
        branches=conversation.branches,
        messages=conversation.messages,
        patch_paths=[printable(path) for path in patch.paths],
        patch_error=patch_error,
        ignored_files=patch.ignored,
        network_attempts=tally.network_attempts,
        tokenizer_sha256=chat.tokenizer.sha256,
        image_id=image_id,
        timings=Timings(
            start=ready - began,
            play=max(0.0, played - ready),
            model=sum(turn.model_seconds for turn in turns),
            tools=sum(turn.tool_seconds for turn in turns),
            commands=tally.command_seconds,
            grade=ended - grading,
            total=ended - began,
        ),
        patch=patch.data,
    )


async def grade_patch(
    task: Task,
    patch: bytes,
    *,
    by: str,
    workspaces: Workspaces,
    mode: Mode = "strict",
    episode_id: str | None = None,
    watch: Callable[[str], None] = lambda _: None,
) -> Episode:
    """An episode that was played elsewhere, by `by`: its patch is known, its grade is to be had.

    Raises nothing that infrastructure can cause.
    """
    began = time.monotonic()
    result, end, error = None, End.SUBMITTED, ""
    watch("grade")
    try:
        result = await grade(task, patch, workspaces, mode)
    except SandboxError as failure:
        end, error = End.GRADER_ERROR, str(failure)
    except Exception as bug:
        end, error = End.INTERNAL_ERROR, _where(bug)
    seconds = time.monotonic() - began
    return Episode(
        id=episode_id or task.id,
        task_id=task.id,
        group_id=f"{task.id}/{by}",
        policy=by,
        end=end,
        error=error,
        reward=None if result is None else result.reward,
        grade=result,
        image_id="" if result is None else result.image_id,
        timings=Timings(grade=seconds, total=seconds),
        patch=patch,
    )


async def _activate(sandbox: Sandbox, command: str) -> None:
    result = await sandbox.run(command, timeout=300)
    if result.exit_code != 0:
        raise SandboxError(f"the image's environment cannot be activated: {result.text.strip()[-200:]}")


def _where(bug: Exception) -> str:
    frame = traceback.extract_tb(bug.__traceback__)[-1]
    return (
        f"{type(bug).__name__}: {bug} ({frame.filename}:{frame.lineno}): a fault of swe-env, please report it"
    )
