"""Policies that say what they were told to: an expert's demonstration, nothing at all, a recording.

They go through the same token stream and the same tools as a model, so a scripted episode tests the
whole machine, and a gold episode can be learnt from. They sample nothing: their logprobs are None.
"""

from __future__ import annotations

import base64
from typing import Any

from agents.chat import Chat
from agents.policy import Completion, PolicyError

SCRIPTED_VERSION = -1
"""Policy version of tokens that no weights sampled."""


def tool_call(name: str, **arguments: Any) -> dict[str, Any]:
    """An assistant message that calls one tool."""
    return {"role": "assistant", "content": "", "tool_calls": [{"name": name, "arguments": arguments}]}


def patch_messages(patch: bytes) -> list[dict[str, Any]]:
    """What an agent would say to apply a known patch (any bytes) and submit."""
    try:
        text = patch.decode()
        if not text.endswith("\n") or "\r" in text:  # a here-document keeps neither
            raise ValueError
        fence = "PATCH"
        while fence in text:
            fence += "_"
        command = f"git apply --whitespace=nowarn - <<'{fence}'\n{text}{fence}"
    except ValueError:
        encoded = base64.encodebytes(patch).decode()
        command = f"base64 -d <<'PATCH' | git apply --binary --whitespace=nowarn -\n{encoded}PATCH"
    return [tool_call("bash", command=command), tool_call("submit")]


class ScriptedPolicy:
    """Says one recorded turn after another, token for token."""

    def __init__(self, name: str, turns: list[list[int]]) -> None:
        """`turns`: the tokens of each turn, stop token included."""
        self.name = name
        self._turns = iter(turns)

    @classmethod
    def speaking(cls, name: str, messages: list[dict[str, Any]], chat: Chat) -> ScriptedPolicy:
        """Say `messages`, in the tokens that a model of this family would have used."""
        return cls(name, [chat.speak(message) for message in messages])

    async def complete(self, prompt_ids: list[int], *, max_tokens: int) -> Completion:
        """The next turn, cut at `max_tokens` as a model's would be. Raises `PolicyError` after the last."""
        ids = next(self._turns, None)
        if ids is None:
            raise PolicyError(f"the {self.name} policy's script ended before the episode did")
        kept = ids[:max_tokens]
        return Completion(
            token_ids=kept,
            logprobs=None,
            policy_versions=[SCRIPTED_VERSION] * len(kept),
            finish_reason="stop" if len(kept) == len(ids) else "length",
        )
