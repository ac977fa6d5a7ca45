"""Tasks by name."""

from __future__ import annotations

import pytest

from swe_env.rundir import RunError
from swe_env.sources import find_tasks
from tasks.synthetic import generate


def test_a_range_of_generated_tasks_does_not_hold_its_end() -> None:
    assert find_tasks("synthetic:heldout:7-9") == [generate("heldout", 7), generate("heldout", 8)]
    assert find_tasks("synthetic:train:2") == [generate("train", 0), generate("train", 1)]


@pytest.mark.parametrize("source", ["synthetic:train:0", "synthetic:heldout:5-5", "synthetic:train:9-3"])
def test_an_empty_range_is_refused(source: str) -> None:
    with pytest.raises(RunError, match=f"{source} has no tasks"):
        find_tasks(source)
