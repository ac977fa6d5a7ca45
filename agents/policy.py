"""What a policy is: token ids in, sampled token ids out, each with its logprob and policy version."""

from __future__ import annotations

from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field


class PolicyError(Exception):
    """The policy's server failed, is gone, or answered no completion (infrastructure)."""


class ContextOverflow(Exception):
    """The prompt leaves no room for a single token: the policy's own doing, ends in `token_limit`."""


class Sampling(BaseModel):
    """How tokens are drawn. No `top_p` or `top_k`: training cannot replay a truncated distribution."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy (evaluation only: greedy episodes carry no usable logprobs)."""


class Completion(BaseModel):
    """What one request sampled, exactly as the engine reported it; the stop token included."""

    model_config = ConfigDict(frozen=True)

    token_ids: list[int]
    """[tokens] ids in sampling order."""
    logprobs: list[float] | None
    """[tokens] natural log of the probability each id was sampled with; None for a scripted policy."""
    policy_versions: list[int]
    """[tokens] version of the weights that sampled each id (an in-flight update can change it midway)."""
    finish_reason: Literal["stop", "length"]
    """`stop`: a stop token was sampled, and is the last id. `length`: the token budget ran out."""


class Policy(Protocol):
    """Anything that continues a token stream."""

    @property
    def name(self) -> str:
        """For tables and records."""
        ...

    async def complete(self, prompt_ids: list[int], *, max_tokens: int) -> Completion:
        """Sample a continuation of `prompt_ids` of at most `max_tokens` tokens.

        Raises :class:`PolicyError` when the server fails in a way that is not the policy's doing.
        """
        ...
