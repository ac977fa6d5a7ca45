"""How often a process of a training may be started again before a person has to look."""

from __future__ import annotations

from collections import Counter

from sandboxes.protocol import Say
from swe_env.rundir import RunError

MOST = 5
"""Starts of one process in place of one that was killed, without a step in between."""


class Restarts:
    """Counts them, and says of each what happened."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._counts: Counter[str] = Counter()

    def again(self, name: str, error: Exception) -> None:
        """`name` is about to be started again, because of `error`. Raises :class:`RunError`: too often."""
        self._counts[name] += 1
        if self._counts[name] > MOST:
            raise RunError(f"{error} ({MOST} times before, without a step in between)") from error
        self._say(f"{error}: starting it again")

    def step_is_done(self) -> None:
        """What was before is forgiven."""
        self._counts.clear()
