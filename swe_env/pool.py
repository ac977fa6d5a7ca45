"""Which groups of episodes may begin, and which of them a step learns from: bookkeeping, without any I/O.

Step N learns from `size` groups and makes version N + 1. Its staleness is N minus the oldest version that
sampled a token of it. A group that begins now is behind those that were begun before it, so the step that
will take it is known, and it begins only if that step is at most `most_stale` after the version that is
served: what is played is used, but for a group that takes longer than those that came after it. With
`most_stale` 0 a step's groups are played by the newest version, and by no other.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Reason = Literal["stale", "lost", "no spread"]


class Group(BaseModel):
    """A group that has been played."""

    model_config = ConfigDict(frozen=True)

    number: int
    """From 0, in the order in which they were begun."""
    oldest: int
    """Version of its oldest sampled token."""
    valid: int
    """Members with a reward."""
    has_spread: bool
    """Some went better than others: there is something to learn."""
    reward: float = 0.0
    """Mean over valid members."""


class Batch(BaseModel):
    """What a step is made of, and what was dropped since the step before."""

    model_config = ConfigDict(frozen=True)

    step: int
    """From 0: the version of the weights that learn from it."""
    groups: list[int]
    dropped: dict[int, Reason] = {}
    reward: float = 0.0
    """Mean over groups played since the step before, those without a spread included."""
    seconds: float = 0.0
    """For which it was waited."""
    at_once: int = 0
    """Episodes that might be in flight then: see :mod:`swe_env.flow`."""


PATIENCE = 4
"""After so many batches of groups without a spread a step makes do with what there is."""


class Pool:
    """The groups between their beginning and the step that takes them."""

    def __init__(
        self, *, size: int, most_stale: int, steps: int, step: int = 0, replace: bool = True, floor: int = 2
    ) -> None:
        """`steps` is that of the whole training, `step` the first that still wants a batch. `replace`: groups
        without a spread are dropped, others are played for them. Below `floor` valid members a group is lost.
        """
        self.step = step
        self.playing: set[int] = set()
        self.ready: list[Group] = []
        self.dropped: dict[int, Reason] = {}
        self._without_spread: list[Group] = []
        """Dropped since the step before."""
        self._size = size
        self._most_stale = most_stale
        self._steps = steps
        self._replace = replace
        self._floor = floor

    def may_begin(self, version: int) -> bool:
        """Whether one more group may begin while `version` is served."""
        taken_by = self.step + (len(self.playing) + len(self.ready)) // self._size
        return taken_by <= version + self._most_stale and taken_by < self._steps

    def may_go_on(self, version: int) -> bool:
        """Whether a group that was begun by a process before this one may go on while `version` is served."""
        return self.step <= version + self._most_stale

    def begin(self, number: int) -> None:
        self.playing.add(number)

    def end(self, group: Group) -> None:
        """It has been played."""
        self.playing.discard(group.number)
        if group.valid < self._floor:
            self.dropped[group.number] = "lost"
        elif self._replace and not group.has_spread:
            self.dropped[group.number] = "no spread"
            self._without_spread.append(group)
        else:
            self.ready.append(group)

    def batch(self) -> Batch | None:
        """What the next step learns from, the longest waiting first; None if there is not enough yet.

        Where hardly a group has a spread it may be less than was asked for, or nothing.
        """
        for group in [one for one in self.ready if self.step - one.oldest > self._most_stale]:
            self.ready.remove(group)
            self.dropped[group.number] = "stale"
        if len(self.ready) < self._size and len(self._without_spread) < PATIENCE * self._size:
            return None
        self.ready.sort(key=lambda group: group.number)
        taken, self.ready = self.ready[: self._size], self.ready[self._size :]
        counted = [*taken, *self._without_spread]
        found = Batch(
            step=self.step,
            groups=[group.number for group in taken],
            dropped=self.dropped,
            reward=sum(group.reward for group in counted) / max(1, len(counted)),
        )
        self.step, self.dropped, self._without_spread = self.step + 1, {}, []
        return found
