"""Gold episodes without a sandbox: a scripted policy's stream, kept in a run directory as any other's."""

from __future__ import annotations

from pathlib import Path

import trio

from agents.chat import Chat, load_chat
from agents.conversation import Conversation
from agents.loop import End
from agents.prompts import load_prompts
from agents.scripted import ScriptedPolicy, tool_call
from swe_env.episode import Episode
from swe_env.rundir import RunDir, RunSpec

FUNCTIONS = ["add_price", "count_rows", "find_user", "merge_cells"]


def gold_run(directory: Path, model: Path) -> Path:
    """A run of one solved and one missed episode for each of `FUNCTIONS`; returns `directory`."""
    chat = load_chat(model, load_prompts("tiny").tools)
    run = RunDir(directory)
    digests = {"tasks_sha256": "", "prompts_sha256": "", "tokenizer_sha256": chat.tokenizer.sha256}
    run.begin(RunSpec(policy="gold", budget={}, version="", **digests))
    for function in FUNCTIONS:
        for reward in (1.0, 0.0):
            run.save(gold_episode(chat, function, reward))
    return directory


def gold_episode(chat: Chat, function: str, reward: float) -> Episode:
    """Look at the function, correct it (or not) and submit."""
    says = [
        tool_call("bash", command=f"grep -n {function} *.py"),
        tool_call("edit", path="row.py", old=f"return {function}", new="return 1" if reward else "return 0"),
        tool_call("submit"),
    ]
    policy = ScriptedPolicy.speaking("gold", says, chat)
    conversation = Conversation(chat, [{"role": "user", "content": f"Fix the bug in `{function}`."}])

    async def play() -> None:
        for number, _ in enumerate(says):
            completion = await policy.complete(conversation.prompt_ids, max_tokens=500)
            conversation.act(completion)
            if number < len(says) - 1:
                answer = {"role": "tool", "content": f"def {function}(row):", "name": "bash"}
                assert conversation.observe([answer], limit=4096)

    trio.run(play)
    return Episode(
        id=f"{function}-{reward:g}",
        task_id=function,
        group_id=function,
        policy="gold",
        end=End.SUBMITTED,
        reward=reward,
        segments=conversation.segments,
        turns=conversation.turns,
        tokenizer_sha256=chat.tokenizer.sha256,
    )
