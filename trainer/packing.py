"""Token streams to micro-batches: many streams end to end in one row, none longer than the budget.

A micro-batch is as long as its streams: nothing in it is padding. What is lost is the time in which ranks
wait for the one with most tokens, so streams are spread evenly over micro-batches, and those that ranks run
at the same time are of about one size. Every rank gets the same number of micro-batches, because each is a
round of collectives; a rank with nothing to do gets an empty one, a single token that no loss is on.

Every rank can make the whole plan for itself: it depends on lengths only, and on nothing random.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from swe_env.episode import Episode


@dataclass(frozen=True)
class Stream:
    """One segment of an episode, ready to be trained on. All lists have one entry a token [tokens]."""

    token_ids: list[int]
    is_action: list[bool]
    logprobs: list[float]
    """log μ of action tokens; NaN where nobody recorded it, 0 for the others."""
    policy_versions: list[int]
    """Of action tokens; -1 for the others."""
    advantage: float
    name: str
    """For messages: the episode and the number of its segment."""


@dataclass(frozen=True)
class MicroBatch:
    """Streams end to end. Tensors have one entry a token [tokens] unless they say otherwise."""

    token_ids: Tensor
    """int64."""
    position_ids: Tensor
    """int64, from 0 in each stream."""
    stream_ids: Tensor
    """int64, which stream of this micro-batch, from 0; in order."""
    is_action: Tensor
    """bool. Never true of a stream's first token, which nothing predicts."""
    logprobs: Tensor
    """float32, log μ of action tokens, 0 elsewhere."""
    advantages: Tensor
    """float32, the stream's Â on action tokens, 0 elsewhere."""
    policy_versions: Tensor
    """int64, of action tokens, -1 elsewhere."""
    boundaries: Tensor
    """int32 [streams + 1]: stream i is `[boundaries[i]:boundaries[i + 1]]` (FlashAttention's cu_seqlens)."""

    @property
    def action_tokens(self) -> int:
        return int(self.is_action.sum())

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on another device."""
        return MicroBatch(**{one.name: getattr(self, one.name).to(device) for one in fields(self)})


class PackingError(ValueError):
    """A stream cannot be trained on as it is. The message is one line: which, and what to change."""


def streams(episode: Episode, advantage: float, *, logprobs_required: bool = True) -> list[Stream]:
    """The segments of `episode` in which the policy sampled anything, each with the episode's advantage.

    Raises `PackingError` if an action token has no recorded log-probability, as those of scripted policies
    have none; without `logprobs_required` (supervised training) it is NaN instead.
    """
    found: list[Stream] = []
    for number, segment in enumerate(episode.segments):
        if not any(segment.is_action):
            continue
        name = f"{episode.id}, segment {number}"
        if segment.is_action[0]:
            raise PackingError(f"{name} begins with an action token, which no token predicts: drop it")
        missing = [math.nan if action else 0.0 for action in segment.is_action]
        pairs = zip(segment.logprobs, missing, strict=True)
        logprobs = [default if logprob is None else logprob for logprob, default in pairs]
        if logprobs_required and any(map(math.isnan, logprobs)):
            raise PackingError(
                f"{name} has action tokens without a log-probability: policy {episode.policy!r} "
                "records none, use its episodes for supervised training"
            )
        found.append(
            Stream(
                token_ids=segment.token_ids,
                is_action=segment.is_action,
                logprobs=logprobs,
                policy_versions=[-1 if version is None else version for version in segment.policy_versions],
                advantage=advantage,
                name=name,
            )
        )
    return found


def pack(streams: Sequence[Stream], *, budget: int, ranks: int = 1) -> list[list[MicroBatch]]:
    """Micro-batches of at most `budget` tokens: one list a rank, all of the same length.

    Raises `PackingError` for a stream that is longer than the budget.
    """
    for stream in streams:
        if len(stream.token_ids) > budget:
            raise PackingError(
                f"{stream.name} has {len(stream.token_ids)} tokens, more than a micro-batch's {budget}: "
                "raise the token budget or lower the context limit of episodes"
            )
    layout = plan([len(stream.token_ids) for stream in streams], budget=budget, ranks=ranks)
    return [[micro_batch([streams[index] for index in own]) for own in rank] for rank in layout]


def plan(lengths: Sequence[int], *, budget: int, ranks: int = 1) -> list[list[list[int]]]:
    """Which streams go where: `[rank][micro-batch]` is a list of indices into `lengths` [tokens each].

    The longest stream not yet placed goes to the emptiest micro-batch; if it does not fit there, the same
    is tried with one more micro-batch a rank. No length may be above `budget`.
    """
    rounds = max(1, math.ceil(sum(lengths) / (budget * ranks)))
    while (bins := _spread(lengths, rounds * ranks, budget)) is None:
        rounds += 1
    bins.sort(key=lambda own: -sum(lengths[index] for index in own))
    return [[sorted(bins[round_ * ranks + rank]) for round_ in range(rounds)] for rank in range(ranks)]


def waiting(lengths: Sequence[int], layout: Sequence[Sequence[Sequence[int]]]) -> float:
    """Share of a plan's token slots that are empty, if each round takes as long as its longest micro-batch.

    It is also the share of padding, if the micro-batches of a round are to have one shape.
    """
    sizes = [[sum(lengths[index] for index in own) for own in rank] for rank in layout]
    slots = len(sizes) * sum(map(max, zip(*sizes, strict=True)))
    return 1 - sum(lengths) / slots if slots else 0.0


def micro_batch(streams: Sequence[Stream]) -> MicroBatch:
    """Lay `streams` end to end, in the order given; without any, an empty micro-batch."""
    if not streams:
        return micro_batch([Stream([0], [False], [0.0], [-1], 0.0, "empty")])
    lengths = [len(stream.token_ids) for stream in streams]

    def joined(lists: list[list[int]] | list[list[float]] | list[list[bool]], dtype: torch.dtype) -> Tensor:
        return torch.cat([torch.tensor(one, dtype=dtype) for one in lists])

    is_action = joined([stream.is_action for stream in streams], torch.bool)
    stream_ids = torch.arange(len(streams)).repeat_interleave(torch.tensor(lengths))
    advantages = torch.tensor([stream.advantage for stream in streams], dtype=torch.float32)
    return MicroBatch(
        token_ids=joined([stream.token_ids for stream in streams], torch.int64),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        stream_ids=stream_ids,
        is_action=is_action,
        logprobs=joined([stream.logprobs for stream in streams], torch.float32),
        advantages=advantages[stream_ids] * is_action,
        policy_versions=joined([stream.policy_versions for stream in streams], torch.int64),
        boundaries=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
    )


def _spread(lengths: Sequence[int], count: int, budget: int) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, number) for number in range(count)]
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        filled, number = emptiest[0]
        if filled + lengths[index] > budget:
            return None
        bins[number].append(index)
        heapq.heapreplace(emptiest, (filled + lengths[index], number))
    return bins
