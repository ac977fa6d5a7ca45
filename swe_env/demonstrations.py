"""What an expert does, as episodes to learn from: many tasks, one after the other, in a few sandboxes.

Only for scripted policies on repositories that are text files. They are not to be trusted less because a
sandbox is used again: what they do is known before. Nothing is sealed, captured or graded, so there is no
reward; an episode costs a few tool calls, a twentieth of one that counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import trio

from agents.chat import Chat
from agents.conversation import Conversation
from agents.loop import Budget, End, Tally, run_agent
from agents.prompts import Prompts
from agents.tools import ToolLimits
from sandboxes.engine import BASE_IMAGE
from sandboxes.protocol import Engine, Limits, Sandbox
from sandboxes.repository import lay_out
from swe_env.episode import Episode, Timings
from swe_env.policies import scripted
from swe_env.rundir import RunDir, RunError
from swe_env.runner import Watcher
from swe_env.workspace import ENVIRONMENT
from tasks.model import InlineRepo, Task


async def demonstrate(
    tasks: Mapping[str, Sequence[Task]],
    rundir: RunDir,
    watcher: Watcher,
    *,
    engine: Engine,
    chat: Chat,
    prompts: Prompts,
    budget: Budget,
    concurrency: int,
) -> None:
    """Play scripted policies, each on its own `tasks`, as far as `rundir` has no episode of them.

    Raises :class:`RunError` for a demonstration that does not come to its end, which is a fault of its task,
    or does not fit in `budget`; `SandboxError`.
    """
    finished = rundir.finished()
    missing = iter(
        [(kind, task) for kind, of in tasks.items() for task in of if task.id not in finished]
    )  # the workers take from one iterator

    async def play_some() -> None:
        async with engine.sandbox(BASE_IMAGE, workdir=WORKDIR, limits=Limits(), env=ENVIRONMENT) as sandbox:
            for kind, task in missing:
                episode = await _play(kind, task, sandbox, chat=chat, prompts=prompts, budget=budget)
                await trio.to_thread.run_sync(rundir.save, episode)
                watcher.done(episode, will_retry=False)

    async with trio.open_nursery() as nursery:
        for _ in range(concurrency):
            nursery.start_soon(play_some)


WORKDIR = "/testbed"


def can_demonstrate(task: Task) -> bool:
    """Whether its repository is text files and nothing more."""
    view = task.view()
    return isinstance(view.image, InlineRepo) and not view.setup and view.workdir == WORKDIR


async def _play(
    kind: str, task: Task, sandbox: Sandbox, *, chat: Chat, prompts: Prompts, budget: Budget
) -> Episode:
    began, view, policy = time.monotonic(), task.view(), scripted(kind, task, chat)
    if kind != "noop":  # which looks at nothing
        assert isinstance(view.image, InlineRepo)
        await sandbox.run(f"find {WORKDIR} -mindepth 1 -delete", timeout=60, session=False)
        await lay_out(sandbox, WORKDIR, view.image.files)
    opening = prompts.opening(workdir=WORKDIR, problem_statement=view.problem_statement)
    conversation = Conversation(chat, opening)
    end = await run_agent(
        conversation,
        policy,
        sandbox,
        prompts=prompts,
        budget=budget,
        tool_limits=ToolLimits(),
        tally=Tally(),
    )
    answers = [str(message["content"]) for message in conversation.messages if message["role"] == "tool"]
    wrong = [answer for answer in answers if answer.startswith("Error")]
    if end is not End.SUBMITTED or wrong:
        raise RunError(
            f"the demonstration of {task.id} ends with {end}{f' ({wrong[0]})' if wrong else ''}: "
            "raise the budget of episodes, or leave the task out"
        )
    return Episode(
        id=task.id,
        task_id=task.id,
        group_id=f"{task.id}/{policy.name}",
        policy=policy.name,
        end=end,
        reward=None,
        segments=conversation.segments,
        turns=conversation.turns,
        messages=conversation.messages,
        tokenizer_sha256=chat.tokenizer.sha256,
        timings=Timings(total=time.monotonic() - began),
    )
