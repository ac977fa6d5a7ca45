"""The agent: ask the policy, carry out what it says, tell it what came of it, until an end is reached.

This is all there is to the control flow. Whatever stops it, the conversation so far is in the
:class:`~agents.conversation.Conversation` that was handed in, and the work so far is in the sandbox.
"""

from __future__ import annotations

from enum import StrEnum

import trio
from pydantic import BaseModel, ConfigDict, Field

from agents.conversation import Conversation
from agents.policy import ContextOverflow, Policy
from agents.prompts import Prompts
from agents.tools import ToolLimits, execute
from sandboxes.protocol import Sandbox


class End(StrEnum):
    """Why an episode ended. The first five are the policy's doing and are rewarded; the rest are not."""

    SUBMITTED = "submitted"
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    TIME_LIMIT = "time_limit"
    FORMAT_ERRORS = "format_errors"
    SANDBOX_LOST = "sandbox_lost"
    POLICY_ERROR = "policy_error"
    GRADER_ERROR = "grader_error"
    INTERNAL_ERROR = "internal_error"
    """A fault of this package, or of the process that it runs in."""

    @property
    def is_infrastructure(self) -> bool:
        """True for an end that the policy cannot cause: never rewarded, in no baseline, tried again."""
        return self in (End.SANDBOX_LOST, End.POLICY_ERROR, End.GRADER_ERROR, End.INTERNAL_ERROR)


class Budget(BaseModel):
    """How far one episode may go."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    turns: int = Field(default=50, ge=1)
    context_tokens: int = Field(default=32768, ge=64)
    """Longest stream, prompt and answer together [tokens]; at most what the server accepts."""
    turn_tokens: int = Field(default=4096, ge=1)
    """Most tokens sampled in one turn."""
    seconds: float = Field(default=1800.0, gt=0)
    """Wall clock from the first request to the last answer."""
    format_errors: int = Field(default=3, ge=1)
    """Turns in a row in which nothing could be carried out."""


class Tally(BaseModel):
    """What is counted along the way."""

    network_attempts: int = 0
    command_seconds: float = 0.0
    """For which shell commands ran."""


async def run_agent(
    conversation: Conversation,
    policy: Policy,
    sandbox: Sandbox,
    *,
    prompts: Prompts,
    budget: Budget,
    tool_limits: ToolLimits,
    tally: Tally,
) -> End:
    """Play one episode to its end. Raises `PolicyError` and `SandboxLost`, which are infrastructure's.

    The clock cancels only the wait for the policy. A command is given what is left as its deadline
    instead, so that the sandbox stays usable and the work in it can be captured.
    """
    deadline = trio.current_time() + budget.seconds
    failures = 0
    for _ in range(budget.turns):
        room = budget.context_tokens - len(conversation.prompt_ids)
        if room < 1:
            return End.TOKEN_LIMIT
        asked = trio.current_time()
        completion = None
        with trio.move_on_at(deadline):
            try:
                completion = await policy.complete(
                    conversation.prompt_ids, max_tokens=min(room, budget.turn_tokens)
                )
            except ContextOverflow:
                return End.TOKEN_LIMIT
        if completion is None:
            return End.TIME_LIMIT
        answered = trio.current_time()
        turn = conversation.act(completion, seconds=answered - asked)
        outcome = await execute(
            turn,
            truncated=completion.finish_reason == "length",
            sandbox=sandbox,
            prompts=prompts,
            limits=tool_limits,
            deadline=deadline,
        )
        tally.network_attempts += outcome.network_attempts
        tally.command_seconds += outcome.command_seconds
        if outcome.submitted:
            return End.SUBMITTED
        if trio.current_time() >= deadline:
            return End.TIME_LIMIT
        failures = 0 if outcome.executed else failures + 1
        if failures == budget.format_errors:
            return End.FORMAT_ERRORS
        spent = trio.current_time() - answered
        if not conversation.observe(outcome.messages, limit=budget.context_tokens - 1, seconds=spent):
            return End.TOKEN_LIMIT
    return End.TURN_LIMIT
