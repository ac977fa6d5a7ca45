"""Rewards to advantages: how much better an episode went than the others of its group.

The baseline is the mean reward of the group's valid members, those with a reward: an episode that
infrastructure ended is in no baseline and gets no advantage. Nothing is divided by a standard deviation
(Dr. GRPO, arXiv 2503.20783): that would weigh a task by how rarely it is solved or missed. A group whose
members all did equally well says nothing; it is left out, and counted, before anything is packed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swe_env.episode import Episode
from swe_env.training import Penalty


@dataclass(frozen=True)
class Advantages:
    """What a batch of episodes is worth training on."""

    by_episode: dict[str, float]
    """Episode id -> Â, of the valid members of groups with a spread; the others are absent."""
    groups: int
    """With or without a spread."""
    without_spread: int
    """Groups that were left out: all valid members did equally well, or there are fewer than two."""
    invalid: int
    """Episodes without a reward."""


def advantages(episodes: Iterable[Episode], penalty: Penalty | None = None) -> Advantages:
    """Compare episodes within their groups (`group_id`).

    Raises ValueError for a group of several tasks, and for an id that two episodes have.
    """
    penalty = penalty or Penalty()
    groups: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        groups[episode.group_id].append(episode)
    by_episode: dict[str, float] = {}
    without_spread = invalid = 0
    for name, members in groups.items():
        if len(tasks := {member.task_id for member in members}) > 1:
            raise ValueError(
                f"group {name!r} mixes the tasks {sorted(tasks)}: rewards of one task are compared"
            )
        centred = centre(penalised(members, penalty))
        invalid += centred.count(None)
        own = {member.id: value for member, value in zip(members, centred, strict=True) if value is not None}
        if len(own) != len(members) - centred.count(None) or own.keys() & by_episode.keys():
            raise ValueError(f"group {name!r} has an episode id that is taken: ids must be unique in a batch")
        if any(own.values()):
            by_episode |= own
        else:
            without_spread += 1
    return Advantages(by_episode, len(groups), without_spread, invalid)


def centre(rewards: Sequence[float | None]) -> list[float | None]:
    """Reward minus the mean of those there are; None stays None. All 0 if all are equal."""
    valid = [reward for reward in rewards if reward is not None]
    if not valid or min(valid) == max(valid):  # equal rewards and their mean may differ by rounding
        return [None if reward is None else 0.0 for reward in rewards]
    mean = sum(valid) / len(valid)
    return [None if reward is None else reward - mean for reward in rewards]


def penalised(group: Sequence[Episode], penalty: Penalty) -> list[float | None]:
    """Each member's reward less what it costs; None for a member without one, which sets no standard."""
    valid = [episode for episode in group if episode.reward is not None]
    mean = sum(episode.reward or 0.0 for episode in valid) / max(1, len(valid))
    weights = (penalty.input_tokens, penalty.action_tokens, penalty.turns)
    largest = [max(1, *column) for column in zip(*map(_costs, valid), strict=True)]
    return [
        None
        if episode.reward is None
        else episode.reward
        - mean
        * sum(
            weight * cost / most for weight, cost, most in zip(weights, _costs(episode), largest, strict=True)
        )
        for episode in group
    ]


def _costs(episode: Episode) -> tuple[int, int, int]:
    return episode.tokens - episode.action_tokens, episode.action_tokens, len(episode.turns)
