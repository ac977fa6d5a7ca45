"""`--policy`: from a word on the command line to a policy for each episode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agents.chat import Chat
from agents.policy import Policy
from agents.scripted import ScriptedPolicy, patch_messages, tool_call
from swe_env.episode import Episode
from swe_env.rundir import RunError
from tasks.model import Task

KINDS = ("vllm", "gold", "noop", "replay:FILE", "predictions:FILE", "predictions:gold")


def scripted(kind: str, task: Task, chat: Chat) -> Policy:
    """The `gold` policy (an expert's demonstration where the task has one, else its patch) or `noop`."""
    if kind == "noop":
        return ScriptedPolicy.speaking("noop", [tool_call("submit")], chat)
    steps: list[dict[str, Any]] = task.metadata.get("demonstration", [])
    messages = [tool_call(step["name"], **step["arguments"]) for step in steps]
    return ScriptedPolicy.speaking("gold", messages or patch_messages(task.gold_patch.encode()), chat)


def doubtful(episode: Episode) -> str | None:
    """What the gold policy's result says against the task itself, in one line."""
    if episode.policy != "gold" or episode.reward != 0 or episode.grade is None:
        return None
    tool_answers = [str(message["content"]) for message in episode.messages if message["role"] == "tool"]
    if not episode.patch and tool_answers:
        lines = tool_answers[0].strip().splitlines()
        return (
            f"{episode.task_id}: its gold patch does not apply: {lines[0] if lines else 'it changes nothing'}"
        )
    return f"{episode.task_id}: its gold patch does not solve it: {episode.grade.reason}"


def load_recording(path: Path, chat: Chat) -> Episode:
    """An episode to replay: an `episode.json`, or the directory it lies in. Raises :class:`RunError`."""
    file = path / "episode.json" if path.is_dir() else path
    try:
        episode = Episode.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        why = str(error).split("\n", 1)[0]
        raise RunError(f"cannot replay {path}: {why}; give RUN/episodes/ID") from None
    if episode.tokenizer_sha256 != chat.tokenizer.sha256:
        raise RunError(f"{path} was recorded with another tokenizer: give its model with --model")
    return episode


def replay(episode: Episode) -> Policy:
    """Says again what `episode` said, token for token."""
    segments = episode.segments
    turns = [segments[turn.segment].token_ids[turn.start : turn.end] for turn in episode.turns]
    return ScriptedPolicy("replay", turns)
