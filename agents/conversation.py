"""The conversation as a token stream that only grows.

A :class:`Segment` is what the trainer learns from: ids, and for each whether the policy sampled it,
with what logprob, by which version. The next prompt is always the ids so far plus the rendered new
messages; nothing is decoded and encoded again. Where a template makes that impossible the conversation
branches: a new segment starts from a fresh rendering, in which only newly sampled tokens are actions.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from agents.chat import Chat, Turn
from agents.policy import Completion


class Segment(BaseModel):
    """One token stream. All lists have one entry a token [tokens]."""

    model_config = ConfigDict(frozen=True)

    token_ids: list[int]
    is_action: list[bool]
    """True for tokens the policy sampled; only these are trained on."""
    logprobs: list[float | None]
    """Of action tokens, as the engine sampled them; None elsewhere and for scripted policies."""
    policy_versions: list[int | None]
    """Of action tokens: the weights that sampled them."""

    @model_validator(mode="after")
    def _aligned(self) -> Segment:
        lengths = {len(self.is_action), len(self.logprobs), len(self.policy_versions)}
        if lengths != {len(self.token_ids)}:
            raise ValueError("token_ids, is_action, logprobs and policy_versions differ in length")
        for action, logprob, version in zip(self.is_action, self.logprobs, self.policy_versions, strict=True):
            if action != (version is not None) or (logprob is not None and not action):
                raise ValueError("logprobs and policy versions belong to action tokens, and only to them")
        return self


class TurnRecord(BaseModel):
    """Where one turn lies in the stream, for replay and for people."""

    model_config = ConfigDict(frozen=True)

    segment: int
    start: int
    end: int
    """The turn's action tokens are `segments[segment].token_ids[start:end]`."""
    finish_reason: str
    model_seconds: float = 0.0
    tool_seconds: float = 0.0


class Conversation:
    """Grows by :meth:`act` (the policy spoke) and :meth:`observe` (the world answered), in turn."""

    def __init__(self, chat: Chat, messages: list[dict[str, Any]]) -> None:
        self.chat = chat
        self.messages: list[dict[str, Any]] = list(messages)
        self.turns: list[TurnRecord] = []
        self.branches: list[str] = []
        """Why each segment after the first was begun."""
        self._segments: list[Segment] = []
        self._open(chat.start(messages))

    @property
    def prompt_ids(self) -> list[int]:
        """What the policy is to continue [tokens]."""
        return self._ids

    @property
    def segments(self) -> list[Segment]:
        """All token streams, the growing one included."""
        return [*self._segments, self._current()]

    def act(self, completion: Completion, *, seconds: float = 0.0) -> Turn:
        """Append what was sampled, as it was sampled, and read it."""
        start, ids = len(self._ids), completion.token_ids
        turn = self.chat.parse(self._ids, ids, truncated=completion.finish_reason == "length")
        self._append(ids, completion.logprobs or [None] * len(ids), completion.policy_versions)
        self.turns.append(
            TurnRecord(
                segment=len(self._segments),
                start=start,
                end=start + len(ids),
                finish_reason=completion.finish_reason,
                model_seconds=seconds,
            )
        )
        self.messages.append(_as_message(turn))
        return turn

    def observe(self, messages: list[dict[str, Any]], *, limit: int, seconds: float = 0.0) -> bool:
        """Append what the world answered, cut so that the next prompt has at most `limit` tokens.

        False when there is no room even for an empty answer: the context is full, and nothing was
        appended to the stream.
        """
        record = self.turns[-1]
        self.turns[-1] = record.model_copy(update={"tool_seconds": seconds})
        before, said = self._ids[: record.start], self._ids[record.start :]
        room = limit - len(self._ids) - self._overhead(before, said, messages)
        fitted = shorten(messages, room, self.chat) if room >= 0 else None
        if fitted is None:
            self.messages += messages
            return False
        extended = self.chat.extend(before, said, fitted)
        if extended is None:
            self.messages += fitted
            return self._branch("the template cannot continue what was sampled", limit)
        self.messages += fitted
        tail = extended[len(self._ids) :]
        self._append(tail, [None] * len(tail), None)
        return True

    def _overhead(self, before: list[int], said: list[int], messages: list[dict[str, Any]]) -> int:
        """Tokens that the messages take without their content [tokens]."""
        bare = [{**message, "content": ""} for message in messages]
        extended = self.chat.extend(before, said, bare)
        return 0 if extended is None else len(extended) - len(self._ids)

    def _branch(self, reason: str, limit: int) -> bool:
        fresh = self.chat.start(self.messages)
        if len(fresh) > limit:
            return False
        self.branches.append(reason)
        self._segments.append(self._current())
        self._open(fresh)
        return True

    def _open(self, prompt_ids: list[int]) -> None:
        self._ids: list[int] = []
        self._is_action: list[bool] = []
        self._logprobs: list[float | None] = []
        self._versions: list[int | None] = []
        self._append(prompt_ids, [None] * len(prompt_ids), None)

    def _append(self, ids: list[int], logprobs: list[Any], versions: list[int] | None) -> None:
        self._ids = self._ids + ids
        self._is_action += [versions is not None] * len(ids)
        self._logprobs += logprobs
        self._versions += versions if versions is not None else [None] * len(ids)

    def _current(self) -> Segment:
        return Segment(
            token_ids=list(self._ids),
            is_action=list(self._is_action),
            logprobs=list(self._logprobs),
            policy_versions=list(self._versions),
        )


def shorten(messages: list[dict[str, Any]], room: int, chat: Chat) -> list[dict[str, Any]] | None:
    """Cut the contents of `messages`, longest first, until together they take at most `room` tokens.

    Each cut keeps the beginning and the end and says how many characters are missing. None when even
    the shortest form does not fit.
    """
    contents = [str(message["content"]) for message in messages]
    while sum(sizes := [chat.count(text) for text in contents]) > room:
        longest = max(range(len(contents)), key=lambda index: sizes[index])
        allowed = room - (sum(sizes) - sizes[longest])
        keep = int(len(contents[longest]) * max(allowed - 24, 0) / max(sizes[longest], 1) * 0.95)
        shorter = cut(contents[longest], keep)
        if len(shorter) >= len(contents[longest]):
            if not contents[longest]:
                return None
            shorter = ""
        contents[longest] = shorter
    return [{**message, "content": text} for message, text in zip(messages, contents, strict=True)]


def cut(text: str, keep: int) -> str:
    """At most about `keep` characters of `text`: its beginning and its end, and what is missing between."""
    if len(text) <= keep:
        return text
    head, tail = text[: (keep + 1) // 2], text[len(text) - keep // 2 :]
    return f"{head}\n[... {len(text) - keep} characters cut ...]\n{tail}"


def _as_message(turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {"name": call.name, "arguments": call.arguments, "problem": call.problem, "raw": call.raw}
            for call in turn.calls
        ]
    return message
