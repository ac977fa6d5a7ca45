"""Whether trainer and server hold the same weights: both are asked what they think of the same tokens.

A server can take new weights, answer that all went well, and go on sampling from something else. So after
each update, and before the first step, what the trainer's weights say of a few fixed streams is compared
with what the server's say.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from agents.vllm import VllmPolicy
from swe_env.rundir import RunError

STREAMS = 4
"""Streams that are compared."""
SAMPLED = 128
"""Most tokens of one that the server samples itself."""


class Mismatch(BaseModel):
    """|log π of the trainer - log π of the server| over the tokens of the probe streams [nats]."""

    model_config = ConfigDict(frozen=True)

    mean: float
    largest: float


async def sample_streams(policy: VllmPolicy, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Each prompt with what the server samples after it [tokens]. Raises as `VllmPolicy.complete` does."""
    return [
        prompt + (await policy.complete(prompt, max_tokens=SAMPLED)).token_ids for prompt in prompts[:STREAMS]
    ]


async def compare(
    policy: VllmPolicy, streams: Sequence[list[int]], said: Sequence[list[float]], *, limit: float
) -> Mismatch:
    """Ask the server about `streams`, of which the trainer said `said` (one number a token but the first).

    Raises :class:`RunError` if they differ by more than `limit` in the mean; `PolicyError`.
    """
    apart: list[float] = []
    for ids, ours in zip(streams, said, strict=True):
        theirs = (await policy.score(ids))[1:]
        apart += [abs(a - b) for a, b in zip(ours, theirs, strict=True) if b is not None]
    found = Mismatch(mean=sum(apart) / len(apart), largest=max(apart))
    if not found.mean <= limit:  # NaN is not within it
        raise RunError(
            f"trainer and server differ by {found.mean:.2g} nats a token (at most {found.largest:.2g}), more "
            f"than {limit:g}: the server has other weights or another precision; raise server.mismatch only "
            "if that is what it is meant to have"
        )
    return found
