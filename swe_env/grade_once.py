"""Grading for groups: the same patch of the same task is graded once, however many episodes made it.

The hidden tests of a patch are run in a sandbox that knows nothing of the episode, so that there is nothing
to be learnt from running them again but whether they are flaky. What infrastructure prevented is not kept.
"""

from __future__ import annotations

from collections import defaultdict

import trio

from swe_env.grading import Grade, Mode, grade
from swe_env.workspace import Workspaces
from tasks.model import Task


class GradedOnce:
    """A grader that remembers. Make one for each batch: it forgets nothing."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes, Mode], Grade] = {}
        self._waiting: defaultdict[tuple[str, bytes, Mode], trio.Lock] = defaultdict(trio.Lock)

    async def __call__(
        self, task: Task, patch: bytes, workspaces: Workspaces, mode: Mode = "strict"
    ) -> Grade:
        """As :func:`swe_env.grading.grade`; tasks are told apart by their id."""
        key = (task.id, patch, mode)
        async with self._waiting[key]:
            if key not in self._known:
                self._known[key] = await grade(task, patch, workspaces, mode)
            return self._known[key]
